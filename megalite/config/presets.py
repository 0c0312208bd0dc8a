"""Named models: `--preset gpt3-175b`. One YAML file each, with its source in a comment."""

from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.files import read_level
from megalite.config.merge import Level
from megalite.config.values import nearest

_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def read_preset(name: str) -> Level:
    """The settings of a preset.

    Raises:
        ConfigError: there is none of that name; the nearest are named.
    """
    names = preset_names()
    if name not in names:
        raise ConfigError(
            f"--preset: unknown preset {name}{nearest(name, names)} (there are {', '.join(names)})"
        )
    return read_level(_FOLDER / f"{name}.yaml", source=f"preset {name}")
