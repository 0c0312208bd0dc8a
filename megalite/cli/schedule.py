"""`megalite schedule`: draw a pipeline schedule, compare several, check one's own."""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.cli.schedule_study import AUTO, NAMES, Request, Study, compare, read_schedule, study_file, study_named
from megalite.cli.schedule_text import format_comparison, format_study, meaning_of_peaks, peak_texts, summary
from megalite.config.byte_size import parse_byte_size
from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.pipeline.ir.costs_file import UNITS, CostTable, read_costs
from megalite.pipeline.ir.generators.registry import default_schedule
from megalite.pipeline.ir.perfetto import merge_traces
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.svg import Panel, draw_svg

_DESCRIPTION = """Draw a pipeline schedule on a clock, with the bubble and the peak memory of each rank; compare schedules; check a
schedule of your own before training with it. Costs are those of a rank's whole share of the model for one microbatch;
without --costs forward, input gradient and weight gradient take 1 each. docs/schedules.md explains all of it."""

_WIDTH = 240
"""Of the grid where there is no terminal."""
_SECONDS_OF_NO_UNIT = 1e-3
"""In a trace, a unit that has no name is a millisecond."""
_OF_SIZES = ("schedule", "pp", "vpp", "microbatches", "group", "warm_up", "recompute_ahead", "forward_only")
"""Flags that say what to build: a CSV file has said all of it."""
_OF_ONE = ("schedule", "forward_only", "write_csv", "lowered")
"""Flags that a comparison has no use for."""


