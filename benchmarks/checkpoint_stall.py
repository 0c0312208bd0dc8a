"""What a save in the background takes from the training that goes on beside it."""

import dataclasses
import shutil
import time
from pathlib import Path

from checkpoint_io import make_replica

from megalite.config.describe import replace
from megalite.parity.pool import RankContext
from megalite.parity.trajectory import Runner
from megalite.training.saving import Saver

STEPS = 12


def stall_round(context: RankContext, ranks: int, root: str) -> dict[str, float]:
    """Seconds: a step alone, a step while a save is written, the calls that begin a save in both ways, the write."""
    replica = make_replica(context, ranks)
    folder = Path(root) / "stall"
    if context.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    world, device = replica.topology.world, replica.topology.device
    world.gather_json(None, device)
    runner = Runner(replica)
    result: dict[str, float] = {}
    for way, background in (("sync", False), ("async", True)):
        config = replace(replica.config, save=str(folder), async_save=background)
        saver = Saver(dataclasses.replace(replica, config=config), tokenizer=None, log=lambda line: None)
        for attempt in range(2):  # the first copy also gets its memory
            runner.step()
            alone = [_seconds(runner.step) for _ in range(STEPS // 2)]
            begun = time.perf_counter()
            result[f"{way} call"] = _seconds(lambda saver=saver: saver.begin(runner.progress))
            beside: list[float] = []
            while saver._under_way is not None:
                beside.append(_seconds(runner.step))
                saver.poll()
            if background and attempt:
                result["written"] = time.perf_counter() - begun
                result["step beside"] = sum(beside) / len(beside)
            result["step"] = sorted(alone)[len(alone) // 2]
    return result


def _seconds(work: object) -> float:
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start
