"""YAML config files: load with every key checked, dump so that it loads equal."""

import reprlib
from pathlib import Path
from typing import Any

import yaml

from megalite.config.data_paths import DATA_FILES, PATH_SETTINGS, words_of
from megalite.config.describe import Setting, sectioned, sections, settings
from megalite.config.errors import ConfigError
from megalite.config.megatron import DERIVED, NO_EFFECT, SHORTHANDS, WORDS, settings_of_word
from megalite.config.merge import Level, merge
from megalite.config.run import RunConfig
from megalite.config.values import coerce, nearest
from megalite.config.yaml_files import UniqueKeyLoader, near_files


def load(path: str | Path) -> RunConfig:
    """The config that a file describes, over the defaults.

    Raises:
        ConfigError: no such file, not YAML, or a key or value that is not legal.
    """
    return merge([read_level(path)]).config


def dump(config: RunConfig) -> str:
    """Every setting as YAML, one section a topic; `load` gives back an equal config."""
    return yaml.safe_dump(sectioned(config), sort_keys=False, allow_unicode=True, default_flow_style=False)


def read_level(path: str | Path, source: str | None = None) -> Level:
    """What a file gives. `source` replaces `file PATH` in messages and provenance.

    Raises:
        ConfigError: as `load`.
    """
    path = Path(path)
    source = source or f"file {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist{near_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    return level_from_text(text, source)


def level_from_text(text: str, source: str) -> Level:
    """What YAML text gives; sections and flat keys may be mixed."""
    try:
        tree = yaml.load(text, Loader=UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else reprlib.repr(tree)
        raise ConfigError(f"{source} must hold `key: value` lines such as `num_layers: 4`, found {found}")
    level = Level()
    for key, value in tree.items():
        if key in sections() and (isinstance(value, dict) or value is None):
            for name, inner in (value or {}).items():
                _add_key(level, name, inner, source, section=key)
        else:
            _add_key(level, key, value, source, section=None)
    return level


def _settings_by_key() -> dict[str, Setting]:
    """Every spelling of a key (field name and long flags, with underscores) -> its setting."""
    spellings = {}
    for setting in settings().values():
        for flag in setting.flags:
            spellings[_key_of(flag)] = setting
    return spellings


def _key_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _add_key(level: Level, key: Any, value: Any, source: str, section: str | None) -> None:
    where = f"{source}, {section}" if section else source
    if not isinstance(key, str):
        raise ConfigError(f"{where}: {reprlib.repr(key)} is not a setting; keys are names such as num_layers")
    name = key.replace("-", "_")
    by_key = _settings_by_key()
    if name in by_key:
        setting = by_key[name]
        if section and setting.section != section:
            raise ConfigError(
                f"{where}: {key} belongs to section {setting.section}, not {section}; move it there"
            )
        if setting.name in PATH_SETTINGS and value is not None:
            value = words_of(setting.name, value, where)
        level.add(setting.name, coerce(setting, value, where), source)
        return
    flag = "--" + name.replace("_", "-")
    if section is not None and flag in (*SHORTHANDS, *WORDS, *DERIVED, *DATA_FILES):
        raise ConfigError(f"{where}: {key} belongs to no section; write it at the top level of the file")
    if section is None and flag in SHORTHANDS:
        _need_true(key, value, where, f"remove it, or set {' and '.join(SHORTHANDS[flag])} itself")
        for target, fixed in SHORTHANDS[flag].items():
            level.add(target, fixed, source)
    elif section is None and flag in WORDS:
        word = value if isinstance(value, str) else reprlib.repr(value)
        for target, fixed in settings_of_word(flag, word, f"{where}: {key}").items():
            level.add(target, fixed, source)
    elif section is None and flag in DERIVED:
        if not DERIVED[flag]:
            _need_true(key, value, where, "remove it")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where}: {key} takes a whole number such as 4, got {reprlib.repr(value)}")
        level.add_derived(flag, value, f"{source}, {key}")
    elif section is None and flag in DATA_FILES:
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} takes the path of a file, got {reprlib.repr(value)}")
        for name, words in DATA_FILES[flag](value, f"{where}: {key}").items():
            level.add(name, words, f"{source}, {key}")
    elif flag in NO_EFFECT:
        raise ConfigError(f"{where}: {key} has no effect: {NO_EFFECT[flag]}; remove it")
    else:
        known = set(by_key) if section is None else {k for k, s in by_key.items() if s.section == section}
        known |= (
            {_key_of(f) for f in (*SHORTHANDS, *WORDS, *DERIVED, *DATA_FILES)} | set(sections())
            if section is None
            else set()
        )
        raise ConfigError(
            f"{where}: unknown {'key' if section else 'section or key'} {key}{nearest(name, known)}"
        )


def _need_true(key: str, value: Any, where: str, remedy: str) -> None:
    if value is not True:
        raise ConfigError(f"{where}: {key} can only be true, got {reprlib.repr(value)}; {remedy}")
