"""The names that a Megatron-LM pickle may contain; every other one is refused by name."""

import argparse
from typing import Any


class Inert:
    """What stands for an object that a checkpoint holds and a conversion has no use for: it keeps and does nothing."""

    def __new__(cls, *_args: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_args: object) -> None:
        pass

    def __setstate__(self, _state: object) -> None:
        pass


_NUMPY = ("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType") + tuple(
    f"numpy.{package}.multiarray.{name}"
    for package in ("core", "_core")
    for name in ("_reconstruct", "scalar")
)
_PYTHON = (
    *("types.SimpleNamespace", "pathlib.PosixPath", "pathlib.Path", "_io.BytesIO", "io.BytesIO"),
    *("signal.Signals", "signal.SIGTERM", "signal.SIGINT", "signal.SIGUSR1", "signal.SIGUSR2"),
    *("datetime.timedelta", "datetime.datetime"),
)
_ENUMS = (
    "AttnBackend",
    "AttnMaskType",
    "CudaGraphModule",
    "CudaGraphScope",
    "InferenceCudaGraphScope",
    "ModelType",
)
_RECIPES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)
_MEGATRON = (
    *(f"megatron.{place}.ModelType" for place in ("core.enums", "model.enums", "legacy.model.enums")),
    *(f"megatron.core.transformer.enums.{name}" for name in _ENUMS),
    *("megatron.core.enums.Fp8Recipe", "megatron.core.enums.Fp4Recipe"),
    *("megatron.core.optimizer.OptimizerConfig", "megatron.core.optimizer.optimizer_config.OptimizerConfig"),
    *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
    *("megatron.fp16.loss_scaler.DynamicLossScaler", "megatron.fp16.loss_scaler.LossScaler"),
    *(f"transformer_engine.common.recipe.{name}" for name in (*_RECIPES, "Format", "MMParams", "QParams")),
)

ALLOWED: list[Any] = [
    argparse.Namespace,
    *((Inert, name) for name in (*_NUMPY, *_PYTHON, *_MEGATRON)),
]
"""For `torch.serialization.safe_globals`, beside what torch allows by itself (tensors, dtypes, OrderedDict).

Only `argparse.Namespace` is real, a bag of attributes. The others (random states, enumerations, the loss scaler of an
optimizer) become `Inert`: their code need not be installed, and is not run where it is.
"""
