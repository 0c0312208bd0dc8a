"""The whole legal space as arrays: what `megalite.config.validate` accepts, its rules as masks.

A layout is a pair: a `Pipeline` (schedule, pp, vpp and the number of microbatches) and a share (how what a pipeline rank
does is split and stored: tp, cp, ep, dp, micro batch size, recompute, strategy, sequence parallel). Every pipeline goes
with every share of its block, so that what depends on one of them is computed once for all partners. `Block` holds the
layouts with the same pp and number of microbatches.

Left out are twins: with pp 1 no schedule of one chunk is faster than another, with one microbatch gpipe is 1f1b
and looped-bfs is interleaved, and where no parameter has a replica all strategies do the same.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.batch import batch_sizes
from megalite.config.run import RunConfig, stage_layers
from megalite.pipeline.ir.generators.registry import SCHEDULES
from megalite.planner.search.request import RECOMPUTE, STRATEGIES, Request

Integers = npt.NDArray[np.int64]
ONE_CHUNK = ("1f1b", "zb-h1", "zb-h2", "gpipe")  # on one rank they take the same time; the first of them hold least
LOOPED = ("interleaved", "looped-bfs")
VEE = ("zb-v", "dualpipe-v")


_IN_ONE = {"gpipe": "1f1b", "looped-bfs": "interleaved"}
"""Schedule -> the one that it equals if there is one microbatch."""


class Pipeline(NamedTuple):
    """What pipeline ranks do, whatever a rank is."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int


@dataclass(frozen=True)
class Shares:
    """One entry a share in each array."""

    tp: Integers
    cp: Integers
    ep: Integers
    dp: Integers
    micro_batch_size: Integers
    recompute: Integers  # index into RECOMPUTE
    strategy: Integers  # index into STRATEGIES
    sequence_parallel: Integers  # 0 or 1

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, which: npt.NDArray[Any]) -> "Shares":
        """Those of an index or mask."""
        return Shares(**{name: column[which] for name, column in vars(self).items()})

    @classmethod
    def joined(cls, parts: list["Shares"]) -> "Shares":
        """One after the other."""
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})


class Layout(NamedTuple):
    """One point of the space."""

    pipeline: Pipeline
    tp: int
    cp: int
    ep: int
    dp: int
    micro_batch_size: int
    recompute: str
    strategy: str
    sequence_parallel: bool

    def settings(self) -> dict[str, Any]:
        """The same as flat settings, all of them."""
        return {
            "tp": self.tp,
            "pp": self.pipeline.pp,
            "vpp": self.pipeline.vpp,
            "cp": self.cp,
            "ep": self.ep,
            "dp": self.dp,
            "micro_batch_size": self.micro_batch_size,
            "pipeline_schedule": self.pipeline.schedule,
            "sequence_parallel": self.sequence_parallel,
            "recompute_granularity": self.recompute,
            "dp_strategy": "distributed-optimizer" if self.strategy == "zero-2" else self.strategy,
            "shard_gradients": self.strategy == "zero-2",
        }


@dataclass(frozen=True)
class Block:
    """All pipelines of one pp and number of microbatches, each with every share."""

    pipelines: tuple[Pipeline, ...]
    shares: Shares

    def __len__(self) -> int:
        return len(self.pipelines) * len(self.shares)

    def layout(self, pipeline: int, share: int) -> Layout:
        """One pair of the block."""
        tp, cp, ep, dp, micro, *choices = (int(column[share]) for column in vars(self.shares).values())
        recompute, strategy, sequence = choices
        names = RECOMPUTE[recompute], STRATEGIES[strategy]
        return Layout(self.pipelines[pipeline], tp, cp, ep, dp, micro, *names, bool(sequence))


@dataclass(frozen=True)
class Space:
    """Every layout that the config may have on its ranks."""

    request: Request
    blocks: tuple[Block, ...]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def layouts(self) -> Iterator[Layout]:
        """One by one; for small spaces."""
        for block in self.blocks:
            for pipeline, share in itertools.product(range(len(block.pipelines)), range(len(block.shares))):
                yield block.layout(pipeline, share)

    def column(self, name: str) -> Integers:
        """A field of `Shares`, of each layout."""
        return np.concatenate([np.tile(getattr(block.shares, name), len(block.pipelines)) for block in self.blocks])


def enumerate_space(request: Request) -> Space:
    """All that is legal within the constraints; no block at all if nothing is."""
    config = request.config
    cut, batch = stage_layers(config), config.training.global_batch_size
    assert batch is not None
    most_stages = len(cut) if cut else config.model.num_layers
    blocks: list[Block] = []
    for pp in divisors(request.world_size):
        if pp > most_stages or not request.allows("pp", pp):
            continue
        chunks, shares = list(_chunks(request, pp)), _shares(request, pp)
        counts = batch // (shares.dp * shares.micro_batch_size)
        for count in np.unique(counts).tolist():
            pipelines = tuple(
                Pipeline(schedule, pp, vpp, count)
                for schedule, vpp in chunks
                if (schedule != "dualpipe-v" or count >= 2 * pp)
                and not (count == 1 and (_IN_ONE.get(schedule), vpp) in chunks)
            )
            if pipelines:
                blocks.append(Block(pipelines, shares.take(counts == count)))
    return Space(request, tuple(blocks))


