"""`find` returns the best layouts for a request: closed forms rank all layouts, then the cost model refines the best.

The simulator runs each refined layout's action lists, and the memory of each rank is computed exactly; closed forms only
select the layouts. Stages are cut again by predicted seconds instead of FLOPs if that is faster."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings
from megalite.config.errors import ConfigError, plural
from megalite.config.numbers import format_bytes
from megalite.config.registry import gc_paused
from megalite.config.run import RunConfig, stage_layers
from megalite.config.validate import validate
from megalite.partition.memory import RankMemory
from megalite.partition.pipeline import placement_of, plan_stages
from megalite.partition.stages import partition_layers
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import workload_of
from megalite.planner.cost.stage import layer_seconds, stage_cost
from megalite.planner.cost.step import Prediction, predict
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.features import Counter, Floats
from megalite.planner.search.memory import of_largest_rank, offloadable_bytes
from megalite.planner.search.space import (
    CHOICES,
    CONTEXT,
    HOST,
    RECOMPUTE,
    Block,
    Integers,
    Layout,
    Request,
    Shares,
    Space,
    enumerate_space,
    not_default,
)
from megalite.planner.search.time import Clock, Prices

_AT_ONCE = 20_000  # number of estimates that are sorted at a time


@dataclass(frozen=True)
class Survey:
    """Bytes of the fullest rank and seconds of a step; arrays of shape [pipelines, shares], one per block."""

    request: Request
    space: Space
    memory: tuple[Floats, ...]
    seconds: tuple[Floats, ...]  # infinite if the layout does not fit
    host: tuple[Integers, ...]  # host memory added to fit: twice the offloaded layers, plus 1 for optimizer states

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
        """Number of layouts that fit because of the host memory in `host`."""
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
        """Yield (layout, seconds) of layouts that fit, fastest first; ties go to the smallest cp, then micro batch.
        With the objective `memory`, those that need least memory come first; ties go to the fastest."""
        seconds = self.all_seconds
        least = self.all_bytes if objective == "memory" else seconds
        cp, micro_batch = self.space.column("cp"), self.space.column("micro_batch_size")
        left = np.flatnonzero(np.isfinite(seconds))
        while len(left):
            count = min(_AT_ONCE, len(left))
            bound = np.partition(least[left], count - 1)[count - 1]
            now, left = left[least[left] <= bound], left[least[left] > bound]
            # Rounded to six digits: smaller differences are noise.
            digits = (np.round(np.log(each[now]), 6) for each in (seconds, least))
            for index in now[np.lexsort((micro_batch[now], cp[now], *digits))].tolist():
                yield self.at(index), float(seconds[index])

    def leanest(self) -> tuple[Layout, float]:
        """Return the layout that needs least memory, even if it does not fit, and its bytes."""
        index = int(np.argmin(self.all_bytes))
        return self.at(index), float(self.all_bytes[index])

    def frontier(self) -> list[tuple[float, float]]:
        """Return (bytes, seconds) of the fastest layout per amount of memory, if it beats smaller amounts."""
        fits = np.isfinite(self.all_seconds)
        memory, seconds = self.all_bytes[fits], self.all_seconds[fits]
        order = np.lexsort((seconds, memory))
        best = np.minimum.accumulate(seconds[order])
        better = np.concatenate(([True], best[1:] < best[:-1] * (1.0 - 1e-6)))[: len(best)]
        return list(zip(memory[order][better].tolist(), best[better].tolist(), strict=True))


def survey(request: Request, cluster: Cluster, stack: SoftwareStack) -> Survey:
    """Compute memory and time of all layouts. One that does not fit uses as much host memory as it needs, if that is
    faster than all that fit without, or none does. Raises ConfigError if the accelerator lacks the precision."""
    space = enumerate_space(request)
    counter = Counter(request.config)
    clock = Clock(request.config, cluster, stack)
    sizer = clock.sizer
    if not space.blocks:
        return Survey(request, space, (), (), ())
    every = [block.shares for block in space.blocks]
    stages = np.repeat([block.pipelines[0].pp for block in space.blocks], list(map(len, every)))
    tables, layers, end = [], clock.layers(Shares.joined(every), stages), 0
    for pp, group in itertools.groupby(space.blocks, key=lambda block: block.pipelines[0].pp):
        blocks = list(group)
        shares = Shares.joined([block.shares for block in blocks])
        start, end = end, end + len(shares)
        coefficients = sizer.coefficients(shares, pp)
        moved = sizer.states(shares, offloadable_bytes)
        prices = clock.prices(shares, pp, layers[..., start:end], coefficients, moved)
        relief, first = sizer.relief(moved, pp), 0
        for block in blocks:
            part = slice(first, first + len(block.shares))
            first = part.stop
            parts = coefficients[:, part], relief[:, part], prices.take(part)
            tables.append(_Table(request, clock, counter, block, *parts))
    if request.host:
        fastest = min((float(table.seconds.min()) for table in tables), default=np.inf)
        for table in tables:
            table.add_host_memory(fastest)
    memory, seconds, host = (tuple(getattr(table, name) for table in tables) for name in ("memory", "seconds", "host"))
    return Survey(request, space, memory, seconds, host)


@dataclass
class _Table:
    """Memory, seconds and host memory of one block; arrays of shape [pipelines, shares] with the values of `Survey`."""

    request: Request
    clock: Clock
    counter: Counter
    block: Block
    coefficients: Floats
    relief: Floats
    prices: Prices

    def __post_init__(self) -> None:
        counter, block, shares = self.counter, self.block, self.block.shares
        self.counts = list(map(counter, block.pipelines))
        self.memory = of_largest_rank(self.counts, self.coefficients)
        self.seconds = np.full(self.memory.shape, np.inf)
        self.host = np.zeros(self.memory.shape, dtype=np.int64)
        fits = self.memory <= self.request.memory_limit
        if shares.offload.any() or block.pipelines[0].offloaded:
            kept = [counter(each._replace(offloaded=0)) for each in block.pipelines]
            gone = of_largest_rank(kept, self.coefficients + shares.offload * self.relief) - self.memory
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
        """Add host memory to layouts that do not fit, if they would take less than `bound` seconds without a limit."""
        lacking = self.memory > self.request.memory_limit
        lacking &= self.clock.least(self.block.pipelines[0], self.prices) < bound
        rows, columns = np.flatnonzero(lacking.any(1)), np.flatnonzero(lacking.any(0))
        if not len(rows):
            return
        base = self._times(rows, columns)
        # No use of host memory makes a step faster.
        lacking = lacking[np.ix_(rows, columns)] & (base < bound)
        kept, left = lacking.any(1), lacking.any(0)
        if not kept.any():
            return
        within, rows, columns = np.ix_(kept, left), rows[kept], columns[left]
        where, base, lacking = np.ix_(rows, columns), base[within], lacking[within]
        memory, seconds, host = self.memory[where], self.seconds[where], self.host[where]
        before = memory.copy()
        for some, size, longer, code in self._ways(rows, columns):
            time = np.where(size <= self.request.memory_limit, base[:, some] + longer, np.inf)
            # If no use makes a layout fit, the smallest size is kept for the error message.
            better = (time < seconds[:, some]) | (
                np.isinf(time) & np.isinf(seconds[:, some]) & (size < memory[:, some])
            )
            better &= lacking[:, some] & ((time < bound) | np.isinf(bound))
            # Bytes that leave the device are about those that reach host memory; the best layouts are sized exactly.
            better &= before[:, some] - size <= self.request.host_limit
            for table, values in ((memory, size), (seconds, time), (host, code)):
                table[:, some] = np.where(better, values, table[:, some])
        self.memory[where], self.seconds[where], self.host[where] = memory, seconds, host

    def _ways(self, rows: Integers, columns: Integers) -> Iterator[tuple[Integers, Floats, Floats, Integers]]:
        """Yield uses of host memory: (indices into `columns`, bytes on the device, added seconds, `Survey.host`)."""
        limit, pipelines = self.request.memory_limit, [self.block.pipelines[row] for row in rows.tolist()]
        shares, prices = self.block.shares.take(columns), self.prices.take(columns)
        coefficients = self.coefficients[:, columns]
        counts = [self.counts[row] for row in rows.tolist()]
        starts = [(coefficients, np.zeros(len(columns)), 0)]
        if HOST[0] in self.request.host:
            moved = coefficients - self.relief[:, columns]
            size = of_largest_rank(counts, moved)
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
        for matrix, longer, optimizer in starts:
            # At each moment, a rank's memory is linear in the number of offloaded layers.
            none, every = (np.concatenate(each) @ matrix[:, some] for each in (counts, without))
            layers = np.ceil(whole * (none - limit) / np.maximum(none - every, 1.0)).clip(1, whole)
            layers = np.maximum.reduceat(layers, firsts, axis=0)
            stored = none + (every - none) * np.repeat(layers, sizes, axis=0) / whole
            added = longer[some] + self.clock.late(pipelines, layers, prices.take(some))
            yield some, np.maximum.reduceat(stored, firsts, axis=0), added, (2 * layers + optimizer).astype(np.int64)


def nothing_legal(request: Request) -> ConfigError:
    """Return the error for a request without a legal layout: the first constraint to relax, and its possible values."""
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
        f"batch that is divisible by more divisors of {world}, such as {world} itself, or another --gpus"
    )


def nothing_fits(found: Survey) -> ConfigError:
    """Return the error for a request of which no legal layout fits into memory: the least memory needed."""
    layout, least = found.leanest()
    if least <= found.request.memory_limit:
        return ConfigError(
            f"layouts that fit into {format_bytes(found.request.memory_limit)} per rank keep more than "
            f"{format_bytes(found.request.host_limit)} in host memory: {describe(layout)}; use more --gpus, or a "
            "cluster file with a larger node.host_memory_bytes"
        )
    return ConfigError(
        f"none of {len(found.space)} layouts fits into {format_bytes(found.request.memory_limit)} per rank on "
        f"{found.request.world_size} ranks; the least takes {format_bytes(least)}: {describe(layout)}; use --max-memory "
        f"{int(np.ceil(least / 1e9))}GB on devices that have it, more --gpus, or fewer constraints"
    )


def describe(layout: Layout) -> str:
    """Describe a layout in one line: `tp 8, pp 4 (1f1b), dp 2, ...`, without sizes of 1."""
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
        f"activations of {plural(pipeline.offloaded, 'layer')} per stage in host memory" if pipeline.offloaded else "",
        "optimizer states in host memory" if layout.offload else "",
    ]
    return ", ".join(word for word in words if word)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(space: Space, name: str) -> list[Any]:
    of_pipeline = {"pp": "pp", "vpp": "vpp", "pipeline_schedule": "schedule", HOST[1]: "offloaded"}
    if name in of_pipeline:
        return sorted({getattr(each, of_pipeline[name]) for block in space.blocks for each in block.pipelines})
    of_share = {"recompute_granularity": "recompute", "dp_strategy": "strategy", HOST[0]: "offload"}
    found = np.unique(space.column(of_share.get(name, name))).tolist()
    return [CHOICES[name][value] for value in found] if name in CHOICES else found


SPARE = 2  # layouts refined beyond the requested number, as closed forms may order near-equal ones wrongly
RECUT = 2  # number of the best layouts for which other cuts, schedules and recompute orders are tried
MOST_BUILT = 1024  # microbatches times stages up to which a schedule is built: larger ones take seconds and gain little


@dataclass(frozen=True, kw_only=True)
class Candidate:
    layout: Layout
    settings: Mapping[str, Any]  # chosen settings, flat; with pipeline_layers if the cut changed
    config: RunConfig  # validated
    estimate: float  # seconds of a step by the closed form
    prediction: Prediction

    @property
    def fullest(self) -> tuple[int, RankMemory]:
        """The pipeline rank that needs most memory, and its memory."""
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
    objective: str = "time"  # or `cost` (GPU hours), or `memory` (of the fullest rank)


@gc_paused()
def find(request: Request, cluster: Cluster, stack: SoftwareStack, *, top: int = 5, objective: str = "time") -> Plan:
    """Return the `top` best layouts that fit: the fastest, or with the objective `memory` the smallest. Raises
    ConfigError if no layout is legal or none fits; the message suggests a change that helps."""
    found = survey(request, cluster, stack)
    if not len(found.space):
        raise nothing_legal(request)
    refiner = _Refiner(request, cluster, stack)
    candidates: dict[tuple[Any, ...], Candidate] = {}
    for layout, seconds in found.fastest(objective):
        if len(candidates) == top + SPARE:
            break
        if _kind(layout) not in candidates:  # later ones are slower variants
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
    """Return the plan with the least GPU time per step among all ranks, half of them, a quarter, ... as long as layouts
    are legal and fit, and the seconds of a step per number of ranks. Raises as `find` does for all ranks."""
    plans = [find(request, cluster, stack, top=top, objective="cost")]
    while (ranks := plans[-1].request.world_size) % 2 == 0:
        try:
            plans.append(find(replace(request, world_size=ranks // 2), cluster, stack, top=top, objective="cost"))
        except ConfigError:
            break
    seconds = {each.request.world_size: float(each.candidates[0].prediction.step_seconds) for each in plans}
    return min(plans, key=lambda each: each.request.world_size * seconds[each.request.world_size]), seconds


def config_of(request: Request, chosen: Mapping[str, Any]) -> RunConfig:
    """Return the request's config with `chosen` settings, validated as if read from a file."""
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
    """Predicts layouts with the full cost model, and tries variants of them."""

    request: Request
    cluster: Cluster
    stack: SoftwareStack

    def predicted(self, layout: Layout, chosen: Mapping[str, Any], estimate: float) -> Candidate | None:
        """Predict a layout; None if a rule about another setting or its exact memory rules it out."""
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
        """Return the fastest of the candidate and those variants, (layout, changed settings), that fit."""
        found = [candidate]
        for layout, changes in others:
            other = self.predicted(layout, {**candidate.settings, **changes}, candidate.estimate)
            found += [] if other is None else [other]
        return min(found, key=lambda each: each.prediction.step_seconds)

    def varied(self, candidate: Candidate) -> Candidate:
        """Try a schedule built for the layout's costs (`auto`), and full recompute ahead of the arriving gradients, with
        activations of a few layers in host memory if needed; return the fastest that fits."""
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
        """Cut stages by predicted seconds, if that is faster. Offloaded layers are chosen again for the new stages."""
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
