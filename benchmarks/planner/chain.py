"""Plans of DAPPLE's table: each model on each cluster by DAPPLE, megalite, PipeDream and GPipe, compared by one simulator.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.chain [--models NAME ...] [--clusters NAME ...] [--memory SIZE]
                                                         [--nominal-messages] [--json FILE]

Each row has megalite's plan and its step time; the relative step times of the paper's plan, of PipeDream's plan, of GPipe on
a straight pipeline (all forwards first, as many microbatches as fit), of pure data parallelism and of a straight pipeline,
each with its best number of microbatches and warm-up; and the devices that megalite's plan leaves idle. Plans that need more
than --memory (default: that of the devices) are marked. With --nominal-messages, messages reach the nominal rate of the
Ethernet instead of DAPPLE's constant of 1 GB/s.

The models are synthetic twins (`megalite/planner/chain/twins`); the paper's plans are those of its table of output plans
(Fan et al., arXiv 2007.01045)."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from megalite.config.numbers import parse_byte_size
from megalite.planner.chain.inputs import TWINS, ChainCluster, ChainProfile, find_profile, read_cluster
from megalite.planner.chain.plan import Judge, Judged, Problem, Stage, Stages, fresh_first, taken_from
from megalite.planner.chain.planning import data_parallel, plan_chain, straight

CLUSTERS = ("A", "B", "C", "4x8")  # the paper's configurations, and two machines of A
# Replicas and layers of the stages; an embedding counts with the first layer.
Cut = tuple[tuple[int, ...], tuple[int, ...]]
_HALVES: Cut = ((8, 8), (19, 18))
PLANS: Mapping[str, Mapping[str, Cut | str]] = {
    "resnet-50": dict.fromkeys("ABC", "data parallel"),
    "vgg-19": {"A": "data parallel", "B": "data parallel", "C": ((15, 1), (13, 6))},
    "gnmt-16": {"A": ((8, 8), (9, 7)), "B": ((8, 8), (9, 7)), "C": "straight pipeline"},
    "bert-48": {"A": ((8, 8), (24, 25)), "B": "straight pipeline", "C": "straight pipeline"},
    "xlnet-36": {"A": _HALVES, "B": _HALVES, "C": "straight pipeline"},
    "amoebanet-36": {"A": ((8, 8), (24, 12)), "B": ((11, 5), (27, 9)), "C": ((11, 5), (27, 9))},
}
_BATCH = {"vgg-19": 2048}  # of that table; the paper's other comparisons have another one
_SAMPLES = {"vgg-19": 1024, "gnmt-16": 1024, "bert-48": 64, "resnet-50": 2048}  # batch sizes; 128 for the others
PAPER, GPIPE = "the paper's plan", "GPipe"


def batch_of(model: str, where: str) -> int:
    samples = _SAMPLES.get(model, 128)
    return _BATCH.get(model, samples) if where in "ABC" else samples


def paper_stages(model: str, where: str, profile: ChainProfile, cluster: ChainCluster) -> Stages | None:
    """The plan in the paper, or None."""
    cut = PLANS.get(model, {}).get(where)
    if cut is None or isinstance(cut, str):
        by_name = {"data parallel": data_parallel, "straight pipeline": straight}
        return None if cut is None else by_name[cut](profile, cluster)
    stages, free, first = [], cluster.empty, 0
    for replicas, layers in zip(*cut, strict=True):
        devices = fresh_first(free, replicas, whole=cluster.gpus_per_machine)
        free = taken_from(free, devices)
        stages.append(Stage(first, first + layers, devices))
        first += layers
    assert first == len(profile.layers)
    return tuple(stages)


def gpipe(judge: Judge) -> Judged | None:
    """The fastest straight pipeline that fits and runs all forwards first, or None."""
    problem = judge.problem
    stages = straight(problem.profile, problem.cluster)
    plans = [problem.plan(stages, count, "all") for count in problem.microbatch_counts()]
    found = [Judged(plan, judge.seconds(plan), judge.memory(plan)) for plan in plans if judge.fits(plan)]
    return min(found, key=lambda judged: judged.seconds, default=None)


def bench(model: str, where: str, *, memory: float | None, nominal: bool) -> dict[str, Any]:
    cluster, profile, batch = read_cluster(where), find_profile(model), batch_of(model, where)
    if nominal:
        cluster = dataclasses.replace(cluster, message_gb_per_s=cluster.network_gb_per_s)
    limit = cluster.memory_gb * 1e9 if memory is None else memory
    began = time.process_time()
    best, others, _, complete, _ = plan_chain(profile, cluster, batch, memory=limit)
    planning = time.process_time() - began
    judge = Judge(Problem(profile, cluster, batch, limit))
    stages = paper_stages(model, where, profile, cluster)
    named = dict(others) | {GPIPE: gpipe(judge)}
    if stages is not None:
        named[PAPER] = judge.best(stages) or judge.best(stages, within_memory=False)
    found = {name: plan for name, plan in named.items() if plan is not None}
    idle = cluster.num_gpus - sum(stage.replicas for stage in best.plan.stages)
    row = {"model": model, "cluster": where, "global_batch_size": batch, "plan": shown(best), "step_s": best.seconds}
    row |= {"paper": shown(found[PAPER]) if PAPER in found else None, "idle": idle, "planning_cpu_s": planning}
    row["times_longer"] = {name: plan.seconds / best.seconds for name, plan in found.items()}
    return {**row, "complete": complete, "fits": {name: max(plan.memory) <= limit for name, plan in found.items()}}


def shown(judged: Judged) -> str:
    """Format a plan: `23:25 layers on 8:8, M=8`."""
    stages = judged.plan.stages
    layers = ":".join(str(stage.last - stage.first) for stage in stages) + " layers"
    devices = ":".join(str(stage.replicas) for stage in stages)
    if len(stages) > 6:
        layers = f"{len(stages)} stages"
        devices = f"{min(s.replicas for s in stages)} to {max(s.replicas for s in stages)}"
    return f"{layers} on {devices}, M={judged.plan.microbatches}"


COLUMNS = (PAPER, "PipeDream", GPIPE, "data parallel", "straight pipeline")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown: megalite's plan and the paper's, and relative times of the others."""
    header = ["model", "cluster", "our plan", "idle", "s per step", "the paper's plan", *COLUMNS]
    cells = []
    for row in rows:
        times = (_times(row, name) for name in COLUMNS)
        first = [row["model"], row["cluster"], row["plan"], str(row["idle"]), f"{row['step_s']:.3f}"]
        cells.append([*first, row["paper"] or "-", *times])
    return common.markdown([header, *cells])


def _times(row: dict[str, Any], name: str) -> str:
    if name not in row["times_longer"]:
        return "does not fit" if name == GPIPE else "-"
    return f"{row['times_longer'][name]:.2f}" + "*" * (not row["fits"][name])


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=TWINS, default=TWINS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--memory", type=parse_byte_size)
    parser.add_argument("--nominal-messages", action="store_true")
    flags = parser.parse_args(words)
    rows = []
    for where in flags.clusters:
        for model in flags.models:
            rows.append(bench(model, where, memory=flags.memory, nominal=flags.nominal_messages))
            print(f"{model} on {where}", file=sys.stderr)
    print(f"{table(rows)}\n\n* needs more memory than a device has")
    common.write_json(flags.json, "planner.chain", words, {"rows": rows})


if __name__ == "__main__":
    main()
