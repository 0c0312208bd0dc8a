#!/usr/bin/env python3
"""The planner beside its goals: step times, memory, chains, search, and a sweep of real runs on this machine.

    OMP_NUM_THREADS=1 python benchmarks/planner.py [--parts PART ...] [--data FOLDER] [--folder FOLDER] [--json FILE]

time    benchmarks/planner_time.py: predicted beside measured step times of 2 to 3,072 A100; takes --data
memory  benchmarks/planner_memory.py: bytes beside what is published and what tiny runs on two gloo ranks hold
chain   benchmarks/planner_chain.py: DAPPLE's planner beside PipeDream's, data parallelism and straight pipelines
search  benchmarks/planner_search.py: how fast layouts are priced and planned
sweep   benchmarks/planner_sweep.py: 17 layouts on 4 gloo ranks, three times: some 20 minutes with nothing else running; takes --folder

Each goal is printed beside what was measured. Without --parts all run but those whose folder is not given.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import planner_chain
import planner_memory
import planner_search
import planner_sweep
import planner_time

from megalite.cli.plan_flags import parse_plan
from megalite.parity.pool import RankPool
from megalite.planner.chain.twins import TWINS
from megalite.planner.cost.step import predict
from megalite.planner.search.search import config_of
from megalite.planner.search.survey import survey

LARGE = "175B x 1024"
"""The case whose single prediction has a goal."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One number that was asked for."""

    part: str
    what: str
    measured: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the measured number keeps to the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    @property
    def line(self) -> str:
        """For the table."""
        sign = ">=" if self.at_least else "<="
        return (
            f"{self.part:<8}{self.what:<58}{self.measured:>12.4g}  {sign} {self.bound:<8.3g}{self.unit:<12}"
            f"{'met' if self.met else 'MISSED'}"
        )


Part = tuple[Any, list[Goal]]
"""Raw results, goals."""


def time_part(arguments: argparse.Namespace) -> Part:
    """Step times."""
    results = planner_time.measure(arguments.data, ("multi", "single", "published"))
    return results, time_goals({each["part"]: each for each in results})


def time_goals(parts: dict[str, dict[str, Any]]) -> list[Goal]:
    """Of the results by their titles."""

    def goal(what: str, measured: float, bound: float) -> Goal:
        return Goal(part="time", what=what, measured=measured, bound=bound, unit="%")

    multi, single = parts[planner_time.TOGETHER], parts["single node"]
    table, row = parts[planner_time.LEFT_OUT], parts["SC'21"]
    picks = [each["regret"] for each in single["regret"]]
    return [
        goal("several nodes, each size left out, mean", multi["errors_percent"]["mean"], 8.0),
        goal("several nodes, each size left out, median", multi["errors_percent"]["median"], 4.0),
        goal("several nodes, regret of the pick, mean", 100 * statistics.fmean(multi["regret"]), 3.0),
        goal("one node, fitted on 50 of its rows, mean", single["errors_percent"]["mean"], 6.5),
        goal("one node, fitted on 50 of its rows, median", single["errors_percent"]["median"], 4.0),
        goal(f"one node, regret of the pick, mean of {len(picks)}", 100 * statistics.fmean(picks), 3.0),
        goal("one node, regret of the pick, worst group", 100 * max(picks), 3.0),
        goal("Korthikanti table 5, each model left out, mean", table["errors_percent"]["mean"], 3.0),
        goal("SC'21, 1T on 3,072, nothing of it fitted", row["errors_percent"]["mean"], 5.0),
    ]


def memory_part(arguments: argparse.Namespace) -> Part:
    """Bytes."""
    published = planner_memory.published_rows()
    with RankPool(2) as pool:
        measured = planner_memory.measured_rows(pool, planner_memory.CASES)
    planner_memory.show(published, measured)
    form = max(abs(row["form"] - row["published"]) for row in published)
    error = max(abs(row["error"]) for row in measured)
    goals = [
        Goal(
            part="memory", what="Korthikanti figure 1, largest error", measured=form, bound=0.01, unit="GiB"
        ),
        Goal(
            part="memory",
            what=f"{len(measured)} tiny runs, largest error of all that is held",
            measured=100 * error,
            bound=2.0,
            unit="%",
        ),
    ]
    return {"published": published, "measured": measured}, goals


