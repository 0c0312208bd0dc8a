"""`find`: the best layouts for a request. All of the space in closed form, then the best of it by the cost model proper.

What is refined runs its own action lists through the simulator and is sized rank by rank, so that closed forms only choose
what to look at. The cut into stages is made again by predicted seconds instead of FLOPs, and kept where that is faster.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.config.byte_size import format_bytes
from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings
from megalite.config.errors import ConfigError
from megalite.config.reading import gc_paused
from megalite.config.run import RunConfig, stage_layers
from megalite.config.validate import validate
from megalite.partition.memory import RankMemory
from megalite.partition.pipeline import placement_of, plan_stages
from megalite.pipeline.ir.partition import partition_layers
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import workload_of
from megalite.planner.cost.stage import layer_seconds, stage_cost
from megalite.planner.cost.step import Prediction, predict
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.features import Counter
from megalite.planner.search.memory import fullest, offloadable_bytes
from megalite.planner.search.space import (
    CHOICES,
    CONTEXT,
    HOST,
    RECOMPUTE,
    Block,
    Layout,
    Request,
    Shares,
    Space,
    enumerate_space,
    not_default,
)
from megalite.planner.search.time import Clock, Prices

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_AT_ONCE = 20_000  # estimates that are put in order before the next ones are


@dataclass(frozen=True)
class Survey:
    """Per block, bytes of the fullest rank and seconds of a step: [pipelines, shares]."""

    request: Request
    space: Space
    memory: tuple[Floats, ...]
    seconds: tuple[Floats, ...]  # infinite where it does not fit
    host: tuple[Integers, ...]  # what it needs of host memory to fit: twice the layers, and 1 more for the optimizer

    @cached_property
    def all_bytes(self) -> Floats:
        return np.concatenate([each.reshape(-1) for each in self.memory])

    @cached_property
    def all_seconds(self) -> Floats:
        return np.concatenate([each.reshape(-1) for each in self.seconds])

    @property
    def fitting(self) -> int:
        return int(sum(np.isfinite(each).sum() for each in self.seconds))

    @property
    def by_host_memory(self) -> int:
        """How many of these fit because of what `host` says."""
        return int(sum((np.isfinite(each) & (more > 0)).sum() for each, more in zip(self.seconds, self.host)))

    def at(self, index: int) -> Layout:
        for block, host in zip(self.space.blocks, self.host, strict=True):
            if index < len(block):
                layout = block.layout(*divmod(index, len(block.shares)))
                layers, optimizer = divmod(int(host.reshape(-1)[index]), 2)
                if layers:
                    layout = layout._replace(pipeline=layout.pipeline._replace(offloaded=layers))
                return layout._replace(offload=True) if optimizer else layout
            index -= len(block)
        raise IndexError(index)

    def fastest(self, objective: str = "time") -> Iterator[tuple[Layout, float]]:
        """Layouts that fit with their seconds, by these; of equals the one with the smallest cp and micro batch. With the
        objective `memory` those that hold least first, of equals the fastest."""
        seconds = self.all_seconds
        least = self.all_bytes if objective == "memory" else seconds
        cp, micro_batch = self.space.column("cp"), self.space.column("micro_batch_size")
        left = np.flatnonzero(np.isfinite(seconds))
        while len(left):
            count = min(_AT_ONCE, len(left))
            bound = np.partition(least[left], count - 1)[count - 1]
            now, left = left[least[left] <= bound], left[least[left] > bound]
            # To six digits: further ones are not meant.
            digits = (np.round(np.log(each[now]), 6) for each in (seconds, least))
            for index in now[np.lexsort((micro_batch[now], cp[now], *digits))].tolist():
                yield self.at(index), float(seconds[index])

    def leanest(self) -> tuple[Layout, float]:
        """The layout that needs least memory, whether it fits or not, and its bytes."""
        index = int(np.argmin(self.all_bytes))
        return self.at(index), float(self.all_bytes[index])

    def frontier(self) -> list[tuple[float, float]]:
        """(bytes, seconds): of each amount of memory the fastest layout, as long as more memory gives more speed."""
        fits = np.isfinite(self.all_seconds)
        memory, seconds = self.all_bytes[fits], self.all_seconds[fits]
        order = np.lexsort((seconds, memory))
        best = np.minimum.accumulate(seconds[order])
        better = np.concatenate(([True], best[1:] < best[:-1] * (1.0 - 1e-6)))[: len(best)]
        return list(zip(memory[order][better].tolist(), best[better].tolist(), strict=True))


def survey(request: Request, cluster: Cluster, stack: SoftwareStack) -> Survey:
    """Sizes and times the whole space. What does not fit gets as much host memory as it needs, if it is then faster than
    all that fits without, or nothing does. Raises ConfigError if the accelerator does not have the precision."""
    space = enumerate_space(request)
    counter = Counter(request.config)
    clock = Clock(request.config, cluster, stack)
    sizer = clock.sizer
    tables = []
    for pp, group in itertools.groupby(space.blocks, key=lambda block: block.pipelines[0].pp):
        blocks = list(group)
        shares = Shares.joined([block.shares for block in blocks])
        coefficients = sizer.coefficients(shares, pp)
        moved = sizer.states(shares, offloadable_bytes)
        prices, relief = clock.prices(shares, pp, coefficients, moved), sizer.relief(moved, pp)
        first = 0
        for block in blocks:
            mine = slice(first, first + len(block.shares))
            first = mine.stop
            parts = coefficients[:, mine], relief[:, mine], prices.take(mine)
            tables.append(_Table(request, clock, counter, block, *parts))
    if request.host:
        fastest = min((float(table.seconds.min()) for table in tables), default=np.inf)
        for table in tables:
            table.add_host_memory(fastest)
    memory, seconds, host = (tuple(getattr(table, name) for table in tables) for name in ("memory", "seconds", "host"))
    return Survey(request, space, memory, seconds, host)


@dataclass
class _Table:
    """One block: memory, seconds and use of host memory, each [pipelines, shares], as `Survey` has them."""

    request: Request
    clock: Clock
    counter: Counter
    block: Block
    coefficients: Floats
    relief: Floats
    prices: Prices

    def __post_init__(self) -> None:
        counter, block, shares = self.counter, self.block, self.block.shares
        self.memory = fullest([counter(each) for each in block.pipelines], self.coefficients)
        self.seconds = np.full(self.memory.shape, np.inf)
        self.host = np.zeros(self.memory.shape, dtype=np.int64)
        fits = self.memory <= self.request.memory_limit
        if shares.offload.any() or block.pipelines[0].offloaded:
            alone = [counter(each._replace(offloaded=0)) for each in block.pipelines]
            gone = fullest(alone, self.coefficients + shares.offload * self.relief) - self.memory
            fits &= gone <= self.request.host_limit
        rows, columns = np.flatnonzero(fits.any(1)), np.flatnonzero(fits.any(0))
        if len(rows):
            self.seconds[np.ix_(rows, columns)] = self._times(rows, columns)
            self.seconds[~fits] = np.inf

    def _times(self, rows: Integers, columns: Integers) -> Floats:
        some = [self.block.pipelines[row] for row in rows.tolist()]
        cuts = [self.counter.cut(each) for each in some]
        return self.clock.seconds(some, cuts, self.prices.take(columns))

    def add_host_memory(self, bound: float) -> None:
        """To what does not fit, and without memory takes less than `bound` seconds."""
        lacking = self.memory > self.request.memory_limit
        lacking &= self.clock.least(self.block.pipelines[0], self.prices) < bound
        rows, columns = np.flatnonzero(lacking.any(1)), np.flatnonzero(lacking.any(0))
        if not len(rows):
            return
        alone = self._times(rows, columns)
        # No use of host memory makes a step faster.
        lacking = lacking[np.ix_(rows, columns)] & (alone < bound)
        kept, left = lacking.any(1), lacking.any(0)
        if not kept.any():
            return
        within, rows, columns = np.ix_(kept, left), rows[kept], columns[left]
        where, alone, lacking = np.ix_(rows, columns), alone[within], lacking[within]
        memory, seconds, host = self.memory[where], self.seconds[where], self.host[where]
        before = memory.copy()
        for some, size, longer, code in self._ways(rows, columns):
            time = np.where(size <= self.request.memory_limit, alone[:, some] + longer, np.inf)
            # Of what does not fit at all the least is kept, for the error.
            better = (time < seconds[:, some]) | (
                np.isinf(time) & np.isinf(seconds[:, some]) & (size < memory[:, some])
            )
            better &= lacking[:, some] & ((time < bound) | np.isinf(bound))
            # What leaves the device is about what comes into host memory; the best are sized exactly.
            better &= before[:, some] - size <= self.request.host_limit
            for table, values in ((memory, size), (seconds, time), (host, code)):
                table[:, some] = np.where(better, values, table[:, some])
        self.memory[where], self.seconds[where], self.host[where] = memory, seconds, host

    def _ways(self, rows: Integers, columns: Integers) -> Iterator[tuple[Integers, Floats, Floats, Integers]]:
        """Uses of host memory: of which of the columns, bytes on the device, seconds more of a step, and `Survey.host`."""
        limit, pipelines = self.request.memory_limit, [self.block.pipelines[row] for row in rows.tolist()]
        shares, prices = self.block.shares.take(columns), self.prices.take(columns)
        coefficients = self.coefficients[:, columns]
        counts = [self.counter(each) for each in pipelines]
        starts = [(coefficients, np.zeros(len(columns)), 0)]
        if HOST[0] in self.request.host:
            moved = coefficients - self.relief[:, columns]
            size = fullest(counts, moved)
            yield np.arange(len(columns)), size, np.broadcast_to(prices.offloaded, size.shape), np.ones_like(size, int)
            starts.append((moved, prices.offloaded, 1))
        some = np.flatnonzero(shares.recompute == RECOMPUTE.index("none"))
        if HOST[1] not in self.request.host or not len(some):
            return
        most = [-(-self.request.config.model.num_layers // (each.pp * each.vpp)) for each in pipelines]
        without = [self.counter(each._replace(offloaded=n)) for each, n in zip(pipelines, most, strict=True)]
        sizes = list(map(len, counts))
        firsts = np.cumsum([0, *sizes[:-1]])
        whole = np.repeat(most, sizes)[:, None]
        for of, longer, optimizer in starts:
            # Each moment of each rank is linear in the number of layers.
            none, every = (np.concatenate(each) @ of[:, some] for each in (counts, without))
            layers = np.ceil(whole * (none - limit) / np.maximum(none - every, 1.0)).clip(1, whole)
            layers = np.maximum.reduceat(layers, firsts, axis=0)
            held = none + (every - none) * np.repeat(layers, sizes, axis=0) / whole
            late = longer[some] + self.clock.late(pipelines, layers, prices.take(some))
            yield some, np.maximum.reduceat(held, firsts, axis=0), late, (2 * layers + optimizer).astype(np.int64)


def nothing_legal(request: Request) -> ConfigError:
    """No layout obeys all rules: the first constraint without which some do, and what it could be."""
    words = {name: f"{name} {' or '.join(map(_word, values))}" for name, values in request.fixed.items()}
    world = request.world_size
    for name in request.fixed:
        space = enumerate_space(replace(request, fixed={n: kept for n, kept in request.fixed.items() if n != name}))
        if len(space):
            others = " and ".join(text for other, text in words.items() if other != name)
            possible = ", ".join(map(_word, _values(space, name)))
            return ConfigError(
                f"no layout of {world} ranks can have {words[name]}{' with ' * bool(others)}{others}; use {name} {possible}"
            )
    if words:
        return ConfigError(f"no layout of {world} ranks can have {', '.join(words.values())}; remove several of these")
    return ConfigError(
        f"no layout is legal on {world} ranks with global_batch_size {request.config.training.global_batch_size}: use a "
        f"batch that is a multiple of more of the ranks' divisors, such as {world}, or another --gpus"
    )


def nothing_fits(found: Survey) -> ConfigError:
    """All that is legal needs more memory than there is: the least of it."""
    layout, least = found.leanest()
    if least <= found.request.memory_limit:
        return ConfigError(
            f"what fits into {format_bytes(found.request.memory_limit)} per rank keeps more than "
            f"{format_bytes(found.request.host_limit)} of it in host memory: {describe(layout)}; use more --gpus, or a "
            "cluster file with a larger node.host_memory_bytes"
        )
    return ConfigError(
        f"none of {len(found.space)} layouts fits into {format_bytes(found.request.memory_limit)} per rank on "
        f"{found.request.world_size} ranks; the least takes {format_bytes(least)}: {describe(layout)}; use --max-memory "
        f"{int(np.ceil(least / 1e9))}GB on devices that have it, more --gpus, or fewer constraints"
    )


def describe(layout: Layout) -> str:
    """A layout in a line: `tp 8, pp 4 (1f1b), dp 2, ...`; sizes of 1 are left out."""
    pipeline = layout.pipeline
    instances = f", {layout.dp_instances} instances" if layout.dp_instances > 1 else ""
    chunks = f" x {pipeline.vpp}" if pipeline.vpp > 1 else ""
    words = [
        f"tp {layout.tp}" + (" with sequence parallel" if layout.sequence_parallel else ""),
        f"pp {pipeline.pp}{chunks}" + (f" ({pipeline.schedule})" if pipeline.pp > 1 else ""),
        f"cp {layout.cp}" if layout.cp > 1 else "",
        f"ep {layout.ep}" if layout.ep > 1 else "",
        f"dp {layout.dp}" + (f" ({layout.strategy}{instances})" if layout.dp * layout.cp > 1 else ""),
        f"micro batch {layout.micro_batch_size}",
        f"recompute {layout.recompute}",
        f"activations of {counted(pipeline.offloaded, 'layer')} per stage in host memory" if pipeline.offloaded else "",
        "optimizer states in host memory" if layout.offload else "",
    ]
    return ", ".join(word for word in words if word)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(space: Space, name: str) -> list[Any]:
    of_pipeline = {"pp": "pp", "vpp": "vpp", "pipeline_schedule": "schedule", HOST[1]: "offloaded"}
    if name in of_pipeline:
        return sorted({getattr(each, of_pipeline[name]) for block in space.blocks for each in block.pipelines})
    of_share = {"recompute_granularity": "recompute", "dp_strategy": "strategy", HOST[0]: "offload"}
    found = np.unique(space.column(of_share.get(name, name))).tolist()
    return [CHOICES[name][value] for value in found] if name in CHOICES else found


SPARE = 2  # layouts that are refined beyond those asked for: the closed form may have the order of neighbours wrong
RECUT = 2  # of the best, how many are cut again by predicted seconds, and varied
MOST_BUILT = 1024  # microbatches times stages for which a schedule is built: larger ones take seconds, and gain little


@dataclass(frozen=True, kw_only=True)
class Candidate:
    layout: Layout
    settings: Mapping[str, Any]  # what the plan decides, flat; with pipeline_layers where the cut was made again
    config: RunConfig  # validated
    estimate: float  # seconds of a step in closed form
    prediction: Prediction

    @property
    def fullest(self) -> tuple[int, RankMemory]:
        """The pipeline rank that holds most, and what it holds."""
        memory = self.prediction.memory
        rank = max(range(len(memory)), key=lambda at: memory[at].total_bytes)
        return rank, memory[rank]


@dataclass(frozen=True, kw_only=True)
class Plan:
    request: Request
    cluster: Cluster
    stack: SoftwareStack
    survey: Survey
    candidates: tuple[Candidate, ...]  # best first, each the best of its tp, ep, pp and schedule
    objective: str = "time"  # or `cost`, GPU hours, or `memory` of the fullest rank


@gc_paused()
def find(request: Request, cluster: Cluster, stack: SoftwareStack, *, top: int = 5, objective: str = "time") -> Plan:
    """The `top` best layouts that fit: the fastest, or with `memory` those that hold least. Raises ConfigError if none is
    legal, or none fits: what would make it fit."""
    found = survey(request, cluster, stack)
    if not len(found.space):
        raise nothing_legal(request)
    refiner = _Refiner(request, cluster, stack)
    candidates: dict[tuple[Any, ...], Candidate] = {}
    for layout, seconds in found.fastest(objective):
        if len(candidates) == top + SPARE:
            break
        if _kind(layout) not in candidates:  # others of its kind are its variants
            candidate = refiner.predicted(layout, layout.settings(), seconds)
            if candidate is not None:
                candidates[_kind(layout)] = candidate
    if not candidates:
        raise nothing_fits(found)

    def order(candidate: Candidate) -> tuple[float, float]:
        seconds = candidate.prediction.step_seconds
        return (candidate.fullest[1].total_bytes if objective == "memory" else seconds, seconds)

    ranked = sorted(candidates.values(), key=order)
    if objective != "memory":
        ranked[:RECUT] = map(refiner.recut, ranked[:RECUT])
        ranked[:RECUT] = map(refiner.varied, ranked[:RECUT])
    best: dict[tuple[Any, ...], Candidate] = {}
    for each in sorted(ranked, key=order):
        best.setdefault(_kind(each.layout), each)
    chosen = tuple(best.values())[:top]
    return Plan(request=request, cluster=cluster, stack=stack, survey=found, candidates=chosen, objective=objective)


def _kind(layout: Layout) -> tuple[Any, ...]:
    return layout.tp, layout.ep, layout.pipeline.pp, layout.pipeline.schedule


def find_cheapest(
    request: Request, cluster: Cluster, stack: SoftwareStack, *, top: int = 5
) -> tuple[Plan, dict[int, float]]:
    """The plan with the least GPU time of a step on all ranks of the request, a half, a quarter and so on until none fits
    or is legal; ranks -> seconds of a step of each. Raises as `find` if there is none on all."""
    plans = [find(request, cluster, stack, top=top, objective="cost")]
    while (ranks := plans[-1].request.world_size) % 2 == 0:
        try:
            plans.append(find(replace(request, world_size=ranks // 2), cluster, stack, top=top, objective="cost"))
        except ConfigError:
            break
    seconds = {each.request.world_size: float(each.candidates[0].prediction.step_seconds) for each in plans}
    return min(plans, key=lambda each: each.request.world_size * seconds[each.request.world_size]), seconds


def config_of(request: Request, chosen: Mapping[str, Any]) -> RunConfig:
    """The validated config of some settings over the request's, as a file with them would be read."""
    base = dict(chosen)
    if base["cp"] == 1:
        base |= {name: settings()[name].default for name in CONTEXT}
    if base["recompute_granularity"] != "selective":
        base["recompute_modules"] = settings()["recompute_modules"].default
    if not base.get(HOST[0]):
        base["optimizer_offload_fraction"] = settings()["optimizer_offload_fraction"].default
    config = with_settings(request.config, **base)
    return validate(config, request.world_size, not_default(config))


