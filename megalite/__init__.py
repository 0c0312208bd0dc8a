"""megalite: 3D-parallel GPT pretraining with the same numbers on any layout and the same code on a laptop and a
cluster."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_MODULES = {
    "BLOCKS": "megalite.config.model",
    "Block": "megalite.models.block",
    "Callback": "megalite.training.callbacks",
    "ConfigError": "megalite.config.errors",
    "DATASETS": "megalite.config.data",
    "KERNELS": "megalite.config.compute",
    "LOSSES": "megalite.config.training",
    "LR_SCHEDULES": "megalite.config.optimizer",
    "OPTIMIZERS": "megalite.config.optimizer",
    "Optimizer": "megalite.optimizers.base",
    "PIPELINE_SCHEDULES": "megalite.config.parallel",
    "RunConfig": "megalite.config.run",
    "STRATEGIES": "megalite.config.strategies",
    "Trainer": "megalite.training.trainer",
    "WRITERS": "megalite.config.training",
    "configure": "megalite.conversion.model_folder",
    "validate": "megalite.config.validate",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import megalite` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megalite' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)
