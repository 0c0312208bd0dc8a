"""`megalite plan`: which layout to use, how fast it is and how much memory it takes, before a device is rented."""

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.plan_flags import FLAGS, Asked, parse_plan
from megalite.pipeline.ir.render import render_grid
from megalite.planner.report import (
    drawn_timeline,
    format_plan,
    html_page,
    launch_lines,
    plan_data,
    write_files,
    write_text,
)
from megalite.planner.search.search import Plan, find

_WIDTH = 160
"""Of a timeline where there is no terminal."""
_EXAMPLE = "megalite plan --preset llama2-7b --cluster dgx-a100 --gpus 64 --global-batch-size 1024"


@command("megalite plan")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError."""
    if not argv or "--help" in argv or "-h" in argv:
        show(usage())
        return 0 if argv else 2
    asked = parse_plan(argv)
    plan = find(asked.request, asked.cluster, asked.stack, top=asked.top)
    show(_answer(asked, plan))
    return 0


def usage() -> str:
    """What the flags do."""
    lines = [
        "usage: megalite plan --preset NAME --cluster NAME --gpus N --global-batch-size N [SETTINGS ...]",
        "",
        "Finds the fastest layouts that fit. Any setting of megalite train may be given; those that the search decides",
        "(--tp, --pp, ...) then are constraints. docs/plan.md explains what is printed.",
        "",
    ]
    for flag, (value, text) in FLAGS.items():
        words = f"{flag} {value}".strip()
        lines.append(f"  {words:<22} {text}")
    lines += ["", f"example: {_EXAMPLE}"]
    return "\n".join(lines)


def _answer(asked: Asked, plan: Plan) -> str:
    data = plan_data(plan, asked.tokens)
    written = [] if asked.output is None else write_files(plan, asked.output, asked.tokens)
    best = plan.candidates[0]
    if asked.html is not None:
        write_text(asked.html, html_page(data, drawn_timeline(best, asked.cluster, asked.stack)))
        written.append(asked.html)
    lines = [] if asked.output is None else launch_lines(plan, asked.output)
    if asked.json:
        return json.dumps({**data, "written": list(map(str, written)), "launch": lines}, indent=2)
    text = format_plan(data)
    if asked.explain:
        text += f"\n\n{_drawn(asked, plan, data)}"
    if written:
        text += "\n\n" + "\n".join(f"wrote {path}" for path in written)
    if lines:
        text += "\n\nStart it on each node with the first line, or with the second:\n" + "\n".join(lines)
    return text


def _drawn(asked: Asked, plan: Plan, data: dict[str, Any]) -> str:
    """The step of the best layout, a row a pipeline rank."""
    timeline = drawn_timeline(plan.candidates[0], asked.cluster, asked.stack)
    count, whole = timeline.schedule.num_microbatches, data["layouts"][0]["microbatches"]
    note = "" if count == whole else f" (with {count} microbatches instead of {whole})"
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    return f"The step of the best layout{note}, in seconds:\n{render_grid(timeline, width=width)}"


if __name__ == "__main__":
    sys.exit(main())
