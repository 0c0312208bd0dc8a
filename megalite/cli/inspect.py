"""`megalite inspect`: what is in a checkpoint, whether it is sound, and how two of them differ."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megalite.checkpoint.survey import CheckpointRemoved, Surveyed, noticing_removal, survey, verify
from megalite.cli.dry_run_text import size
from megalite.cli.failures import BAD_INPUT, command
from megalite.cli.inspect_config import for_another_run, head_comment
from megalite.cli.inspect_text import (
    format_checkpoint,
    format_passed_over,
    format_state,
    format_statistics,
    format_table,
    in_order,
)
from megalite.cli.output import show, tell, visible
from megalite.cli.parser import Parser
from megalite.config.errors import CheckpointError, ConfigError

OK, DAMAGED, DIFFERENT = 0, 1, 1
ATTEMPTS = 5
"""Looks at a folder while a run removes what is being looked at."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite inspect",
        usage="megalite inspect CKPT [--step N] [--tensors PATTERN] [--config] [--json] [--no-verify]\n"
        "       megalite inspect --diff A B [--step N] [--tensors PATTERN] [--json] [--no-verify]",
        description="Show what is in a checkpoint and whether every file is what was written, or how two differ. Exit "
        "status: 0 sound (or equal), 1 damaged (or different), 2 bad input.",
        examples=(
            "megalite inspect runs/first/checkpoints --tensors 'layers.0.*'",
            "megalite inspect --diff runs/first/checkpoints runs/second/checkpoints --step 100",
        ),
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", nargs="?", type=Path, help="a folder of checkpoints, or one of them"
    )
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), type=Path, help="compare two, of whatever layouts, bit by bit"
    )
    parser.add_argument("--step", type=int, metavar="N", help="that step (default: the newest that is sound)")
    parser.add_argument(
        "--tensors",
        metavar="PATTERN",
        help="add statistics of the tensors that match, such as 'layers.0.*' or 'exp_avg/*'; with --diff, compare "
        "these alone",
    )
    parser.add_argument(
        "--config",
        action="store_true",
        help="print the config alone, as YAML for --config of another run: without this one's folders",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-verify", action="store_true", help="look at file lengths alone, without reading the files"
    )
    return parser


@command("megalite inspect")
def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        _check(arguments)
        if arguments.diff is not None:
            return _again_if_removed(_diff, arguments)
        return _again_if_removed(_config if arguments.config else _inspect, arguments)
    except RecursionError:
        tell("error: lists nested too deeply in the manifest's config, counters or layout")
        return BAD_INPUT


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.checkpoint is None) == (arguments.diff is None):
        raise ConfigError("give one checkpoint to look at, or two behind --diff")
    if arguments.config:
        for flag, given in (
            ("--diff", arguments.diff is not None),
            ("--tensors", arguments.tensors is not None),
            ("--no-verify", arguments.no_verify),
        ):
            if given:
                raise ConfigError(f"--config prints the config alone: {flag} has no effect with it; drop either")


