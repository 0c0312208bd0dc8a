"""Draws the pictures of README.md and docs: `python docs/images/draw.py` writes them beside this file.

What a picture shows is computed by the code that trains (rank lists, spans, tiles, schedules, buckets), and
`tests/docs/test_images.py` compares the files with what this script draws.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from drawings import (
    context,
    data,
    experts,
    imports,
    overview,
    pipeline,
    ranks,
    samples,
    sequence,
    strategies,
    tensor,
    token_file,
    ulysses,
)
from drawings.canvas import Drawing

DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "ranks": ranks.draw,
    "tensor": tensor.draw,
    "sequence": sequence.draw,
    "context": context.draw,
    "ulysses": ulysses.draw,
    "experts": experts.draw,
    "pipeline": pipeline.draw,
    "data": data.draw,
    "token_file": token_file.draw,
    "samples": samples.draw,
    "strategies": strategies.draw,
    "overview": overview.draw,
    "imports": imports.draw,
}


def main() -> None:
    """Draw all, or those that are named."""
    parser = argparse.ArgumentParser(description="Draw the pictures of README.md and docs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(DRAWINGS)}; default: all")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--format", default="svg", choices=("svg", "png"), help="what to write (default svg)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(DRAWINGS))
    if unknown:
        parser.error(f"there is no drawing {unknown[0]}; there are {', '.join(DRAWINGS)}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or DRAWINGS:
        DRAWINGS[name]().save(arguments.output / f"{name}.{arguments.format}")


if __name__ == "__main__":
    main()
