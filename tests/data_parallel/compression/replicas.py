"""Run codecs over one irregular bucket, on ranks of the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megalite.config.parallel import DataParallelConfig
from megalite.data_parallel.buckets import Bucket
from megalite.data_parallel.codec import Codec
from megalite.data_parallel.compression import build_codec
from megalite.data_parallel.facts import BucketKind, Placement
from megalite.data_parallel.wire import Background, Channel, WireCounter
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from tests.support.ranks import RankContext

SHAPES = {"one": (1,), "tall": (130, 40), "few": (5, 3), "experts": (2, 24, 70), "vector": (77,), "wide": (20, 90)}
"""Shapes with irregular sizes; some matrices are too small for low rank."""

USED = 10453

SETTINGS = DataParallelConfig(topk_density=0.05, powersgd_rank=2)

CODECS = ("uint8", "topk", "powersgd")


def odd_bucket(ranks: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Bucket:
    factory = ParameterFactory(tp=Group.solo("tp"), seed=3, dtype=torch.float32, device=torch.device("cpu"))
    kind = BucketKind(decay=True, split_over_tp=True, partial_over_tp=False, tied=False, expert=False)
    parameters = [factory.parameter(name, shape, std=1.0) for name, shape in shapes.items()]
    return Bucket(kind, parameters, replicas=ranks, grad_dtype=torch.float32)


def random_values(step: int, rank: int, size: int) -> torch.Tensor:
    """Return heavy-tailed values: products of normal and log-normal numbers, with zeros of both signs; 0 as padding."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).mul(2).exp()
    values[::7] = 0.0
    values[3::7] = -0.0
    values[USED:] = 0.0
    return values


def constant_values(step: int, rank: int, size: int) -> torch.Tensor:
    return random_values(1, rank, size)


Values = Callable[[int, int, int], torch.Tensor]


@dataclass
class Found:
    """One rank's results of some means."""

    size: int
    outs: list[torch.Tensor] = field(default_factory=list)
    private: torch.Tensor | None = None
    shared: torch.Tensor | None = None  # its range of the server's error, if the codec has one
    sent: list[float] = field(default_factory=list)
    said: float = 0.0  # the codec's `wire_bytes`


def forget(codec: Codec) -> None:
    for state in codec.states():
        state.values.zero_()


def means(
    context: RankContext, ranks: int, name: str, values: Values, steps: int, *, keep_errors: bool = True
) -> Found:
    """Return, for run_ranks, the means of `values` in each step."""
    group = context.topology(dp=ranks).dp
    bucket, counter = odd_bucket(ranks), WireCounter()
    channel = Channel(group, counter, Background(torch.device("cpu")))
    codec = build_codec(name, bucket, channel, SETTINGS)
    found = Found(bucket.grad.numel(), said=codec.wire_bytes)
    for step in range(1, steps + 1):
        mine = values(step, group.rank, found.size)
        codec.mean(mine)
        found.outs.append(mine)
        found.sent.append(counter.take())
        if not keep_errors:
            forget(codec)
    for state in codec.states():
        if state.placement is Placement.PRIVATE:
            found.private = state.values
        else:
            assert state.start == group.rank * state.values.numel()
            found.shared = state.values
    return found


def owed(ranks: Sequence[Found]) -> torch.Tensor:
    total = torch.stack([found.private.double() for found in ranks if found.private is not None]).mean(dim=0)
    shared = [found.shared for found in ranks if found.shared is not None]
    return total + torch.cat(shared) if shared else total


def true_mean(values: Values, step: int, ranks: int, size: int) -> torch.Tensor:
    return torch.stack([values(step, rank, size).double() for rank in range(ranks)]).mean(dim=0)
