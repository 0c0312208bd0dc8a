"""Kernels and how layers compute: that what is asked for exists and goes together.

Whether it works on the device is known when it is built.
"""

from megalite.config.compute import BACKENDS, OPERATIONS, kernel_requests
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.values import nearest

FP8_LEAST_LAYERS = 3
"""The first and the last layer stay in bf16."""


def check_compute(config: RunConfig) -> None:
    """Raise ConfigError unless the settings of section `compute` are known, do something and go together."""
    _check_kernels(config)
    _check_attention(config)
    _check_overlap(config)
    _check_fp8(config)


def _check_kernels(config: RunConfig) -> None:
    for operation, backend in kernel_requests(config.compute.kernels).items():
        if operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise ConfigError(
                f"kernels: no operation {operation}{nearest(operation, OPERATIONS)} (one of {known})"
            )
        if backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ConfigError(
                f"kernels: no backend {backend} for {operation}{nearest(backend, BACKENDS)} (one of {known})"
            )


def _check_attention(config: RunConfig) -> None:
    backend = config.compute.attention_backend
    if backend == "auto":
        return
    if config.model.attention_dropout > 0.0:
        raise ConfigError(
            f"attention_backend {backend} has no effect with attention_dropout {config.model.attention_dropout:g}, for which "
            "the probabilities are kept in memory; set attention_dropout 0 or remove it"
        )
    tiled = attention_in_tiles(config)
    if tiled is not None and backend != "flash":
        raise ConfigError(
            f"attention_backend {backend} cannot serve {tiled}, whose pieces are merged by what flash alone gives; "
            "use flash or auto"
        )


def attention_in_tiles(config: RunConfig) -> str | None:
    """The setting for which attention is computed in pieces that are merged, or None."""
    model, data, parallel = config.model, config.data, config.parallel
    if model.sliding_window is not None and model.sliding_window < config.training.seq_length:
        return f"sliding_window {model.sliding_window}"
    if data.packing == "best-fit":
        return "packing best-fit"
    if data.reset_attention_mask:
        return "reset_attention_mask"
    if parallel.cp > 1 and parallel.cp_comm_type == "p2p":
        return f"cp {parallel.cp} with cp_comm_type p2p"
    return None


def _check_overlap(config: RunConfig) -> None:
    if not config.compute.tp_comm_overlap:
        return
    if config.parallel.tp == 1 or not config.parallel.sequence_parallel:
        raise ConfigError(
            "tp_comm_overlap has no effect without sequence parallelism; add --tp 2 --sequence-parallel or remove it"
            if config.parallel.tp == 1
            else "tp_comm_overlap has no effect without sequence_parallel; add --sequence-parallel or remove it"
        )
    if config.compute.fp8:
        raise ConfigError(
            "tp_comm_overlap and fp8 do not go together: a tensor that comes in pieces has no one scale; keep one of them"
        )


def _check_fp8(config: RunConfig) -> None:
    if not config.compute.fp8:
        return
    if config.training.precision != "bf16":
        raise ConfigError(f"fp8 needs precision bf16, not {config.training.precision}; add --bf16")
    if config.model.num_layers < FP8_LEAST_LAYERS:
        raise ConfigError(
            f"fp8 has no effect with num_layers {config.model.num_layers}, as the first and the last layer stay in bf16; "
            f"use num_layers {FP8_LEAST_LAYERS} or more, or remove it"
        )