@command("megalite schedule")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError."""
    arguments = _parser().parse_args(argv)
    _check_flags(arguments)
    if _builds(arguments) and sys.stderr.isatty():
        print("building auto: seconds, up to minutes for many ranks and microbatches", file=sys.stderr)
    show(_answer(arguments))
    return 0


def _builds(arguments: argparse.Namespace) -> bool:
    """`auto` is among what is asked for."""
    compared = arguments.compare
    return arguments.schedule == AUTO or (compared is not None and (not compared or AUTO in compared))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite schedule",
        _DESCRIPTION,
        examples=(
            "megalite schedule --schedule zb-v --pp 4 --microbatches 8",
            "megalite schedule --compare 1f1b interleaved zb-h1 --pp 4 --microbatches 8",
        ),
    )
    what = parser.add_argument_group("what to look at")
    what.add_argument("--schedule", metavar="NAME", help=f"{', '.join(NAMES)} (default 1f1b, with --vpp interleaved)")
    what.add_argument("--csv", type=Path, metavar="FILE", help="a schedule of your own: a line a rank, 0F0,0B0,...")
    what.add_argument("--compare", nargs="*", metavar="NAME", help="several schedules in one table (default all)")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--pp", type=int, metavar="P", help="pipeline ranks")
    sizes.add_argument("--vpp", type=int, metavar="V", help="stages a rank (default: what the schedule needs)")
    sizes.add_argument("--microbatches", type=int, metavar="M", help="microbatches a step")
    sizes.add_argument("--group", type=int, metavar="N", help="interleaved: microbatches of a group (default: least)")
    sizes.add_argument("--warm-up", choices=("pa", "pb"), help="1f1b: least warm-up, or twice as deep (default pa)")
    sizes.add_argument("--recompute-ahead", action="store_true", help="recompute before the gradient is there")
    sizes.add_argument("--forward-only", action="store_true", help="evaluation: no backwards")
    clock = parser.add_argument_group("costs and memory")
    clock.add_argument("--costs", type=Path, metavar="FILE", help="JSON: times, links and bytes")
    clock.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="of a rank: bytes such as 12GiB; without bytes in --costs, live microbatches such as 4",
    )
    clock.add_argument("--recv-prefetch", type=int, default=1, metavar="N", help="receives are posted N actions early")
    clock.add_argument("--send-window", type=int, default=1, metavar="N", help="sends that may be pending on a link")
    out = parser.add_argument_group("output")
    out.add_argument("--lowered", action="store_true", help="show the program too: sends, receives, reductions")
    out.add_argument("--json", action="store_true", help="everything as data")
    out.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal")
    out.add_argument("--write-csv", type=Path, metavar="FILE", help="write the schedule, for --csv")
    out.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    out.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev")
    return parser


def _check_flags(arguments: argparse.Namespace) -> None:
    """No flag is without effect, and the sizes are there."""
    given = [name for name, value in vars(arguments).items() if value is not None and value is not False]
    several = arguments.compare is not None
    if arguments.csv is not None:
        for name in given:
            if name in _OF_SIZES:
                raise ConfigError(f"{_flag(name)} has no effect with --csv {arguments.csv}, which says it; remove one")
    else:
        for name in ("pp", "microbatches"):
            if name not in given:
                example = "--pp 4 --microbatches 8"
                raise ConfigError(f"{_flag(name)} is missing; write e.g. megalite schedule {example}")
    for name in given:
        if several and name in _OF_ONE:
            raise ConfigError(f"{_flag(name)} has no effect with --compare; remove one of them")
    outputs = [path for path in (arguments.write_csv, arguments.svg, arguments.trace) if path is not None]
    doubled = next((path for path in outputs if outputs.count(path) > 1), None)
    if doubled is not None:
        raise ConfigError(f"{doubled} is to be written twice; give each output a file of its own")
    named = arguments.compare if several else []
    twice = next((name for name in named or [] if named.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--compare names {twice} twice; keep one of them")
    for name in named or []:
        if name not in NAMES:
            raise ConfigError(f"there is no schedule {name}{nearest(name, NAMES)} (there are {', '.join(NAMES)})")
    wanted = (named or NAMES) if several else (_name(arguments),)
    for flag, name in (("group", "interleaved"), ("warm_up", "1f1b")):
        if flag in given and (name not in wanted or arguments.forward_only):
            raise ConfigError(
                f"{_flag(flag)} {getattr(arguments, flag)} has no effect without schedule {name} for training; remove it"
            )
    if arguments.forward_only and arguments.recompute_ahead:
        raise ConfigError("--recompute-ahead has no effect with --forward-only; remove one of them")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name(arguments: argparse.Namespace) -> str:
    return arguments.schedule or default_schedule(arguments.vpp or 1)


def _answer(arguments: argparse.Namespace) -> str:
    table = CostTable() if arguments.costs is None else read_costs(arguments.costs)
    own = None if arguments.csv is None else read_schedule(arguments.csv)
    request = _request(arguments, table, own)
    unit = table.unit or ""
    refused: dict[str, str] = {}
    if arguments.compare is not None:
        if own is not None and own.forward_only:
            raise ConfigError(f"{arguments.csv} has no backwards; --compare compares schedules for training")
        studies, refused = compare(arguments.compare or NAMES, request, own)
    elif own is not None:
        studies = [study_file(own, request)]
    else:
        studies = [study_named(_name(arguments), request)]
    written = _write(arguments, studies, unit)
    if arguments.json:
        data = [study.as_data(lowered=arguments.lowered) for study in studies]
        if arguments.compare is not None:
            return json.dumps({"unit": table.unit, "schedules": data, "refused": refused, "written": written})
        return json.dumps({"unit": table.unit, **data[0], "written": written})
    if arguments.compare is not None:
        text = format_comparison(studies, refused, unit=unit)
    else:
        text = format_study(
            studies[0], unit=unit, width=_width(), colour=_coloured(arguments.color), lowered=arguments.lowered
        )
    return "\n".join([text, *(f"wrote {path}" for path in written)])


def _request(arguments: argparse.Namespace, table: CostTable, own: Schedule | None) -> Request:
    chunks = arguments.vpp
    if own is not None and own.num_chunks > 1:
        chunks = own.num_chunks
    return Request(
        num_ranks=arguments.pp if own is None else own.num_ranks,
        num_microbatches=arguments.microbatches if own is None else own.num_microbatches,
        num_chunks=chunks,
        group=arguments.group,
        warm_up=arguments.warm_up,
        recompute_ahead=arguments.recompute_ahead,
        forward_only=arguments.forward_only,
        table=table,
        limit=None if arguments.memory_limit is None else _limit(arguments.memory_limit, table),
        recv_prefetch=arguments.recv_prefetch,
        send_window=arguments.send_window,
    )


def _limit(text: str, table: CostTable) -> float:
    """Bytes if the table has sizes, else microbatches."""
    size = parse_byte_size(text)
    if size is not None and table.memory is None:
        raise ConfigError(
            f"--memory-limit {text} is in bytes, but {table.source} say nothing of memory; add memory to the file of "
            f"--costs, or give the limit in live microbatches, such as 4"
        )
    if size is None and re.fullmatch(r"\d+(\.\d*)?(e\d{1,2})?", text.strip(), re.ASCII):
        size = float(text)
    if not size:
        raise ConfigError(f"--memory-limit is {text}; use bytes such as 12GiB or 800MB, or microbatches such as 4")
    return size


def _write(arguments: argparse.Namespace, studies: Sequence[Study], unit: str) -> list[str]:
    """Writes the files that are asked for; returns their names."""
    texts: dict[Path, str] = {}
    if arguments.write_csv is not None:
        texts[arguments.write_csv] = studies[0].schedule.to_csv()
    if studies and arguments.svg is not None:
        panels = [Panel(study.timeline, peak_texts(study), summary(study, unit)) for study in studies]
        texts[arguments.svg] = draw_svg(panels, unit=unit, peak=meaning_of_peaks(studies))
    if studies and arguments.trace is not None:
        scale = UNITS[unit] if unit else _SECONDS_OF_NO_UNIT
        sources = {
            study.schedule.name: [
                event._replace(start=event.start * scale, end=event.end * scale) for event in study.timeline.events
            ]
            for study in studies
        }
        texts[arguments.trace] = json.dumps(merge_traces(sources))
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; give a file in a folder that exists") from None
    return [str(path) for path in texts]


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH


def _coloured(choice: str) -> bool:
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return choice == "always"


if __name__ == "__main__":
    sys.exit(main())
