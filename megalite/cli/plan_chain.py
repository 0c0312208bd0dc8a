"""`megalite plan-chain`: choose stages, replicas and placement for a chain of layers on a hierarchical cluster."""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.cli.display import table
from megalite.cli.output import show
from megalite.config.byte_size import format_bytes
from megalite.config.reading import write_text
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.simulate import Timeline
from megalite.pipeline.ir.svg import Panel, draw_svg
from megalite.planner.chain.inputs import ChainCluster, ChainProfile, find_profile, read_cluster
from megalite.planner.chain.plan import Judged, device_ids, plan_costs, timeline
from megalite.planner.chain.plan import run as run_plan
from megalite.planner.chain.planning import Planned, plan_chain

_WIDTH = 160


def run(flags: Namespace) -> int:
    profile, cluster = find_profile(flags.profile), read_cluster(flags.cluster)
    memory = flags.memory or cluster.memory_gb * 1e9
    planned = plan_chain(profile, cluster, flags.global_batch_size, memory=memory)
    answer = _Answer(planned, profile, cluster, flags.global_batch_size, memory)
    if flags.svg is not None:
        samples = f"{planned.best.seconds:.4g} s per step of {flags.global_batch_size} samples"
        panel = Panel(
            timeline=answer.drawing(),
            peaks=tuple(map(format_bytes, planned.best.memory)),
            summary=f"{profile.name} on {cluster.name}: {samples}; each rank is a stage",
        )
        write_text(flags.svg, draw_svg([panel], unit="ms", peak="peak memory of a device of the stage"))
    text = json.dumps(answer.data()) if flags.json else "\n".join(answer.lines(details=flags.compare))
    show(text if flags.json or flags.svg is None else f"{text}\nwrote {flags.svg}")
    return 0


@dataclass(frozen=True)
class _Answer:
    planned: Planned
    profile: ChainProfile
    cluster: ChainCluster
    samples: int
    memory: float

    def drawing(self) -> Timeline:
        """Return the timeline of the best plan's step, in milliseconds."""
        plan = self.planned.best.plan
        costs = plan_costs(plan, self.profile, self.cluster)
        return timeline(plan, costs, run_plan(plan, costs, self.cluster))

    def lines(self, *, details: bool) -> Iterator[str]:
        """Yield the plan, the comparison with the baselines and the timeline; with `details` the baselines' stages."""
        planned, cluster = self.planned, self.cluster
        devices = f"{cluster.num_gpus} devices of {format_bytes(self.memory)}"
        yield f"{self.profile.name} on {cluster.name} ({devices}), {self.samples} samples per step"
        yield f"profile: {self.profile.provenance}\n"
        yield from self._stages(planned.best)
        yield ""
        yield from self._comparison()
        end = "the search is complete" if planned.complete else "the search stopped at its limit"
        yield f"\nsearched {planned.nodes} partial plans, simulated {planned.simulations}; {end}"
        for name, other in planned.baselines.items() if details else ():
            yield f"\n{name}:"
            yield from self._stages(other)
        yield "\ntimes in ms:"
        yield render_grid(self.drawing(), width=_WIDTH)

    def _stages(self, judged: Judged) -> Iterator[str]:
        plan, costs = judged.plan, plan_costs(judged.plan, self.profile, self.cluster)
        ids = device_ids(plan.stages, self.cluster.gpus_per_machine)
        rows = [["stage", "layers", "from", "to", "replicas", "devices", "F ms", "B ms", "reduce ms", "memory"]]
        for number, stage in enumerate(plan.stages):
            first, last = self.profile.layers[stage.first].name, self.profile.layers[stage.last - 1].name
            times = [f"{1e3 * seconds[number]:.4g}" for seconds in (costs.forward, costs.backward, costs.reduce)]
            row = [str(number), str(stage.last - stage.first), first, last, str(stage.replicas), _ranges(ids[number])]
            rows.append([*row, *times, format_bytes(judged.memory[number])])
        ahead = f", warm-up {plan.warm_up}" if len(plan.stages) > 1 else ""
        unused = f", idle devices: {idle}" if (idle := self.cluster.num_gpus - sum(map(len, ids))) else ""
        yield f"{plan.microbatches} microbatches of {plan.microbatch_size} samples{ahead}{unused}"
        yield from table(rows, right={0, 1, 4, 6, 7, 8, 9})

    def _comparison(self) -> list[str]:
        best = self.planned.best
        rows = [["plan", "s per step", "samples/s", "of the best", "stages", "fullest device", ""]]
        for name, judged in {"this plan": best, **self.planned.baselines}.items():
            fullest = max(judged.memory)
            speed = [f"{judged.seconds:.4g}", f"{self.samples / judged.seconds:.4g}"]
            fits = "" if fullest <= self.memory else "does not fit"
            stages = str(len(judged.plan.stages))
            rows.append([name, *speed, f"{judged.seconds / best.seconds:.2f}", stages, format_bytes(fullest), fits])
        return table(rows, right=range(1, 6))

    def data(self) -> dict[str, Any]:
        """Return the answer with stable keys, for JSON."""
        planned = self.planned
        return {
            "profile": self.profile.name,
            "provenance": self.profile.provenance,
            "cluster": self.cluster.name,
            "devices": self.cluster.num_gpus,
            "global_batch_size": self.samples,
            "memory_bytes": None if self.memory == float("inf") else self.memory,
            "plan": self._plan_data(planned.best),
            "baselines": {name: self._plan_data(other) for name, other in planned.baselines.items()},
            "search": {"nodes": planned.nodes, "complete": planned.complete, "simulations": planned.simulations},
        }

    def _plan_data(self, judged: Judged) -> dict[str, Any]:
        plan, costs = judged.plan, plan_costs(judged.plan, self.profile, self.cluster)
        ids = device_ids(plan.stages, self.cluster.gpus_per_machine)
        return {
            "step_seconds": judged.seconds,
            "samples_per_second": self.samples / judged.seconds,
            "microbatches": plan.microbatches,
            "microbatch_size": plan.microbatch_size,
            "warm_up": plan.warm_up,
            "fits": max(judged.memory) <= self.memory,
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


def _ranges(ids: tuple[int, ...]) -> str:
    """Return device numbers as `0-3,8`."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
