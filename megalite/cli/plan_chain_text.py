"""What `megalite plan-chain` says of a plan, as text and as data."""

from typing import Any

from megalite.config.byte_size import format_bytes
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.simulate import Timeline
from megalite.planner.chain.inputs import ChainCluster, ChainProfile
from megalite.planner.chain.judge import Judged, run, timeline
from megalite.planner.chain.plan import device_ids, plan_costs
from megalite.planner.chain.planning import Planned

_WIDTH = 160


def drawing(judged: Judged, profile: ChainProfile, cluster: ChainCluster) -> Timeline:
    """The step on a clock, in milliseconds."""
    costs = plan_costs(judged.plan, profile, cluster)
    return timeline(judged.plan, costs, run(judged.plan, costs, cluster))


def format_plan(
    planned: Planned, profile: ChainProfile, cluster: ChainCluster, samples: int, memory: float, *, details: bool
) -> str:
    """The plan, the others beside it, and the timeline; `details`: the stages of the others too."""
    best = planned.best
    lines = [
        f"{profile.name} on {cluster.name} ({cluster.num_gpus} devices of {format_bytes(memory)}), {samples} samples "
        f"a step",
        f"profile: {profile.provenance}",
        "",
        *_stages(best, profile, cluster),
        "",
        *_comparison(planned, samples, memory),
        "",
        _search_says(planned),
    ]
    if details:
        for name, other in planned.baselines.items():
            lines += ["", f"{name}:", *_stages(other, profile, cluster)]
    lines += ["", "times in ms:", render_grid(drawing(best, profile, cluster), width=_WIDTH)]
    return "\n".join(lines)


def as_data(
    planned: Planned, profile: ChainProfile, cluster: ChainCluster, samples: int, memory: float
) -> dict[str, Any]:
    """The same with stable keys."""
    return {
        "profile": profile.name,
        "provenance": profile.provenance,
        "cluster": cluster.name,
        "devices": cluster.num_gpus,
        "global_batch_size": samples,
        "memory_bytes": None if memory == float("inf") else memory,
        "plan": _plan_data(planned.best, profile, cluster, samples, memory),
        "baselines": {
            name: _plan_data(other, profile, cluster, samples, memory) for name, other in planned.baselines.items()
        },
        "search": {"nodes": planned.nodes, "complete": planned.complete, "simulations": planned.simulations},
    }


def _plan_data(
    judged: Judged, profile: ChainProfile, cluster: ChainCluster, samples: int, memory: float
) -> dict[str, Any]:
    plan, costs = judged.plan, plan_costs(judged.plan, profile, cluster)
    ids = device_ids(plan.stages, cluster.gpus_per_machine)
    return {
        "step_seconds": judged.seconds,
        "samples_per_second": samples / judged.seconds,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "warm_up": plan.warm_up,
        "fits": max(judged.memory) <= memory,
        "stages": [
            {
                "first_layer": stage.first,
                "last_layer": stage.last,
                "replicas": stage.replicas,
                "devices": list(ids[number]),
                "forward_seconds": costs.forward[number],
                "backward_seconds": costs.backward[number],
                "all_reduce_seconds": costs.reduce[number],
                "memory_bytes": judged.memory[number],
            }
            for number, stage in enumerate(plan.stages)
        ],
    }


def _stages(judged: Judged, profile: ChainProfile, cluster: ChainCluster) -> list[str]:
    plan, costs = judged.plan, plan_costs(judged.plan, profile, cluster)
    ids = device_ids(plan.stages, cluster.gpus_per_machine)
    rows = [["stage", "layers", "from", "to", "replicas", "devices", "F ms", "B ms", "reduce ms", "memory"]]
    for number, stage in enumerate(plan.stages):
        rows.append(
            [
                str(number),
                str(stage.last - stage.first),
                profile.layers[stage.first].name,
                profile.layers[stage.last - 1].name,
                str(stage.replicas),
                _ranges(ids[number]),
                *(f"{1e3 * seconds[number]:.4g}" for seconds in (costs.forward, costs.backward, costs.reduce)),
                format_bytes(judged.memory[number]),
            ]
        )
    ahead = f", warm-up {plan.warm_up}" if len(plan.stages) > 1 else ""
    return [f"{plan.microbatches} microbatches of {plan.microbatch_size} samples{ahead}", *_table(rows, left=(2, 3, 5))]


def _comparison(planned: Planned, samples: int, memory: float) -> list[str]:
    best = planned.best
    rows = [["plan", "s a step", "samples/s", "of the best", "stages", "fullest device", ""]]
    for name, judged in {"this plan": best, **planned.baselines}.items():
        fullest = max(judged.memory)
        rows.append(
            [
                name,
                f"{judged.seconds:.4g}",
                f"{samples / judged.seconds:.4g}",
                f"{judged.seconds / best.seconds:.2f}",
                str(len(judged.plan.stages)),
                format_bytes(fullest),
                "" if fullest <= memory else "does not fit",
            ]
        )
    return _table(rows, left=(0, 6))


def _search_says(planned: Planned) -> str:
    looked = f"searched {planned.nodes} partial plans, simulated {planned.simulations}"
    if planned.complete:
        return f"{looked}; the search is complete"
    return f"{looked}; the search stopped at its limit"


def _ranges(ids: tuple[int, ...]) -> str:
    """`0-3,8`."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _table(rows: list[list[str]], *, left: tuple[int, ...]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
