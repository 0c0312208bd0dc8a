"""Which runs take the steps of one rank: only those can be compared with it."""

from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.run import RunConfig

EXACT_STRATEGIES = (
    *("all-reduce", "fused-all-reduce", "distributed-optimizer", "fully-sharded"),
    *("parameter-server", "sharded-parameter-server"),
)
"""Each step goes by the mean gradient of the batch, whole, at the weights that all ranks have."""


def check_exact(config: RunConfig) -> None:
    """Refuse what takes other steps than one rank, by design.

    Raises:
        ConfigError: naming the setting and what can be compared.
    """
    strategy, d = config.parallel.dp_strategy, config.data_parallel
    names = ", ".join(EXACT_STRATEGIES)
    if strategy not in EXACT_STRATEGIES:
        raise _other_steps(f"dp_strategy {strategy} takes other steps", f"use one of {names}")
    if config.optimizer.optimizer in ONEBIT_OPTIMIZERS:
        base = "lamb" if config.optimizer.optimizer == "onebit-lamb" else "adam"
        remedy = f"use --optimizer {base}"
        raise _other_steps(f"optimizer {config.optimizer.optimizer} takes other steps", remedy)
    if d.grad_compression != "none":
        remedy = "use --grad-compression none"
        raise _other_steps(f"grad_compression {d.grad_compression} loses a part of the gradient", remedy)
    if d.wire_dtype != "fp32":
        raise _other_steps(f"wire_dtype {d.wire_dtype} rounds what is added", "use --wire-dtype fp32")


def _other_steps(why: str, remedy: str) -> ConfigError:
    return ConfigError(f"megalite parity compares with one rank, and {why}; {remedy}")
