"""Requests for tests, built as on the command line."""

from itertools import product
from typing import NamedTuple

from megalite.cli import plan
from megalite.cli.tool_commands import PLAN
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search.space import Layout, Request, enumerate_space

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --global-batch-size 8 "
    "--cluster dgx-a100"
)
EXPERTS = f"{TINY} --num-experts 4 --moe-first-dense-layers 1 --moe-ffn-hidden-size 96 --disable-bias-linear"


class Asked(NamedTuple):
    request: Request
    cluster: Cluster
    stack: SoftwareStack


def asked(flags: str) -> Asked:
    """The request of `megalite plan` with these flags."""
    return Asked(*plan.search_inputs(PLAN.parse(flags.split())))


def layouts_of(request: Request) -> list[Layout]:
    """All legal layouts; for small spaces."""
    return [
        block.layout(pipeline, share)
        for block in enumerate_space(request).blocks
        for pipeline, share in product(range(len(block.pipelines)), range(len(block.shares)))
    ]