@dataclass(frozen=True)
class _Refiner:
    """Layouts by the cost model proper."""

    request: Request
    cluster: Cluster
    stack: SoftwareStack

    def predicted(self, layout: Layout, chosen: Mapping[str, Any], estimate: float) -> Candidate | None:
        """None if a rule about another setting or its exact memory refuses it."""
        try:
            config = config_of(self.request, chosen)
            prediction = predict(config, self.cluster, self.stack)
        except ConfigError:
            return None
        candidate = Candidate(layout=layout, settings=chosen, config=config, estimate=estimate, prediction=prediction)
        host = max(rank.host_bytes for rank in prediction.memory)
        fits = candidate.fullest[1].total_bytes <= self.request.memory_limit and host <= self.request.host_limit
        return candidate if fits else None

    def _fastest(self, candidate: Candidate, others: Iterable[tuple[Layout, Mapping[str, Any]]]) -> Candidate:
        """Of the candidate and those others, by their layouts and the settings that they change, that fit."""
        found = [candidate]
        for layout, changes in others:
            other = self.predicted(layout, {**candidate.settings, **changes}, candidate.estimate)
            found += [] if other is None else [other]
        return min(found, key=lambda each: each.prediction.step_seconds)

    def varied(self, candidate: Candidate) -> Candidate:
        """With a schedule built for its costs (`auto`), or with full recompute ahead of the gradients that it would wait
        for, if that fits and is faster: where need be with a few layers' activations in host memory."""
        layout, pipeline = candidate.layout, candidate.layout.pipeline
        if pipeline.pp == 1:
            return candidate
        ways: list[tuple[Layout, dict[str, Any]]] = []
        if layout.recompute == "full":
            ahead = layout._replace(recompute="full, ahead of gradients")
            most = max(plan.num_layers for plan in plan_stages(candidate.config))
            counts = sorted({0, most, *(2**power for power in range(most.bit_length()))})
            for count in counts if HOST[1] in self.request.host else (pipeline.offloaded,):
                host = {HOST[1]: count} if count else {}
                way = ahead._replace(pipeline=pipeline._replace(offloaded=count)), {"recompute_ahead": True, **host}
                if self.predicted(way[0], {**candidate.settings, **way[1]}, candidate.estimate) is not None:
                    ways.append(way)
                    break  # more layers take longer
        few = pipeline.pp * pipeline.vpp * pipeline.microbatches <= MOST_BUILT and not pipeline.offloaded
        if few and "pipeline_schedule" not in self.request.fixed:
            built = pipeline._replace(schedule="auto")
            ways.append((layout._replace(pipeline=built), {"pipeline_schedule": "auto"}))
        return self._fastest(candidate, ways)

    def recut(self, candidate: Candidate) -> Candidate:
        """With its stages cut by predicted seconds, if that is faster. Where the search chose a number of offloaded layers, it
        chose that for stages of another cut: these may need others."""
        config, layout, pipeline = candidate.config, candidate.layout, candidate.layout.pipeline
        if pipeline.pp == 1 or stage_layers(config):
            return candidate
        work, model, stack = workload_of(config), config.model, self.stack
        price = Pricing.of(work, self.cluster, stack)
        kinds = [model.is_moe_layer(index) for index in range(model.num_layers)]
        each = {moe: float(layer_seconds(work, self.cluster, stack, moe=moe).total) for moe in set(kinds)}
        first, last = (
            max(float(stage_cost(price, **{end: 1.0}).total) - 2.0 * stack.microbatch_seconds, 0.0)
            for end in ("has_embedding", "has_head")
        )
        layers = [each[moe] for moe in kinds]
        placement = placement_of(config)
        cut = partition_layers(model.num_layers, placement, layer_cost=layers, first_cost=first, last_cost=last)
        if list(cut) == [plan.num_layers for plan in plan_stages(config)]:
            return candidate
        ways: list[tuple[Layout, dict[str, Any]]] = [(layout, {"pipeline_layers": list(cut)})]
        if pipeline.offloaded and HOST[1] in self.request.host:
            ways = [
                (layout._replace(pipeline=pipeline._replace(offloaded=count)), {**ways[0][1], HOST[1]: count})
                for count in range(max(cut) + 1)
            ]
        return self._fastest(candidate, ways)
