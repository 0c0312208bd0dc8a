"""Bytes that each parameter of a rank takes: its value, its gradient, and what optimizer and strategy remember of it."""

from typing import NamedTuple

from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig
from megalite.models.shapes import ParameterShape, is_hidden_matrix
from megalite.planner.activations import ELEMENT_BYTES


class ElementBytes(NamedTuple):
    """Of one element, on the data-parallel rank that holds most."""

    parameter: float
    gradient: float
    optimizer: float
    """Main parameters apart from the model's, states of the optimizer and of the strategy."""


def element_bytes(config: RunConfig, shape: ParameterShape, replicas: int) -> ElementBytes:
    """What one element of a tensor takes on a rank that holds it.

    Args:
        replicas: ranks that hold the same part of the tensor.
    """
    element = ELEMENT_BYTES[config.training.precision]
    main = max(4, element)
    sharded = config.parallel.dp_strategy in (
        "distributed-optimizer",
        "sharded-parameter-server",
        "fully-sharded",
    )
    whole = config.parallel.dp_strategy == "fully-sharded"
    parts = replicas if sharded else 1
    gradient_parts = replicas if whole or config.data_parallel.shard_gradients else 1
    apart = {"fp32": main, "split": 2}[config.optimizer.main_params] if element < main else 0
    return ElementBytes(
        parameter=element / (replicas if whole else 1),
        gradient=main / gradient_parts,
        optimizer=(apart + sum(moment_widths(config, shape))) / parts + strategy_bytes(config, replicas),
    )


def moment_widths(config: RunConfig, shape: ParameterShape) -> tuple[int, ...]:
    """Bytes of an element of each of the optimizer's states, nothing sharded."""
    o = config.optimizer
    main = max(4, ELEMENT_BYTES[config.training.precision])
    if o.optimizer == "adam":
        return tuple(2 if dtype == "bf16" else main for dtype in (o.exp_avg_dtype, o.exp_avg_sq_dtype))
    if o.optimizer == "sgd":
        return (main,) if o.sgd_momentum else ()
    if o.optimizer == "muon" and is_hidden_matrix(shape.name, shape.shape, decay=shape.decay):
        return (main,)
    states = {"onebit-lamb": 3, "zero-one-adam": 4}
    return (main,) * states.get(o.optimizer, 2)


def strategy_bytes(config: RunConfig, replicas: int) -> float:
    """Of what the strategy remembers: errors of compression, anchors, an outer momentum."""
    if replicas == 1:
        return 0.0
    d, strategy = config.data_parallel, config.parallel.dp_strategy
    main = max(4, ELEMENT_BYTES[config.training.precision])
    both = main + main / replicas
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        return both
    if strategy == "all-reduce":
        return {"onebit": both, "uint8": both, "topk": main, "powersgd": main}.get(d.grad_compression, 0.0)
    if strategy == "local-sgd":
        return main if d.wire_dtype == "bf16" else 0.0
    if strategy == "diloco":
        return (3 if d.sync_delay else 2) * main
    if strategy == "async-parameter-server":
        # The server's parameters are not its own worker's; and it holds a push of each worker at a time.
        wire = 2 if d.wire_dtype == "bf16" else main
        copied = main if ELEMENT_BYTES[config.training.precision] == main else 0
        return copied + replicas * wire
    if strategy == "gossip":
        return main if d.gossip_algorithm == "decentlam" else 0.0
    return 0.0