def _chunks(request: Request, pp: int) -> Iterator[tuple[str, int]]:
    """(schedule, vpp) that a pipeline of pp ranks can have."""
    cut, layers = stage_layers(request.config), request.config.model.num_layers
    p = request.config.parallel
    for schedule in sorted(request.of("pipeline_schedule"), key=SCHEDULES.index):
        if pp == 1 and schedule in ONE_CHUNK:
            better = ONE_CHUNK[: ONE_CHUNK.index(schedule)]
            if any(request.allows("pipeline_schedule", name) for name in better):
                continue
        if p.microbatch_group_size_per_virtual_pipeline_stage is not None and schedule != "interleaved":
            continue
        if p.pipeline_warmup != "pa" and schedule != "1f1b":
            continue
        counts: Iterable[int] = (1,)
        if schedule not in ONE_CHUNK:
            counts = () if pp == 1 else (2,) if schedule in VEE else range(2, layers // pp + 1)
        for vpp in counts:
            fits = len(cut) == pp * vpp if cut else pp * vpp <= layers
            if fits and request.allows("vpp", vpp):
                yield schedule, vpp


def _shares(request: Request, pp: int) -> Shares:
    """Every share that is legal with pp pipeline ranks."""
    config, model, s = request.config, request.config.model, request.config.training.seq_length
    batch = config.training.global_batch_size
    assert batch is not None
    ranks = request.world_size // pp
    tps = [tp for tp in _tensor_sizes(config, ranks) if request.allows("tp", tp)]
    cps = [cp for cp in divisors(ranks) if (cp == 1 or s % (2 * cp) == 0) and request.allows("cp", cp)]
    eps = [1] if model.num_experts is None else divisors(model.num_experts)
    eps = [ep for ep in eps if request.allows("ep", ep)]
    micro = [b for b in divisors(batch) if request.allows("micro_batch_size", b)]
    recompute = [RECOMPUTE.index(name) for name in request.of("recompute_granularity")]
    strategies = [STRATEGIES.index(name) for name in request.of("dp_strategy")]
    sequence = [int(value) for value in request.of("sequence_parallel")]
    axes = (tps, cps, eps, micro, recompute, strategies, sequence)
    grid = np.meshgrid(*(np.array(values, dtype=np.int64) for values in axes), indexing="ij")
    tp, cp, ep, micro_batch, recomputed, strategy, parallel = (axis.reshape(-1) for axis in grid)
    legal = ranks % (tp * cp) == 0
    dp = ranks // (tp * cp)
    legal &= batch % np.maximum(dp * micro_batch, 1) == 0
    legal &= (parallel == 0) | ((tp > 1) & (s % (tp * cp) == 0))
    if "dp" in request.fixed:
        legal &= np.isin(dp, request.fixed["dp"])
    legal &= (strategy != STRATEGIES.index("fully-sharded")) | ((ep == 1) & (pp == 1))
    if len(batch_sizes(config)) > 1:  # every batch of a ramp-up or schedule is whole microbatches
        for size in batch_sizes(config):
            legal &= size % np.maximum(dp * micro_batch, 1) == 0
    if config.parallel.cp_comm_type == "a2a":
        legal &= (cp == 1) | (model.query_groups // tp % cp == 0)
    replicas = dp * cp
    if model.num_experts is not None:
        grid_fits, expert_replicas = _experts_fit(config, pp, tp, cp, ep, dp)
        legal &= grid_fits
        replicas = np.maximum(replicas, expert_replicas)
    legal &= (replicas > 1) | (strategy == (strategies or [0])[0])
    columns = (tp, cp, ep, dp, micro_batch, recomputed, strategy, parallel)
    return Shares(*(column[legal] for column in columns))


def _tensor_sizes(config: RunConfig, ranks: int) -> list[int]:
    model = config.model
    common = math.gcd(model.num_attention_heads, model.query_groups, model.padded_vocab_size, ranks)
    if not all(model.is_moe_layer(index) for index in range(model.num_layers)):
        common = math.gcd(common, model.ffn_size)
    if model.num_experts and model.moe_shared_expert_intermediate_size is not None:
        common = math.gcd(common, model.moe_shared_expert_intermediate_size)
    return divisors(common)


def _experts_fit(
    config: RunConfig, pp: int, tp: Integers, cp: Integers, ep: Integers, dp: Integers
) -> tuple[npt.NDArray[np.bool_], Integers]:
    """Which shares have a legal grid of experts, and the replicas of each expert."""
    model, p, s = config.model, config.parallel, config.training.seq_length
    etp = tp if p.etp is None else np.full_like(tp, p.etp)
    ranks = tp * cp * dp
    fits = (ranks % (etp * ep) == 0) & (model.expert_ffn_size % etp == 0) & (s % (tp * cp) == 0)
    if p.rank_order == "tp-cp-ep-pp-dp" and pp > 1:
        fits &= ((ep == 1) & (etp == tp)) | (etp * ep == tp * cp)
    return fits, ranks // (etp * ep)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
