"""Saving and loading one training state: ours, torch's ways, and the bare file system, on the ranks of a pool."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import megalite.checkpoint.load as load_module
import megalite.checkpoint.safetensors_file as safetensors_file
from megalite.checkpoint.files import CHUNK, write_all
from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.optimizers.schedules import Progress
from megalite.parity.pool import RankContext
from megalite.training.checkpointing import load
from megalite.training.replica import Replica, build_replica
from megalite.training.saving import save
from megalite.training.state_tensors import state_tensors

Seconds = dict[str, float]

MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 16384,
    "seq_length": 128,
    "micro_batch_size": 1,
    "precision": "bf16",
    "lr": 1e-3,
    "device": "cpu",
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "tie_embeddings": False,
}


def make_replica(context: RankContext, ranks: int) -> Replica:
    """A model whose weights and optimizer states take about half a gigabyte; over two ranks, ZeRO-1."""
    parallel = {"dp": ranks, "dp_strategy": "distributed-optimizer"} if ranks > 1 else {}
    config = replace(RunConfig(), **MODEL, **parallel, global_batch_size=ranks, train_iters=100)
    config = validate(config, ranks)
    replica = build_replica(config, context.topology_of(config))
    for shard in replica.strategy.shards:
        for state in replica.optimizer.state(shard.main_param).values():
            state.uniform_(0.0, 1e-4)  # as after some training: all zeros are no checkpoint
    return replica


class NoDigest:
    """In place of the hash, to see what it costs."""

    def update(self, chunk: memoryview) -> None:
        """Nothing."""

    def finish(self) -> str:
        """The form of a hash."""
        return "0" * 64

    def close(self) -> None:
        """Nothing."""


def timed(replica: Replica, work: Callable[[], Any]) -> float:
    """Seconds until every rank is done."""
    world, device = replica.topology.world, replica.topology.device
    world.gather_json(None, device)
    start = time.perf_counter()
    work()
    world.gather_json(None, device)
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Make the system forget the files, so that they are read from the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def saving_round(context: RankContext, ranks: int, root: str) -> tuple[Seconds, Seconds, int]:
    """Each way of saving and of loading once; seconds of each, and bytes over all ranks."""
    replica = make_replica(context, ranks)
    world, device, rank = replica.topology.world, replica.topology.device, context.rank
    tensors = {f"{entry.key}.{index}": tensor for index, (entry, tensor) in enumerate(state_tensors(replica))}
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
    folder = Path(root)
    saved: Seconds = {}
    loaded: Seconds = {}

    def fresh(name: str) -> Path:
        path = folder / name
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            os.sync()
        world.gather_json(None, device)
        return path

    def cold(path: Path) -> None:
        if rank == 0:
            forget(path)
        world.gather_json(None, device)

    path = fresh("raw")
    saved["raw"] = timed(replica, lambda: _raw_write(path / f"{rank}", flat.numpy().data))
    cold(path)
    loaded["raw"] = timed(replica, lambda: _raw_read(path / f"{rank}", flat.numpy().data))
    fresh("raw")

    path = fresh("plain")
    with _patched(safetensors_file, "RunningDigest", NoDigest):
        saved["megalite, no hash"] = timed(
            replica, lambda: save(replica, path, Progress(1, 1), tokenizer=None)
        )
    path = fresh("plain")
    saved["megalite"] = timed(replica, lambda: save(replica, path, Progress(1, 1), tokenizer=None))
    cold(path)
    with _patched(load_module, "entry_fault", lambda path, entry, from_disk=False: None):
        loaded["megalite, not verified"] = timed(replica, lambda: _load(replica, path))
    cold(path)
    loaded["megalite"] = timed(replica, lambda: _load(replica, path))
    fresh("plain")

    path = fresh("dcp")
    names = {f"{rank}.{key}": tensor for key, tensor in tensors.items()}
    saved["torch DCP"] = timed(replica, lambda: dcp.save(names, checkpoint_id=path))
    cold(path)
    loaded["torch DCP"] = timed(replica, lambda: dcp.load(names, checkpoint_id=path))
    fresh("dcp")

    path = fresh("torch")
    saved["torch.save"] = timed(replica, lambda: _torch_save(tensors, path / f"{rank}.pt"))
    cold(path)
    loaded["torch.save"] = timed(replica, lambda: _torch_load(tensors, path / f"{rank}.pt"))
    fresh("torch")
    return saved, loaded, sum(world.gather_json(flat.numel(), device))


class _patched:
    def __init__(self, module: Any, name: str, value: Any) -> None:
        self._place, self._value = (module, name), value

    def __enter__(self) -> None:
        self._before = getattr(*self._place)
        setattr(*self._place, self._value)

    def __exit__(self, *exception: object) -> None:
        setattr(*self._place, self._before)


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
