"""Speed of the planner's search, and whether its closed form finds the same layouts as the simulator.

python -m benchmarks.planner.search [--json FILE] [--refined N]

Seconds are CPU seconds of this process on one thread, the minimum of three runs, since other work on the machine lengthens
them; the start of the process is excluded. The regret: how much slower the plan is than the best of the N fastest by closed form.
"""

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy reads it

import numpy as np

from benchmarks import common
from megalite.cli import plan
from megalite.cli.tool_commands import PLAN
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.search import config_of, find, survey
from megalite.planner.search.space import Request

CASES = {
    "175B x 512": "--preset gpt3-175b --cluster dgx-a100 --gpus 512 --global-batch-size 1536",
    "175B x 1024": "--preset gpt3-175b --cluster dgx-a100 --gpus 1024 --global-batch-size 1536",
    "1T x 3072": "--preset gpt-1t --cluster dgx-a100 --gpus 3072 --global-batch-size 3072",
    "8B x 64": "--preset llama3-8b --cluster dgx-h100 --gpus 64 --global-batch-size 512",
    "8x7B x 256": "--preset mixtral-8x7b --cluster dgx-h100 --gpus 256 --global-batch-size 512",
}
RUNS = 3


def seconds_of(work: Callable[[], Any]) -> float:
    return min(common.seconds_of(work, time.process_time) for _ in range(RUNS))


def regret(request: Request, cluster: Cluster, stack: SoftwareStack, refined: int) -> tuple[float, float]:
    """(regret of the plan, mean error of the closed form) over the fastest layouts."""
    best = find(request, cluster, stack).candidates[0].prediction.step_seconds
    seconds, errors = [], []
    for layout, estimate in itertools.islice(survey(request, cluster, stack).fastest(), refined):
        config = config_of(request, layout.settings())
        seconds.append(predict(config, cluster, stack).step_seconds)
        errors.append(abs(estimate / seconds[-1] - 1.0))
    return max(best / min(seconds) - 1.0, 0.0), float(np.mean(errors))


def measured(name: str, refined: int) -> dict[str, Any]:
    request, cluster, stack = plan.search_inputs(PLAN.parse(CASES[name].split()))
    space = len(survey(request, cluster, stack).space)
    surveyed = seconds_of(lambda: survey(request, cluster, stack))
    planned = seconds_of(lambda: find(request, cluster, stack))
    lost, error = regret(request, cluster, stack, refined)
    speed = {"survey_seconds": surveyed, "layouts_per_second": space / surveyed, "plan_seconds": planned}
    return {"case": name, "layouts": space, **speed, "regret": lost, "closed_form_error": error}


def process_seconds() -> float:
    """CPU seconds of the whole command, including the interpreter."""
    program = (
        "import resource, sys; from megalite.cli.tool_commands import PLAN as main; main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)"
    )
    words = common.python("-c", program, *CASES["175B x 512"].split())
    done = subprocess.run(words, env=common.environment(), capture_output=True, text=True, check=True)
    return float(done.stderr)


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write the results there too")
    parser.add_argument("--refined", type=int, default=40, help="layouts to refine for the regret (40)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    arguments = parser.parse_args(words)
    rows = []
    print(f"{'case':<12}{'layouts':>10}{'survey':>9}{'layouts/s':>12}{'plan':>9}{'regret':>9}{'form':>8}")
    for name in arguments.cases:
        rows.append(row := measured(name, arguments.refined))
        print(
            f"{name:<12}{row['layouts']:>10}{row['survey_seconds']:>7.2f} s{row['layouts_per_second']:>12.3g}"
            f"{row['plan_seconds']:>7.2f} s{row['regret']:>9.2%}{row['closed_form_error']:>8.2%}"
        )
    whole = process_seconds()
    print(f"megalite plan of 175B x 512, the whole process: {whole:.2f} s")
    found = {"numpy": np.__version__, "process_seconds": whole, "cases": rows}
    common.write_json(arguments.json, "planner.search", words, found)


if __name__ == "__main__":
    main()
