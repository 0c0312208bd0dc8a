"""Load YAML config files with every key checked, and dump configs so that they load equal."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.data import PATH_SETTINGS, words_of
from megalite.config.describe import Setting, coerce, sectioned, sections, settings
from megalite.config.errors import ConfigError, Problems, closest, key_of, nearest, raise_at_end, shortened
from megalite.config.megatron import STANDS_FOR
from megalite.config.megatron_flags import known_flags
from megalite.config.merge import Level, merge
from megalite.config.reading import as_yaml, load_mapping, read_input
from megalite.config.registry import import_modules
from megalite.config.run import RunConfig

CONFIG_NAME = "config.yaml"
"""The config file in the folder of a run or of a converted model."""


def load(path: str | Path) -> RunConfig:
    """Load a file over the defaults. Raises ConfigError: it is missing or not YAML, or a key or value is not legal."""
    with raise_at_end(None) as problems:
        return merge([read_level(path, problems=problems)], problems).config


def dump(config: RunConfig) -> str:
    """Return every setting as YAML, by section; `load` returns an equal config."""
    return as_yaml(sectioned(config), default_flow_style=False)


def read_level(path: str | Path, source: str | None = None, *, problems: Problems | None = None) -> Level:
    """Read a file into a level. `source` replaces `file PATH` in messages and provenance; `problems` collects wrong
    keys and values (default: raised together). Raises ConfigError: the file cannot be read or is not YAML."""
    return level_from_text(read_input(path, "config file"), source or f"file {path}", problems)


def level_from_text(text: str, source: str, problems: Problems | None = None) -> Level:
    """Parse YAML text into a level; sections and flat keys may be mixed. Arguments and errors: see `read_level`."""
    with raise_at_end(problems) as found:
        return level_of(load_mapping(text, source, "num_layers: 4", found), source, found)


def imports_of(path: str) -> list[str]:
    """Return the modules that a config file imports; empty if it cannot be read, which `read_level` reports."""
    try:
        text = read_input(path, "config file")
        return _imports(load_mapping(text, path, "num_layers: 4")) if _IMPORTS.search(text) else []
    except ConfigError:
        return []


_IMPORTS = re.compile(r"^\s*imports?\s*:(?!\s*\[\s*\]\s*$)", re.MULTILINE)


def _imports(tree: Mapping[Any, Any]) -> list[str]:
    section = tree.get("training")
    for part in (tree, section if isinstance(section, dict) else {}):
        for key in ("import", "imports"):
            if isinstance(part.get(key), list | tuple):
                return [module for module in part[key] if isinstance(module, str)]
    return []


def level_of(tree: Mapping[Any, Any], source: str, problems: Problems | None = None) -> Level:
    """Build a level from sections and keys; see `level_from_text`."""
    import_modules(_imports(tree))  # they may register legal values
    with raise_at_end(problems) as found:
        level = Level()
        for key, value in tree.items():
            if key in sections() and (isinstance(value, dict) or value is None):
                for name, inner in (value or {}).items():
                    with found.collecting(_settings_meant(name)):
                        _add(level, name, inner, source, key)
            else:
                with found.collecting(_settings_meant(key)):
                    _add(level, key, value, source, None)
        return level


def _settings_meant(key: Any) -> Iterator[str]:
    """Yield the settings that a key, or a misspelled key, stands for."""
    if not isinstance(key, str):
        return
    name, known = key.replace("-", "_"), _names_by_key()
    yield from set().union(*(known[close] for close in ([name] if name in known else closest(name, known))))


@cache
def _names_by_key() -> Mapping[str, set[str]]:
    """Return every key of a file -> the settings that it stands for."""
    # `optimizer` is a section and a setting of the same name.
    known: dict[str, set[str]] = {key_of(flag): set(names) for flag, names in STANDS_FOR.items()}
    for spelling, setting in _settings_by_key().items():
        known.setdefault(spelling, set()).add(setting.name)
        known.setdefault(setting.section, set()).add(setting.name)
    return known


@cache
def _settings_by_key() -> Mapping[str, Setting]:
    """Return every spelling of a key (field name and long flags, with underscores) -> its setting."""
    return {key_of(flag): setting for setting in settings().values() for flag in setting.flags}


def _add(level: Level, key: Any, value: Any, source: str, section: str | None) -> None:
    where = f"{source}, {section}" if section else source
    if not isinstance(key, str):
        raise ConfigError(f"{where}: {shortened(key)} is not a setting; keys are names such as num_layers")
    name, by_key = key.replace("-", "_"), _settings_by_key()
    flag = "--" + name.replace("_", "-")
    if name in by_key:
        setting = by_key[name]
        if section and setting.section != section:
            raise ConfigError(f"{where}: {key} belongs to section {setting.section}, not {section}; move it there")
        if setting.name in PATH_SETTINGS and value is not None:
            value = words_of(setting.name, value, where)
        level.add(setting.name, coerce(setting, value, where), source)
    elif flag in STANDS_FOR:
        if section is not None:
            raise ConfigError(f"{where}: {key} is not part of a section; write it at the top level of the file")
        level.add_megatron_flag(flag, value, f"{where}: {key}", source)
    elif flag in known_flags():
        if value is not None and value is not False:
            words = value if isinstance(value, list) else [] if value is True else [value]
            level.notes.append(known_flags()[flag].judge([str(word) for word in words], f"{where}: {key}"))
    elif section is None and key in sections():
        example = next(setting for setting in settings().values() if setting.section == key)
        raise ConfigError(
            f"{where}: {key} is a section and takes settings below it, such as `{key}: {{{example.name}: "
            f"{example.default}}}`, got {shortened(value)}"
        )
    else:
        known = [spelling for spelling, setting in by_key.items() if section in (None, setting.section)]
        if section is None:
            known += [*map(key_of, STANDS_FOR), *sections()]
        raise ConfigError(f"{where}: unknown {'key' if section else 'section or key'} {key}{nearest(name, known)}")


_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def read_preset(name: str, problems: Problems | None = None) -> Level:
    """Read a preset into a level; `problems`: see `read_level`. Raises ConfigError: no such preset."""
    names = preset_names()
    if name not in names:
        raise ConfigError(f"--preset: unknown preset {name}{nearest(name, names)} (there are {', '.join(names)})")
    return read_level(_FOLDER / f"{name}.yaml", source=f"preset {name}", problems=problems)
