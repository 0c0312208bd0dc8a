"""megalite: 3D-parallel GPT pretraining, the same numbers on any layout, the same code on a laptop and a cluster."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["ConfigError", "RunConfig", "Trainer", "validate"]

_HOMES = {
    "ConfigError": "megalite.config.errors",
    "RunConfig": "megalite.config.run",
    "Trainer": "megalite.training.trainer",
    "validate": "megalite.config.validate",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: `import megalite` stays free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megalite' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
