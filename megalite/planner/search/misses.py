"""What to say when no layout is legal, or none fits: the constraint in the way, the nearest miss, what would make it fit."""

from dataclasses import replace
from typing import Any

import numpy as np

from megalite.config.byte_size import format_bytes
from megalite.config.errors import ConfigError
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.search.request import CHOICES, Request
from megalite.planner.search.space import Layout, Space, enumerate_space
from megalite.planner.search.survey import Survey, survey

_MORE = 5
"""Doublings of the ranks that are tried."""
_NAMED = 12


def nothing_legal(request: Request) -> ConfigError:
    """No layout obeys all rules: the first constraint without which some do, and what it could be."""
    for name in request.fixed:
        space = enumerate_space(_without(request, name))
        if len(space):
            possible = _values(space, name)
            shown = ", ".join(map(_word, possible[:_NAMED])) + (", ..." if len(possible) > _NAMED else "")
            others = [_fixed(request, other) for other in request.fixed if other != name]
            beside = f" with {' and '.join(others)}" if others else ""
            return ConfigError(
                f"no layout of {request.world_size} ranks can have {_fixed(request, name)}{beside}; use {name} {shown}"
            )
    batch = request.config.training.global_batch_size
    given = ", ".join(_fixed(request, name) for name in request.fixed)
    if given:
        return ConfigError(
            f"no layout of {request.world_size} ranks can have {given}, nor with any one of these free; remove some"
        )
    return ConfigError(
        f"no layout is legal on {request.world_size} ranks with global_batch_size {batch}: use a batch that is a multiple of "
        f"more of the ranks' divisors, such as {request.world_size}, or another --gpus"
    )


def nothing_fits(found: Survey, cluster: Cluster, stack: SoftwareStack) -> ConfigError:
    """All that is legal needs more memory than there is: the least of it, and what would make it fit."""
    request = found.request
    layout, least = found.leanest()
    limit = request.memory_limit
    text = (
        f"none of {len(found.space)} layouts fits into {format_bytes(limit)} a rank on {request.world_size} ranks; the least "
        f"takes {format_bytes(least)}: {describe(layout)}. It fits "
    )
    ways = [f"with --max-memory {int(np.ceil(least / 1e9))}GB on devices that have it"]
    for name in request.fixed:
        other = survey(_without(request, name), cluster, stack)
        if other.fitting:
            fitting, _ = next(other.fastest())
            ways.append(f"without {_fixed(request, name)}, e.g. {describe(fitting)}")
            break
    world = request.world_size
    for _ in range(_MORE):
        world *= 2
        other = survey(replace(request, world_size=world), cluster, stack)
        if other.fitting:
            fitting, _ = next(other.fastest())
            ways.append(f"with --gpus {world}, e.g. {describe(fitting)}")
            break
    return ConfigError(text + ", or ".join(ways))


def describe(layout: Layout) -> str:
    """A layout in a line: `tp 8, pp 4 (1f1b), dp 2, ...`; sizes of 1 are left out."""
    pipeline = layout.pipeline
    chunks = f" x {pipeline.vpp}" if pipeline.vpp > 1 else ""
    words = [
        f"tp {layout.tp}" + (" with sequence parallel" if layout.sequence_parallel else ""),
        f"pp {pipeline.pp}{chunks}" + (f" ({pipeline.schedule})" if pipeline.pp > 1 else ""),
        f"cp {layout.cp}" if layout.cp > 1 else "",
        f"ep {layout.ep}" if layout.ep > 1 else "",
        f"dp {layout.dp}" + (f" ({layout.strategy})" if layout.dp * layout.cp > 1 else ""),
        f"micro batch {layout.micro_batch_size}",
        f"recompute {layout.recompute}",
    ]
    return ", ".join(word for word in words if word)


def _without(request: Request, name: str) -> Request:
    return replace(request, fixed={other: kept for other, kept in request.fixed.items() if other != name})


def _fixed(request: Request, name: str) -> str:
    return f"{name} {' or '.join(map(_word, request.fixed[name]))}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(space: Space, name: str) -> list[Any]:
    """What a setting is somewhere in the space."""
    of_pipeline = {"pp": "pp", "vpp": "vpp", "pipeline_schedule": "schedule"}
    if name in of_pipeline:
        return sorted(
            {getattr(each, of_pipeline[name]) for block in space.blocks for each in block.pipelines}
        )
    of_share = {"recompute_granularity": "recompute", "dp_strategy": "strategy"}
    found = np.unique(getattr(space.shares, of_share.get(name, name))).tolist()
    return [CHOICES[name][value] for value in found] if name in CHOICES else found
