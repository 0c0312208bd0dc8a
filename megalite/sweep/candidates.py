"""Expand a sweep's grid, list and plan over its base into configurations, validated and with predictions, or refused."""

import copy
import hashlib
import itertools
import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.batch import microbatch_counts
from megalite.config.data import DataConfig
from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import level_of, read_level, read_preset
from megalite.config.merge import Level, merge
from megalite.config.numbers import format_bytes
from megalite.config.reading import read_yaml
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.memory import USUAL_MEMORY, planned_memory, within_memory
from megalite.partition.pipeline import lowered, plan_stages, proved, schedule_of
from megalite.planner.cost.calibrate import Machine
from megalite.planner.cost.step import predict
from megalite.planner.hardware import load_cluster, load_stack
from megalite.sweep.spec import RANKS, SweepSpec, entries, fix_settings, ignored, mapping, plain_settings
from megalite.tokenizers.build import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class Predicted:
    memory_bytes: int  # of the fullest rank
    first_rank_bytes: int  # of rank 0, where memory is measured
    step_seconds: float | None  # None without a cluster


def read_machine(cluster: str | None, stack: str) -> Machine | None:
    return None if cluster is None else Machine(load_cluster(cluster), load_stack(stack))


def usable_bytes(memory_limit: float | None, machine: Machine | None) -> float | None:
    """Return the bytes of a device that a generated schedule may use, if known."""
    usual = None if machine is None else USUAL_MEMORY * machine.cluster.accelerator.memory_bytes
    return memory_limit or usual


MOST = 100_000  # configurations per sweep: a larger grid is a mistake


@dataclass(frozen=True, kw_only=True)
class Candidate:
    source: str  # `grid`, `list, entry 2` or `plan 1`
    settings: Mapping[str, Any]  # settings changed from the base
    config: RunConfig
    explicit: frozenset[str]
    ranks: int

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """All settings, flat."""
        return values_of(self.config)


class Expansion(NamedTuple):
    candidates: tuple[Candidate, ...]
    base: RunConfig  # config that the candidates change
    left_out: int  # number excluded by `exclude` and `only`
    ignored: tuple[str, ...]  # settings of the base that a sweep overrides


def expand(spec: SweepSpec) -> Expansion:
    """Return the configurations of a sweep in the order plan, list, grid. Raises ConfigError if a file cannot be read,
    the grid is too large, or no configuration remains."""
    levels = _base_levels(spec)
    candidates, left_out = [], 0
    for source, changes in _points(spec):
        # Merging resolves derived settings in the levels, differently for each configuration.
        merged = merge([*map(_fresh, levels), level_of(changes, source)])
        config, fixed = fix_settings(merged.config, spec.steps)
        p = config.parallel
        candidate = Candidate(
            source=source,
            settings=changes,
            config=config,
            explicit=merged.explicit - fixed,
            ranks=spec.ranks or p.tp * p.pp * p.cp * (p.dp or 1),
        )
        if _wanted(candidate, spec):
            candidates.append(candidate)
        else:
            left_out += 1
    if not candidates:
        raise ConfigError(
            f"sweep {spec.path}: exclude and only remove all {left_out} configurations; relax one of them"
        )
    base = merge([*map(_fresh, levels)]).config
    return Expansion(tuple(candidates), fix_settings(base, spec.steps)[0], left_out, tuple(ignored(base)))


def _fresh(level: Level) -> Level:
    """Copy a level that merging changes."""
    found = copy.copy(level)
    found.given, found.derived, found.notes = dict(level.given), dict(level.derived), list(level.notes)
    return found


def _base_levels(spec: SweepSpec) -> list[Level]:
    levels = [read_preset(spec.preset)] if spec.preset is not None else []
    levels += [read_level(path) for path in spec.base]
    if spec.settings:
        levels.append(level_of(spec.settings, f"sweep {spec.path}, settings"))
    return levels


