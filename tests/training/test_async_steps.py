"""The asynchronous parameter server on real ranks with tp and pp: evaluated, saved and resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data_parallel.parameter_server import AsyncParameterServer
from megalite.data_parallel.server import Event, Kind
from megalite.optimizers.schedules import Progress
from megalite.training.resume import load
from megalite.training.saving import save
from tests.data_parallel.scripted import Scripted
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Part, Runner, assemble, build, local_parts, tiny_config

Settings = dict[str, Any]
STEPS = 4
PULL, PUSH = Kind.PULL, Kind.PUSH
SCRIPT = [
    *(Event(kind, 1) for kind in (PULL, PUSH, PULL)),
    Event(PULL, 0),
    *(Event(kind, 1) for kind in (PUSH,)),
    *(Event(kind, 0) for kind in (PUSH, PULL, PUSH, PULL)),
    *(Event(kind, 1) for kind in (PULL, PUSH, PULL, PUSH)),
]
"""Worker 0's first push comes from weights that are two updates old, when worker 1 is two steps ahead."""


def worker(
    context: RankContext, world: int, settings: Settings, steps: int, folder: Path | None, resume: bool
) -> dict[str, Any]:
    replica = build(context, tiny_config(world, **settings))
    strategy = replica.strategy
    progress = Progress(0, 0)
    if resume:
        assert folder is not None
        progress = load(replica, folder, tokenizer=None, log=lambda line: None)
    if context.rank == 0 and isinstance(strategy, AsyncParameterServer) and settings.get("max_staleness"):
        # The other servers receive it.
        strategy.order = Scripted(SCRIPT)
    runner = Runner(replica, progress)
    results = [runner.step() for _ in range(steps)]
    with strategy.consensus():
        state = {kind: local_parts(replica, kind) for kind in ("weight", "main_param", "exp_avg_sq")}
        evaluation = runner.evaluate()
    if folder is not None and not resume:
        save(replica, folder, runner.progress, tokenizer=None)
    strategy.finish()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "state": state,
        "evaluation": evaluation,
    }


def run(
    world: int, settings: Settings, *, steps: int = STEPS, folder: Path | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    settings = {"dp_strategy": "async-parameter-server", **settings}
    return run_ranks(world, worker, world, settings, steps, folder, resume)


def whole(found: list[dict[str, Any]], kind: str) -> dict[str, np.ndarray]:
    """Return whole tensors. Raises if two ranks with the same slice have different bits."""
    parts: list[dict[str, Part]] = [one["state"][kind] for one in found]
    return assemble(parts)


def assert_same_bits(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for kind in ("weight", "main_param", "exp_avg_sq"):
        ours, theirs = whole(one, kind), whole(other, kind)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert np.array_equal(ours[name], theirs[name]), f"{kind} of {name}"


@pytest.mark.parametrize("split", ["tp", "pp"])
def test_servers_of_all_model_parts_use_the_same_order(split: str) -> None:
    stale = {"max_staleness": 1}
    plain, found = run(2, stale), run(4, {**stale, split: 2})
    workers = [0, 0, 1, 1] if split == "tp" else [0, 1, 0, 1]
    for rank, index in enumerate(workers):
        for name in ("losses", "norms"):
            np.testing.assert_allclose(found[rank][name], plain[index][name], rtol=1e-9)
        np.testing.assert_allclose(found[rank]["evaluation"], plain[0]["evaluation"], rtol=1e-9)
    assert plain[0]["losses"] != plain[1]["losses"], "each worker has its own samples"
    for kind in ("weight", "exp_avg_sq"):
        ours, wanted = whole(found, kind), whole(plain, kind)
        for name in wanted:
            np.testing.assert_allclose(ours[name], wanted[name], rtol=1e-7, atol=1e-12, err_msg=name)


def test_resume_is_exact(tmp_path: Path) -> None:
    settings = {"max_staleness": 0, "precision": "bf16"}
    straight = run(2, settings, steps=4)
    run(2, settings, steps=2, folder=tmp_path)
    again = run(2, settings, steps=2, folder=tmp_path, resume=True)
    assert_same_bits(again, straight)
    assert [one["losses"] for one in again] == [one["losses"][2:] for one in straight]


def test_resume_with_other_workers_or_strategy(tmp_path: Path) -> None:
    settings = {"max_staleness": 1, "precision": "bf16"}
    saved = run(2, settings, folder=tmp_path)
    for world, others in ((1, {}), (3, {"global_batch_size": 9}), (2, {"dp_strategy": "distributed-optimizer"})):
        again = run(world, {**settings, "max_staleness": 0, **others}, steps=0, folder=tmp_path, resume=True)
        assert_same_bits(again, saved)
