"""YAML config files: load with every key checked, dump so that it loads equal."""

from pathlib import Path
from typing import Any

import yaml

from megalite.config.data import DATA_FILES, PATH_SETTINGS, words_of
from megalite.config.describe import Setting, sectioned, sections, settings
from megalite.config.errors import ConfigError, Problems, gathered, shortened
from megalite.config.megatron import DERIVED, NO_EFFECT, SHORTHANDS, STANDS_FOR, WORDS, settings_of_word
from megalite.config.merge import Level, merge
from megalite.config.reading import load_yaml, near_files, read_text
from megalite.config.run import RunConfig
from megalite.config.values import closest, coerce, nearest


def load(path: str | Path) -> RunConfig:
    """The config that a file describes, over the defaults.

    Raises:
        ConfigError: no such file, not YAML, or keys or values that are not legal.
    """
    with gathered(None) as problems:
        return merge([read_level(path, problems=problems)], problems).config


def dump(config: RunConfig) -> str:
    """Every setting as YAML, one section a topic; `load` gives back an equal config."""
    return yaml.safe_dump(sectioned(config), sort_keys=False, allow_unicode=True, default_flow_style=False)


def read_level(path: str | Path, source: str | None = None, *, problems: Problems | None = None) -> Level:
    """What a file gives.

    Args:
        source: replaces `file PATH` in messages and provenance.
        problems: gets what is wrong with keys and values; default: raised, all in one.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    path = Path(path)
    source = source or f"file {path}"
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist{near_files(path)}") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path} cannot be read: it is not UTF-8 text") from None
    return level_from_text(text, source, problems)


def level_from_text(text: str, source: str, problems: Problems | None = None) -> Level:
    """What YAML text gives; sections and flat keys may be mixed. `problems` and errors as for `read_level`."""
    with gathered(problems) as found:
        tree = _tree(text, source, found)
        level = Level()
        for key, value in tree.items():
            if key in sections() and (isinstance(value, dict) or value is None):
                for name, inner in (value or {}).items():
                    _add_key(level, name, inner, source, key, found)
            else:
                _add_key(level, key, value, source, None, found)
        return level


def _tree(text: str, source: str, problems: Problems) -> dict[Any, Any]:
    twice = Problems()
    try:
        tree = load_yaml(text, twice)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    for problem in twice.found:
        problems.add(f"{source}: {problem}", *twice.wrong)
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else shortened(tree)
        raise ConfigError(f"{source} must hold `key: value` lines such as `num_layers: 4`, found {found}")
    return tree


def _add_key(level: Level, key: Any, value: Any, source: str, section: str | None, problems: Problems) -> None:
    with problems.collecting(*_meant_by(key)):
        _add(level, key, value, source, section)


def _meant_by(key: Any) -> set[str]:
    """The settings that a key, or a key like it, stands for."""
    if not isinstance(key, str):
        return set()
    by_key = {key: {setting.name} for key, setting in _settings_by_key().items()}
    of_section = {name: {s.name for s in settings().values() if s.section == name} for name in sections()}
    by_key |= {_key_of(flag): set(names) for flag, names in STANDS_FOR.items()}
    # `optimizer` is a section and a setting of its own name.
    known = {name: of_section.get(name, set()) | by_key.get(name, set()) for name in (*of_section, *by_key)}
    name = key.replace("-", "_")
    return set().union(*(known[close] for close in ([name] if name in known else closest(name, known))))


def _settings_by_key() -> dict[str, Setting]:
    """Every spelling of a key (field name and long flags, with underscores) -> its setting."""
    spellings = {}
    for setting in settings().values():
        for flag in setting.flags:
            spellings[_key_of(flag)] = setting
    return spellings


def _key_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _add(level: Level, key: Any, value: Any, source: str, section: str | None) -> None:
    where = f"{source}, {section}" if section else source
    if not isinstance(key, str):
        raise ConfigError(f"{where}: {shortened(key)} is not a setting; keys are names such as num_layers")
    name = key.replace("-", "_")
    by_key = _settings_by_key()
    if name in by_key:
        setting = by_key[name]
        if section and setting.section != section:
            raise ConfigError(f"{where}: {key} belongs to section {setting.section}, not {section}; move it there")
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
        word = value if isinstance(value, str) else shortened(value)
        for target, fixed in settings_of_word(flag, word, f"{where}: {key}").items():
            level.add(target, fixed, source)
    elif section is None and flag in DERIVED:
        if not DERIVED[flag]:
            _need_true(key, value, where, "remove it")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where}: {key} takes a whole number such as 4, got {shortened(value)}")
        level.add_derived(flag, value, f"{source}, {key}")
    elif section is None and flag in DATA_FILES:
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {key} takes the path of a file, got {shortened(value)}")
        for name, words in DATA_FILES[flag](value, f"{where}: {key}").items():
            level.add(name, words, f"{source}, {key}")
    elif flag in NO_EFFECT:
        raise ConfigError(f"{where}: {key} has no effect: {NO_EFFECT[flag]}; remove it")
    elif section is None and key in sections():
        raise ConfigError(
            f"{where}: {key} is a section and takes settings below it, such as `{key}: {{{_example(key)}}}`, got "
            f"{shortened(value)}"
        )
    else:
        known = set(by_key) if section is None else {k for k, s in by_key.items() if s.section == section}
        known |= (
            {_key_of(f) for f in (*SHORTHANDS, *WORDS, *DERIVED, *DATA_FILES)} | set(sections())
            if section is None
            else set()
        )
        raise ConfigError(f"{where}: unknown {'key' if section else 'section or key'} {key}{nearest(name, known)}")


def _example(section: str) -> str:
    """The first setting of a section with its default, as YAML."""
    setting = next(setting for setting in settings().values() if setting.section == section)
    return yaml.safe_dump({setting.name: setting.default}).strip()


def _need_true(key: str, value: Any, where: str, remedy: str) -> None:
    if value is not True:
        raise ConfigError(f"{where}: {key} can only be true, got {shortened(value)}; {remedy}")


_FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def read_preset(name: str, problems: Problems | None = None) -> Level:
    """The settings of a preset; `problems` as for `files.read_level`.

    Raises:
        ConfigError: there is none of that name; the nearest are named.
    """
    names = preset_names()
    if name not in names:
        raise ConfigError(f"--preset: unknown preset {name}{nearest(name, names)} (there are {', '.join(names)})")
    return read_level(_FOLDER / f"{name}.yaml", source=f"preset {name}", problems=problems)
