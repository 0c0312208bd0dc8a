"""From a sweep to its configurations: grid, list and plan, laid over the base."""

import copy
import itertools
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megalite.config.describe import values_of
from megalite.config.errors import ConfigError
from megalite.config.files import level_from_text, read_level
from megalite.config.merge import Level, Merged, merge
from megalite.config.presets import read_preset
from megalite.config.run import RunConfig
from megalite.sweep.conditions import RANKS
from megalite.sweep.fixed import fix, ignored
from megalite.sweep.spec import SweepSpec
from megalite.sweep.yaml_keys import entries, mapping, plain_settings, read_mapping

MOST = 100_000
"""Configurations of one sweep: a grid with more is a slip."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration, not yet checked."""

    source: str
    """`grid`, `list, entry 2` or `plan 1`."""
    settings: Mapping[str, Any]
    """What it gives over the base."""
    config: RunConfig
    explicit: frozenset[str]
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """All configurations of a sweep."""

    candidates: tuple[Candidate, ...]
    left_out: int
    """By `exclude` and `only`."""
    ignored: tuple[str, ...]
    """Settings of the base that a sweep does not go by."""


def expand(spec: SweepSpec) -> Expansion:
    """The configurations of a sweep, in the order plan, list, grid.

    Raises:
        ConfigError: a file cannot be read, the grid is too large, or no configuration is left.
    """
    levels = _base_levels(spec)
    candidates, left_out = [], 0
    for source, given in _points(spec):
        merged = _merge(levels, given, source)
        config, fixed = fix(merged.config, spec.steps)
        p = config.parallel
        candidate = Candidate(
            source=source,
            settings=given,
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
            f"sweep {spec.path}: exclude and only leave none of {left_out} configurations; relax one of them"
        )
    base = merge(copy.deepcopy(levels)).config
    return Expansion(candidates=tuple(candidates), left_out=left_out, ignored=tuple(ignored(base)))


def _base_levels(spec: SweepSpec) -> list[Level]:
    levels = [read_preset(spec.preset)] if spec.preset is not None else []
    levels += [read_level(path) for path in spec.base]
    if spec.settings:
        levels.append(_level(spec.settings, f"sweep {spec.path}, settings"))
    return levels


def _level(given: Mapping[str, Any], source: str) -> Level:
    return level_from_text(yaml.safe_dump(dict(given)), source)


def _merge(levels: list[Level], given: Mapping[str, Any], source: str) -> Merged:
    # Merging fills in what the levels' rules stand for, differently for each configuration.
    return merge([*copy.deepcopy(levels), _level(given, source)])


def _points(spec: SweepSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if spec.from_plan is not None:
        for number, plan in enumerate(read_plans(spec.from_plan)[: spec.top], 1):
            yield f"plan {number}", plan
    for number, given in enumerate(spec.listed, 1):
        yield f"list, entry {number}", given
    if not spec.grid:
        return
    size = 1
    for _, values in spec.grid:
        size *= len(values)
    if size > MOST:
        raise ConfigError(
            f"sweep {spec.path}: the grid has {size} configurations, more than {MOST}; shorten an axis"
        )
    for chosen in itertools.product(*(values for _, values in spec.grid)):
        point: dict[str, Any] = {}
        for settings in chosen:
            point |= settings
        yield "grid", point


def read_plans(path: Path) -> list[dict[str, Any]]:
    """The entries of a plan, best first: a YAML file with `plans:`, a list of settings by name.

    Raises:
        ConfigError: the file cannot be read, holds no plans, or names a setting that there is not.
    """
    tree = read_mapping(path, "plan")
    if "plans" not in tree:
        beside = path.with_name(f"{path.stem}-alternatives{path.suffix}")
        remedy = f"; use {beside.name}, which lies beside it" if beside.is_file() else ""
        keys = reprlib.repr(", ".join(tree))
        raise ConfigError(f"plan {path} has no plans: a list of settings; it holds {keys}{remedy}")
    plans = []
    for number, each in enumerate(entries(tree["plans"], f"plan {path}: plans"), 1):
        where = f"plan {path}, plan {number}"
        plans.append(plain_settings(mapping(each, where), where))
    return plans


def _wanted(candidate: Candidate, spec: SweepSpec) -> bool:
    values = values_of(candidate.config)
    p = candidate.config.parallel
    dp, rest = divmod(candidate.ranks, p.tp * p.pp * p.cp)
    values["dp"] = values["dp"] or (dp if not rest else None)
    values[RANKS] = candidate.ranks
    return all(condition.holds(values) for condition in spec.only) and not any(
        condition.holds(values) for condition in spec.exclude
    )
