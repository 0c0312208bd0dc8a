"""`megalite plan-chain`: stages, replicas and placement for a chain of layers on a hierarchical cluster."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.cli.plan_chain_text import as_data, drawing, format_plan
from megalite.config.byte_size import format_bytes, parse_byte_size
from megalite.config.errors import ConfigError
from megalite.pipeline.ir.svg import Panel, draw_svg
from megalite.planner.chain.inputs import read_cluster
from megalite.planner.chain.planning import plan_chain
from megalite.planner.chain.twins import TWINS, find_profile

_DESCRIPTION = """Which layers make a stage, on how many devices and on which: the fastest synchronous step for a model given as a
chain of measured layers. PipeDream's plan, pure data parallelism and a straight pipeline are judged by the same
simulator. docs/planner_chain.md explains all of it."""


@command("megalite plan-chain")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError."""
    show(_answer(_parser().parse_args(argv)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite plan-chain",
        _DESCRIPTION,
        examples=("megalite plan-chain vgg-19 --cluster 2x8 --global-batch-size 1024",),
    )
    parser.add_argument("profile", metavar="PROFILE", help=f"YAML: the layers; or a synthetic one: {', '.join(TWINS)}")
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="NAME",
        help="machines x devices such as 2x8 or 16x1@10 (Gbit/s), A, B or C of the DAPPLE paper, or a YAML file",
    )
    parser.add_argument("--global-batch-size", required=True, type=int, metavar="N", help="samples of a step")
    parser.add_argument("--memory", metavar="SIZE", help="of a device, such as 16GB (default: the cluster's)")
    parser.add_argument("--compare", action="store_true", help="the stages of the plans it is compared with, too")
    parser.add_argument("--json", action="store_true", help="everything as data")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the timeline as a picture")
    return parser


def _answer(arguments: argparse.Namespace) -> str:
    profile = find_profile(arguments.profile)
    cluster = read_cluster(arguments.cluster)
    memory = cluster.memory_gb * 1e9 if arguments.memory is None else parse_byte_size(arguments.memory)
    if memory is None:
        raise ConfigError(f"--memory is {arguments.memory}; use bytes such as 16GB or 15.5GiB")
    planned = plan_chain(profile, cluster, arguments.global_batch_size, memory=memory)
    if arguments.svg is not None:
        best = planned.best
        panel = Panel(
            timeline=drawing(best, profile, cluster),
            peaks=tuple(format_bytes(held) for held in best.memory),
            summary=f"{profile.name} on {cluster.name}: {best.seconds:.4g} s a step of "
            f"{arguments.global_batch_size} samples; a rank is a stage",
        )
        text = draw_svg([panel], unit="ms", peak="what a device of the stage holds at most")
        try:
            arguments.svg.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {arguments.svg}: {error.strerror}; give a file in a folder that exists"
            ) from None
    if arguments.json:
        return json.dumps(as_data(planned, profile, cluster, arguments.global_batch_size, memory))
    text = format_plan(planned, profile, cluster, arguments.global_batch_size, memory, details=arguments.compare)
    return text if arguments.svg is None else f"{text}\nwrote {arguments.svg}"


if __name__ == "__main__":
    sys.exit(main())
