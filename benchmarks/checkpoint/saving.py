"""Save and load one training state: by megalite, by torch and by the plain file system, on ranks of a pool."""

import dataclasses
import hashlib
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import megalite.checkpoint.load as load_module
import megalite.checkpoint.safetensors_file as safetensors_file
from benchmarks import common
from megalite.checkpoint.files import CHUNK, write_all
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.optimizers.schedules import Progress
from megalite.parity.pool import RankContext
from megalite.parity.trajectory import Runner
from megalite.training.replica import Replica, build_replica
from megalite.training.resume import load
from megalite.training.saving import Saver, save
from megalite.training.state_tensors import state_tensors

Seconds = dict[str, float]

MODEL = common.settings(
    "num_layers=8 hidden_size=512 num_attention_heads=8 vocab_size=16384 seq_length=128 micro_batch_size=1 "
    "precision=bf16 lr=1e-3 device=cpu position_embedding_type=rope normalization=RMSNorm activation=swiglu "
    "add_bias_linear=false tie_embeddings=false train_iters=100"
)
TINY = {**MODEL, "num_layers": 2, "hidden_size": 32, "vocab_size": 128}


def make_replica(context: RankContext, ranks: int, *, tiny: bool = False) -> Replica:
    """A model with about half a gigabyte of weights and optimizer states; ZeRO-1 over two ranks."""
    parallel = {"dp": ranks, "dp_strategy": "distributed-optimizer"} if ranks > 1 else {}
    config = replace(RunConfig(), **(TINY if tiny else MODEL), **parallel, global_batch_size=ranks)
    config = validate(config, ranks)
    replica = build_replica(config, context.topology_of(config))
    for shard in replica.strategy.shards:
        for state in replica.optimizer.state(shard.main_param).values():
            state.uniform_(0.0, 1e-4)  # as after training: a state of zeros would be unrealistic
    return replica


class NoDigest:
    """Replaces the hash, to measure its cost."""

    def update(self, chunk: memoryview) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 64  # has the form of a hash

    def close(self) -> None: ...


def timed(replica: Replica, work: Callable[[], Any]) -> float:
    world = replica.topology.world

    def everyone() -> None:
        work()
        world.gather_json(None)

    world.gather_json(None)
    return common.seconds_of(everyone)


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that they are read from the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def saving_round(context: RankContext, ranks: int, root: str, seed: int, tiny: bool = False) -> tuple[Seconds, Seconds, int]:
    """Save and load by each method once, in an order drawn from `seed`. Returns seconds, and bytes over all ranks.

    The order matters: recent writes and removals influence the file system's next operations."""
    replica = make_replica(context, ranks, tiny=tiny)
    world, rank = replica.topology.world, context.rank
    tensors = {f"{entry.key}.{index}": tensor for index, (entry, tensor) in enumerate(state_tensors(replica))}
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    names = {f"{rank}.{key}": tensor for key, tensor in tensors.items()}
    path = Path(root) / "round"

    def ours() -> None:
        save(replica, path, Progress(1, 1), tokenizer=None)

    def ours_without_hash() -> None:
        with mock.patch.object(safetensors_file, "RunningDigest", NoDigest):
            ours()

    def load_unverified() -> None:
        with mock.patch.object(load_module, "verify_files", lambda *given, **named: ""):
            _load(replica, path)

    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "raw": (lambda: _raw_write(path / f"{rank}", flat.numpy().data), lambda: _raw_read(path / f"{rank}", flat.numpy().data)),
        "megalite": (ours, lambda: _load(replica, path)),
        "megalite, no hash": (ours_without_hash, load_unverified),
        "torch DCP": (lambda: dcp.save(names, checkpoint_id=path), lambda: dcp.load(names, checkpoint_id=path)),
        "torch.save": (lambda: _torch_save(tensors, path / f"{rank}.pt"), lambda: _torch_load(tensors, path / f"{rank}.pt")),
    }
    saved: Seconds = {}
    loaded: Seconds = {}
    for way in random.Random(seed).sample(list(ways), len(ways)):
        for clean in (True, False):
            if rank == 0:
                if clean:
                    shutil.rmtree(path, ignore_errors=True)
                    path.mkdir(parents=True)
                    os.sync()
                else:
                    forget(path)
            world.gather_json(None)
            (saved if clean else loaded)[way] = timed(replica, ways[way][0 if clean else 1])
    saved["sha256 alone"] = timed(replica, lambda: hashlib.sha256(flat.numpy().data).hexdigest())
    if rank == 0:
        shutil.rmtree(path)
    return saved, loaded, sum(world.gather_json(flat.numel()))


def _raw_write(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    write_all(descriptor, data)
    os.fsync(descriptor)
    os.close(descriptor)


def _raw_read(path: Path, data: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(data), CHUNK):
            file.readinto(data[start : start + CHUNK])


def _load(replica: Replica, folder: Path) -> None:
    load(replica, folder, tokenizer=None, log=lambda line: None)


def _torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _torch_load(tensors: dict[str, torch.Tensor], path: Path) -> None:
    for key, value in torch.load(path, weights_only=True).items():
        tensors[key].copy_(value)


STEPS = 6


def stall_round(context: RankContext, ranks: int, root: str, tiny: bool = False) -> dict[str, float]:
    """Seconds of a step, of a step during a background save, of starting a save in both modes, and of the write."""
    replica = make_replica(context, ranks, tiny=tiny)
    folder = Path(root) / "stall"
    if context.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    replica.topology.world.gather_json(None)
    runner = Runner(replica)
    result: dict[str, float] = {}
    for way, background in (("sync", False), ("async", True)):
        config = replace(replica.config, save=str(folder), async_save=background)
        saver = Saver(dataclasses.replace(replica, config=config), tokenizer=None, log=lambda line: None)
        for attempt in range(2):  # the first copy also allocates its memory
            runner.step()
            result["step"] = statistics.median(common.seconds_of(runner.step) for _ in range(STEPS))
            begun = time.perf_counter()
            result[f"{way} call"] = common.seconds_of(lambda saver=saver: saver.begin(runner.progress))
            beside: list[float] = []
            while saver._under_way is not None:
                beside.append(common.seconds_of(runner.step))
                saver.poll()
            if background and attempt:
                result["written"] = time.perf_counter() - begun
                result["step beside"] = statistics.fmean(beside)
    return result