def chain_part(arguments: argparse.Namespace) -> Part:
    """Chains on four clusters."""
    rows = [
        planner_chain.bench(model, where, memory=float("inf"), nominal=False)
        for where in planner_chain.CLUSTERS
        for model in TWINS
    ]
    print(planner_chain.table(rows))
    least = min(min(row["times_longer"].values()) for row in rows)
    most = max(row["times_longer"]["PipeDream"] for row in rows)
    goals = [
        Goal(
            part="chain",
            what=f"{what} of {len(rows)} chains",
            measured=ratio,
            bound=bound,
            unit="",
            at_least=True,
        )
        for what, ratio, bound in (
            ("best other plan's time over ours, least", least, 1.0),
            ("PipeDream's time over ours, most", most, 3.23),
        )
    ]
    return rows, goals


def search_part(arguments: argparse.Namespace) -> Part:
    """Speed, in CPU seconds of this process."""
    rows = [planner_search.measured(name, arguments.refined) for name in planner_search.CASES]
    asked = parse_plan(planner_search.CASES[LARGE].split())
    request, cluster, stack = asked.request, asked.cluster, asked.stack
    layout, _ = next(survey(request, cluster, stack).fastest())
    config = config_of(request, layout.settings())
    one = planner_search.seconds_of(lambda: predict(config, cluster, stack))
    planned = {row["case"]: row["plan_seconds"] for row in rows}
    most = max(row["layouts_per_second"] for row in rows)
    goals = [
        Goal(
            part="search", what="layouts priced a second", measured=most, bound=1e6, unit="1/s", at_least=True
        ),
        Goal(part="search", what="175B x 512 planned", measured=planned["175B x 512"], bound=2.0, unit="s"),
        Goal(part="search", what=f"{LARGE} predicted once", measured=one, bound=0.5, unit="s"),
    ]
    return {"cases": rows, "predict_seconds": one}, goals


def sweep_part(arguments: argparse.Namespace) -> Part:
    """Real runs on this machine."""
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    planner_sweep.profile(folder, 90.0)
    found = planner_sweep.compare([planner_sweep.sweep(folder, 7, turn) for turn in range(3)])
    rank, regret = found["rank_correlation"], 100 * found["regret"]
    return found, [
        Goal(part="sweep", what="rank correlation", measured=rank, bound=0.9, unit="", at_least=True),
        Goal(part="sweep", what="regret of the pick", measured=regret, bound=5.0, unit="%"),
        Goal(
            part="sweep",
            what="layouts that ran",
            measured=float(len(found["layouts"])),
            bound=12.0,
            unit="",
            at_least=True,
        ),
    ]


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "time": time_part,
    "memory": memory_part,
    "chain": chain_part,
    "search": search_part,
    "sweep": sweep_part,
}
NEEDS = {"time": "data", "sweep": "folder"}
"""Part -> flag that it cannot do without."""


def main() -> int:
    """Measure, print, write; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="a100_multi_node.csv, a100_single_node.csv"
    )
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="for the sweep's profile and runs")
    parser.add_argument("--refined", type=int, default=40, metavar="N", help="layouts refined for the regret")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    for part in arguments.parts or ():
        if part in NEEDS and getattr(arguments, NEEDS[part]) is None:
            parser.error(f"part {part} takes --{NEEDS[part]} FOLDER")
    ready = [part for part in PARTS if part not in NEEDS or getattr(arguments, NEEDS[part]) is not None]
    record: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/planner.py", *sys.argv[1:]])}
    goals: list[Goal] = []
    for part in arguments.parts or ready:
        print(f"== {part}", flush=True)
        record[part], found = PARTS[part](arguments)
        goals += found
    print(f"\n{'part':<8}{'what':<58}{'measured':>12}  goal")
    for goal in goals:
        print(goal.line)
    record["goals"] = [{**asdict(goal), "met": goal.met} for goal in goals]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
