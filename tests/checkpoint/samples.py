"""Shared by the checkpoint tests: sample tensors, ways to split them, and threads as ranks."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import MANIFEST_NAME, seal
from megalite.checkpoint.save import SavedTensor, preamble, save_checkpoint
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec, Slice

CPU = torch.device("cpu")
SOLO = Group.solo("world")

# A scheme maps (shape, ranks) to the slice of each rank; an empty slice or None: the rank has no part.
Scheme = Callable[[tuple[int, ...], int], Sequence[Slice | None]]


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest of a checkpoint and update its hash."""
    path = checkpoint / MANIFEST_NAME
    body = json.loads(path.read_text())
    body.pop("sha256")
    change(body)
    path.write_text(seal(body))


class Exchange:
    """State shared by the threads of a simulated world."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[str] = [""] * size


@dataclass(frozen=True, eq=False)
class ThreadGroup(Group):
    """A group with threads as ranks; it has the collectives that saving and loading use."""

    exchange: Exchange = field(default_factory=lambda: Exchange(1))

    def gather_json(self, value: Any) -> list[Any]:
        self.exchange.slots[self.rank] = json.dumps(value)
        self.exchange.barrier.wait()
        rows = [json.loads(slot) for slot in self.exchange.slots]
        self.exchange.barrier.wait()
        return rows

    def broadcast_json(self, value: Any) -> Any:
        return self.gather_json(value)[0]


def on_threads(size: int, fn: Callable[[Group], Any]) -> list[Any]:
    """Run `fn(group)` on every simulated rank. Returns results and exceptions in rank order."""
    exchange = Exchange(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        group = ThreadGroup("world", tuple(range(size)), rank, exchange=exchange)
        try:
            results[rank] = fn(group)
        except Exception as error:
            results[rank] = error
            if isinstance(error, (AssertionError, threading.BrokenBarrierError)):
                exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def sample_tensors(seed: int = 0) -> dict[tuple[str, str, str], torch.Tensor]:
    """(key group, state, name) -> full tensor: every dtype, 0 to 3 dimensions, sizes that leave data unaligned."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return {
        ("weight", "", "norm.weight"): normal(7).to(torch.bfloat16),
        ("weight", "", "embedding.weight"): normal(12, 8),
        ("weight", "", "layers.0.mlp.weight"): normal(9, 5).half(),
        ("weight", "", "experts.weight"): normal(4, 3, 6).to(torch.bfloat16),
        ("optimizer", "main_param", "embedding.weight"): normal(12, 8).double(),
        ("optimizer", "exp_avg", "embedding.weight"): normal(12, 8),
        ("optimizer", "exp_avg", "norm.weight"): normal(7),
        ("optimizer", "step", "norm.weight"): torch.tensor(2**40 + seed),
    }


def saved(identity: tuple[str, str, str], full: torch.Tensor, bounds: Slice) -> SavedTensor:
    group, state, name = identity
    spec = ShardSpec(name=name, global_shape=tuple(full.shape), slice=bounds)
    return SavedTensor(key_group=group, state=state, spec=spec, dtype=full.dtype)  # type: ignore[arg-type]


def cut(full: torch.Tensor, bounds: Slice) -> torch.Tensor:
    return full[tuple(slice(*pair) for pair in bounds)]


def _edges(size: int, ranks: int) -> list[tuple[int, int]]:
    """Uneven consecutive ranges, some of them empty if there are more ranks than elements."""
    edges = [min(size, (size * rank + rank) // ranks) for rank in range(ranks)] + [size]
    return [(edges[rank], edges[rank + 1]) for rank in range(ranks)]


def rows(shape: tuple[int, ...], ranks: int) -> list[Slice | None]:
    """Split along dimension 0; a scalar belongs to the last rank."""
    if not shape:
        return [None] * (ranks - 1) + [()]
    rest = tuple((0, size) for size in shape[1:])
    return [(pair, *rest) for pair in _edges(shape[0], ranks)]


def columns(shape: tuple[int, ...], ranks: int) -> list[Slice | None]:
    """Split along the last dimension; a scalar belongs to the first rank."""
    if not shape:
        return [(), *[None] * (ranks - 1)]
    rest = tuple((0, size) for size in shape[:-1])
    return [(*rest, pair) for pair in _edges(shape[-1], ranks)]


def staggered(shape: tuple[int, ...], ranks: int) -> list[Slice | None]:
    """Rank 0 has the first two rows, the others split the columns of the rest: the parts form no grid."""
    if len(shape) < 2 or ranks < 3:
        return rows(shape, ranks)
    rest = tuple((0, size) for size in shape[1:-1])
    top: Slice = ((0, 2), *rest, (0, shape[-1]))
    return [top, *(((2, shape[0]), *rest, pair) for pair in _edges(shape[-1], ranks - 1))]


def whole_on_one(shape: tuple[int, ...], ranks: int) -> list[Slice | None]:
    """One rank has the whole tensor; which one depends on the shape."""
    whole: Slice = tuple((0, size) for size in shape)
    return [whole if rank == sum(shape) % ranks else None for rank in range(ranks)]


def plan_of(
    tensors: dict[tuple[str, str, str], torch.Tensor], scheme: Scheme, rank: int, ranks: int
) -> tuple[list[SavedTensor], list[torch.Tensor]]:
    plan, data = [], []
    for identity, full in tensors.items():
        bounds = scheme(tuple(full.shape), ranks)[rank]
        if bounds is not None:
            plan.append(saved(identity, full, bounds))
            data.append(cut(full, bounds))
    return plan, data


def save_as(
    folder: Path,
    group: Group,
    *,
    step: int,
    scheme: Scheme = rows,
    seed: int = 0,
    stream: Callable[[Sequence[torch.Tensor]], Iterator[torch.Tensor]] = iter,
    counters: dict[str, Any] | None = None,
    host: str | None = None,
) -> Path:
    plan, data = plan_of(sample_tensors(seed), scheme, group.rank, group.size)
    about = preamble(
        step,
        counters={"consumed_samples": step * 8} if counters is None else counters,
        config={"model": {"hidden_size": 8}},
        layout={"tp": group.size},
        tokenizer="0" * 64,
        kernels={},
    )
    return save_checkpoint(folder, about, plan=plan, tensors=stream(data), world=group, host=host)


def find(folder: Path, step: int | None = None, log: Callable[[str], None] = print) -> Checkpoint:
    return find_checkpoint(folder, step=step, world=SOLO, log=log)


def assert_holds(checkpoint: Checkpoint, seed: int = 0) -> None:
    """Check that the checkpoint has exactly the sample tensors of `seed`, bit for bit."""
    tensors = sample_tensors(seed)
    keys = {saved(identity, full, tuple((0, n) for n in full.shape)).key: full for identity, full in tensors.items()}
    assert checkpoint.keys() == sorted(keys)
    for key, full in keys.items():
        read = checkpoint.read(key, device=CPU)
        assert read.dtype == full.dtype and torch.equal(read, full), key
