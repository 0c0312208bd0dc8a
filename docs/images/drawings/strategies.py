"""strategies.svg: what each data-parallel strategy sends and keeps, a parameter, as the planner computes it."""

import math
import shlex

from drawings.canvas import DARK, FAINT, INK, LIGHT, MUTED, RED, Drawing
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.memory import rank_memory
from megalite.partition.pipeline import plan_stages
from megalite.planner.communication import gradient_volumes, wire_factor

DP = 8
MODEL = f"--preset gpt2-124m --vocab-size 50257 --global-batch-size {DP} --micro-batch-size 1 --device cpu"
ROWS = {
    "all-reduce": "",
    "all-reduce, bf16 wire": "--wire-dtype bf16",
    "distributed-optimizer (ZeRO-1)": "--dp-strategy distributed-optimizer",
    "fully-sharded (ZeRO-3)": "--dp-strategy fully-sharded",
    "parameter-server (the server)": "--dp-strategy parameter-server",
    "gossip, ring": "--dp-strategy gossip",
    "gossip, one peer": "--dp-strategy gossip --gossip-graph one-peer",
    "8-bit gradients": "--grad-compression uint8",
    "PowerSGD, rank 4": "--grad-compression powersgd",
    "local SGD, every 20 steps": "--dp-strategy local-sgd",
    "DiLoCo, every 100 steps": "--dp-strategy diloco --sync-interval 100",
    "1-bit LAMB, frozen": "--optimizer onebit-lamb --freeze-step 1000",
}
LEFT, TOP, ROW, SCALE = 236.0, 74.0, 25.0, 250.0
SENT = (0.03, 32.0)
"""Ends of the scale of bytes, which is logarithmic."""


def config_of(flags: str) -> RunConfig:
    """fp32, so that the wire and the weights have four bytes a number."""
    return validate(parse_arguments(shlex.split(f"{MODEL} {flags}")).config, DP)


def bytes_of(flags: str) -> tuple[float, float]:
    """A parameter: bytes sent in a step, and bytes kept between steps, on the rank with most."""
    config = config_of(flags)
    stages = plan_stages(config)
    memory = rank_memory(config, stages)
    sent = sum(
        size * wire_factor(operation, DP)
        for plan in stages
        for _, operation, size in gradient_volumes(config, plan, stages, 1)
    )
    kept = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
    return sent / memory.parameters, kept / memory.parameters


def draw() -> Drawing:
    """A bar for what is sent, on a logarithmic scale, and a number for what is kept."""
    height = TOP + ROW * len(ROWS) + 44
    drawing = Drawing(
        height,
        f"What data-parallel strategies send in a step and keep between steps, in bytes per parameter, for {DP} ranks in "
        "fp32: from 28 bytes at a parameter server to a few hundredths with 1-bit LAMB.",
    )
    drawing.text(24, 26, f"Bytes a parameter, {DP} ranks, fp32", size=14, align="left", bold=True)
    drawing.text(LEFT, 54, "sent in a step", align="left", colour=RED)
    drawing.text(736, 54, "kept", align="right", colour=MUTED)
    bottom = TOP + ROW * len(ROWS)
    for tick in (0.1, 1.0, 10.0):
        x = LEFT + SCALE * _place(tick)
        drawing.line((x, TOP - 6), (x, bottom), colour=FAINT)
        drawing.text(x, bottom + 16, f"{tick:g}", size=11, colour=MUTED)
    for index, (name, flags) in enumerate(ROWS.items()):
        sent, kept = bytes_of(flags)
        y = TOP + ROW * index
        drawing.text(LEFT - 12, y + 9, name, align="right", colour=INK)
        drawing.box(LEFT, y, max(2.0, SCALE * _place(sent)), 18, fill=LIGHT[0], radius=2)
        drawing.text(600, y + 9, f"{sent:.3g}", align="right", colour=DARK[0])
        drawing.text(736, y + 9, f"{kept:.4g}", align="right", colour=MUTED)
    return drawing


def _place(value: float) -> float:
    low, high = SENT
    return math.log(value / low) / math.log(high / low)