def _again_if_removed(look: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Look once more if the newest was removed meanwhile: a newer one is there. One that was asked for is not."""
    asked_for = arguments.diff or [arguments.checkpoint]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return look(arguments)
        except CheckpointRemoved as removed:
            if removed.path in asked_for or arguments.step is not None or attempt == ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def _inspect(arguments: argparse.Namespace) -> int:
    surveyed, shown = _newest_sound(arguments.checkpoint, arguments)
    rows: dict[str, dict[str, Any]] | None = None
    with noticing_removal(shown):
        if arguments.tensors is not None and shown.sound:
            # Reading tensors takes torch, whose import takes longer than all the rest.
            from megalite.cli.inspect_tensors import tensor_statistics

            rows = tensor_statistics(shown, arguments.tensors)
        if arguments.json:
            text = json.dumps(_data(surveyed, shown, rows), indent=2)
        else:
            text = visible(_text(surveyed, shown, rows))
    show(text)
    return DAMAGED if any(found.faults for found in surveyed) else OK


def _text(surveyed: Sequence[Surveyed], shown: Surveyed, rows: dict[str, dict[str, Any]] | None) -> str:
    """For people; it ends in what is wrong, if anything is."""
    parts = [format_table(surveyed)] if len(surveyed) > 1 else []
    parts.append(f"{format_checkpoint(shown)}\n{format_state(shown)}")
    if rows is not None:
        parts.append(format_statistics(rows))
    parts.append(format_passed_over(surveyed, shown))
    return "\n\n".join(part for part in parts if part)


def _config(arguments: argparse.Namespace) -> int:
    """The manifest carries its own sha256: its config is right even where other files are not."""
    surveyed = survey(arguments.checkpoint, arguments.step)
    found = next((found for found in surveyed if found.manifest is not None), None)
    if found is None or found.manifest is None:
        if surveyed[0].gone:
            raise CheckpointRemoved(surveyed[0].path)
        raise CheckpointError(f"{arguments.checkpoint}: {surveyed[0].path.name} is {surveyed[0].state}")
    config, left_out = for_another_run(in_order(found.manifest.config))
    if arguments.json:
        show(json.dumps(config, indent=2))
    else:
        # Escapes whatever a terminal would not show as it is.
        text = yaml.safe_dump(config, sort_keys=False, default_flow_style=False).removesuffix("\n")
        show(f"{visible(head_comment(str(found.path), left_out))}\n{text}")
    return OK


def _diff(arguments: argparse.Namespace) -> int:
    sides: list[Surveyed] = []
    passed_over: list[Surveyed] = []
    for path in arguments.diff:
        surveyed, found = _newest_sound(path, arguments)
        if not found.sound:
            # Damage that only hashing shows leaves tensors that can be read.
            hashed = found.manifest is not None and not arguments.no_verify
            remedy = "; --no-verify compares it all the same" if hashed and survey(found.path)[0].sound else ""
            raise CheckpointError(f"{found.path} is {found.state}{remedy}")
        passed_over += surveyed[: surveyed.index(found)]
        sides.append(found)
    from megalite.cli.inspect_tensors import CheckpointDiff

    with noticing_removal(*sides):
        difference = CheckpointDiff(*sides, pattern=arguments.tensors, trust_hashes=not arguments.no_verify)
    for passed in passed_over:
        print(visible(f"{passed.path} is passed over: {passed.state}"), file=sys.stderr)
    show(json.dumps(difference.data(), indent=2) if arguments.json else visible(difference.text()))
    return OK if difference.same else DIFFERENT


def _newest_sound(path: Path, arguments: argparse.Namespace) -> tuple[list[Surveyed], Surveyed]:
    """All that is there, and the one to show: the newest that verifies, else the newest that says anything."""
    surveyed = survey(path, arguments.step)
    for index, found in enumerate(surveyed):
        if not arguments.no_verify:
            found = surveyed[index] = verify(found, partial(_progress, found))
        if found.sound:
            return surveyed, found
    for found in surveyed:
        if found.gone:
            raise CheckpointRemoved(found.path)
    return surveyed, next((found for found in surveyed if found.manifest is not None), surveyed[0])


def _progress(found: Surveyed, files: int, done: int) -> None:
    """A line on the screen that is written over and over, and wiped when all is done."""
    if not sys.stderr.isatty():
        return
    assert found.manifest is not None and found.bytes is not None
    total = len(found.manifest.files)
    line = f"verifying {found.path.name}: {files} of {total} files, {size(done)} of {size(found.bytes)}"
    print("\r" + (" " * len(line) + "\r" if files == total else line), end="", file=sys.stderr, flush=True)


def _data(surveyed: Sequence[Surveyed], shown: Surveyed, rows: dict[str, dict[str, Any]] | None) -> dict[str, Any]:
    """What is shown, as one JSON object."""
    data: dict[str, Any] = {
        "path": str(shown.path),
        "state": shown.state,
        "faults": list(shown.faults),
        "checkpoints": [
            {"name": found.path.name, "step": found.step, "bytes": found.bytes, "state": found.state}
            for found in surveyed
        ],
    }
    manifest = shown.manifest
    if manifest is not None:
        data |= {
            "step": manifest.step,
            "megalite_version": manifest.megalite_version,
            "code": manifest.code,
            "layout": manifest.layout,
            "counters": manifest.counters,
            "tokenizer": manifest.tokenizer,
            "config": manifest.config,
            "bytes": shown.bytes,
            "files": {name: {"length": entry.length, "sha256": entry.sha256} for name, entry in manifest.files.items()},
            "tensors": {
                key: {"dtype": entry.dtype, "shape": list(entry.global_shape), "parts": len(entry.parts)}
                for key, entry in manifest.tensors.items()
            },
        }
    if rows is not None:
        data["statistics"] = rows
    return data


if __name__ == "__main__":
    sys.exit(main())
