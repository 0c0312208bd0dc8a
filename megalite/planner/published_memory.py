"""The closed forms of Korthikanti et al. 2022 for a GPT's memory on the first pipeline rank, as published.

They know dense layers of GPT's shape with dropout in 16 bits and Adam, and count neither biases and norms nor embedding
and head; `activations` and `states` count what a config really has, term by term. These forms are the yardstick: they give
the values of the paper's figure 1.
"""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]

STATE_BYTES = 18
"""Of one parameter: itself and its gradient (2 + 4), the main parameter and two moments (4 each)."""


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """Letters as in the paper: L layers, h hidden size, a heads, s sequence length, b micro batch size; t and p the
    tensor- and pipeline-parallel sizes, v virtual stages a rank."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1


def layer_bytes(shape: GPTShape, *, sequence_parallel: bool, recompute: Recompute) -> float:
    """Activations of one layer and microbatch, table 2.

    sbh(10 + 24/t + 5as/ht), with sequence parallelism all of it / t; selective recompute leaves out 5as/ht; full
    recompute keeps the layer's input, 2sbh, which is not split here.
    """
    sbh = shape.sequence * shape.micro_batch * shape.hidden
    if recompute == "full":
        return 2.0 * sbh
    replicated = 10.0 / shape.tp if sequence_parallel else 10.0
    scores = 0.0 if recompute == "selective" else 5.0 * shape.heads * shape.sequence / shape.hidden
    return sbh * (replicated + (24.0 + scores) / shape.tp)


def activation_bytes(shape: GPTShape, *, sequence_parallel: bool, recompute: Recompute) -> float:
    """All layers' worth on the first pipeline rank, which holds p microbatches of its L/p layers in 1F1B.

    Interleaving adds the factor 1 + (p-1)/(pv).
    """
    in_flight = 1.0 if shape.vpp == 1 else 1.0 + (shape.pp - 1) / (shape.pp * shape.vpp)
    return (
        shape.layers
        * layer_bytes(shape, sequence_parallel=sequence_parallel, recompute=recompute)
        * in_flight
    )


def parameter_and_optimizer_bytes(shape: GPTShape) -> float:
    """Of the layers' matrices on one rank: 18·12·L·h²/(t·p)."""
    return STATE_BYTES * 12.0 * shape.layers * shape.hidden**2 / (shape.tp * shape.pp)