def _points(spec: SweepSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if spec.from_plan is not None:
        for number, plan in enumerate(read_plans(spec.from_plan)[: spec.top], 1):
            yield f"plan {number}", plan
    for number, changes in enumerate(spec.list, 1):
        yield f"list, entry {number}", changes
    if not spec.grid:
        return
    size = math.prod(len(values) for _, values in spec.grid)
    if size > MOST:
        raise ConfigError(f"sweep {spec.path}: the grid has {size} configurations, more than {MOST}; shorten an axis")
    for chosen in itertools.product(*(values for _, values in spec.grid)):
        yield "grid", {name: value for part in chosen for name, value in part.items()}


def read_plans(path: Path) -> list[dict[str, Any]]:
    """Read the entries of a plan, best first, from a YAML file with `plans:`, a list of settings by name."""
    tree = read_yaml(path, kind="plan")
    if "plans" not in tree:
        beside = path.with_name(f"{path.stem}-alternatives{path.suffix}")
        remedy = f"; use {beside.name} beside it" if beside.is_file() else ""
        keys = reprlib.repr(", ".join(tree))
        raise ConfigError(f"plan {path} has no list of plans, only {keys}{remedy}")
    plans = []
    for number, each in enumerate(entries(tree["plans"], f"plan {path}: plans"), 1):
        where = f"plan {path}, plan {number}"
        plans.append(plain_settings(mapping(each, where), where))
    return plans


def _wanted(candidate: Candidate, spec: SweepSpec) -> bool:
    p = candidate.config.parallel
    dp, rest = divmod(candidate.ranks, p.tp * p.pp * p.cp)
    values = {**candidate.values, "dp": p.dp or (None if rest else dp), RANKS: candidate.ranks}
    return all(condition.holds(values) for condition in spec.only) and not any(
        condition.holds(values) for condition in spec.exclude
    )


_KEY_LENGTH = 10


@dataclass(frozen=True, kw_only=True)
class Run:
    key: str  # digest of the config and the number of ranks, equal across sweeps
    source: str
    label: str  # short description
    settings: Mapping[str, Any]  # values of all settings that any run of the sweep changes
    config: RunConfig  # resolved, with a vocabulary, unless refused
    ranks: int
    refused: str | None = None  # why it cannot run
    predicted: Predicted | None = field(default=None, compare=False)

    @property
    def tokens_per_step(self) -> int:
        t = self.config.training
        assert t.global_batch_size is not None, "validate() resolves it"
        return t.global_batch_size * t.seq_length


def check_all(
    expansion: Expansion,
    *,
    memory_limit: float | None,
    machine: Machine | None,
    observe: Callable[[int], None] = lambda done: None,
) -> tuple[Run, ...]:
    """Validate the candidates and return one run per distinct configuration, in order. A run is refused if its
    predicted memory exceeds `memory_limit` bytes per rank; without a limit, schedule `auto` may use the usual part of
    the machine's memory. `machine` predicts times; `observe` receives the number of checked candidates."""
    vocabularies: dict[str, int | ConfigError] = {}
    room = usable_bytes(memory_limit, machine)
    varying, changed = _names(expansion)
    runs: dict[int, Run] = {}
    names = sorted((*settings(), RANKS))
    order = sorted(enumerate(expansion.candidates), key=lambda pair: _pipeline(pair[1]))
    for done, (index, candidate) in enumerate(order):
        observe(done)
        config, refused, predicted = candidate.config, None, None
        try:
            config = validate(config, candidate.ranks, candidate.explicit, startable=True)
            # All sizes depend on the vocabulary's, which may come from a tokenizer.
            if config.model.vocab_size is None:
                size = _vocabulary(config.data, vocabularies)
                config = validate(replace(config, vocab_size=size), candidate.ranks)
            config = config if room is None else within_memory(config, room)
            predicted = _predicted(config, memory_limit, machine)
        except ConfigError as error:
            refused = "; ".join(error.problems)
        values = {**values_of(config), RANKS: candidate.ranks}
        known = json.dumps({name: values[name] for name in names}, default=str)
        key = hashlib.sha256(known.encode()).hexdigest()[:_KEY_LENGTH]
        runs[index] = Run(
            key=key,
            source=candidate.source,
            label=_label(candidate, varying),
            settings={name: candidate.values[name] for name in changed},
            config=config,
            ranks=candidate.ranks,
            refused=refused,
            predicted=predicted,
        )
    distinct = {runs[index].key: index for index in sorted(runs, reverse=True)}
    return tuple(runs[index] for index in sorted(distinct.values()))


def _pipeline(candidate: Candidate) -> tuple[Any, ...]:
    """Return a key that sorts candidates by their schedules: equal ones are then computed once, by small caches."""
    p, training = candidate.config.parallel, candidate.config.training
    microbatch = training.micro_batch_size * (candidate.ranks // (p.tp * p.pp * p.cp))
    return p.pp, p.vpp, str(p.schedule_name), training.seq_length, training.recompute_granularity, microbatch


def _names(expansion: Expansion) -> tuple[list[str], list[str]]:
    """Return (settings that distinguish the runs, settings that any run changes). A setting that all runs change
    equally does not distinguish them; a single run is described by its changes."""
    changes = {name for candidate in expansion.candidates for name in candidate.settings}
    base, values = values_of(expansion.base), [each.values for each in expansion.candidates]
    varying = [name for name in settings() if name in changes and any(v[name] != values[0][name] for v in values)]
    changed = [name for name in settings() if name in changes and any(v[name] != base[name] for v in values)]
    return varying or changed, [name for name in settings() if name in {*varying, *changed}]


def _label(candidate: Candidate, varying: Sequence[str]) -> str:
    """Describe a run by its values of the settings that vary."""
    values = candidate.values
    shown = [
        f"{name} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for name in varying
        if (value := values[name]) != settings()[name].default or name in candidate.settings
    ]
    return ", ".join(shown) or "as the base"


def _predicted(config: RunConfig, limit: float | None, machine: Machine | None) -> Predicted:
    """Predict memory and, for a machine, seconds. Raises ConfigError if the schedule does not support the number of
    microbatches or exceeds pipeline_memory_limit, or if `limit` or the machine rules the config out."""
    schedule = schedule_of(config, microbatch_counts(config)[-1])
    if config.parallel.pipeline_memory_limit is not None:
        proved(config, lowered(config, schedule), plan_stages(config))
    totals = [memory.total_bytes for memory in planned_memory(config, schedule)]
    if limit is not None and max(totals) > limit:
        raise ConfigError(f"needs {format_bytes(max(totals))} per rank, over memory_limit {format_bytes(limit)}")
    seconds = None if machine is None else float(predict(config, *machine).step_seconds)
    return Predicted(memory_bytes=max(totals), first_rank_bytes=totals[0], step_seconds=seconds)


def _vocabulary(data: DataConfig, known: dict[str, int | ConfigError]) -> int:
    """Return the tokenizer's vocabulary size; each tokenizer is read once."""
    if repr(data) not in known:
        try:
            tokenizer = build_tokenizer(data, None)
            assert tokenizer is not None, "require_startable() requires a tokenizer or a size"
            known[repr(data)] = tokenizer.vocab_size
        except ConfigError as error:
            known[repr(data)] = error
    found = known[repr(data)]
    if isinstance(found, ConfigError):
        raise found
    return found
