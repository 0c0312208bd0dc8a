"""Strict YAML. Imported with the first file that is read; help and flags do not need it."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from megalite.config.errors import ConfigError, Problems

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, of which PyYAML silently keeps the last, and YAML 1.1's unusual numbers.

    `1:30:00` is not 5400 and `010` is not 8: anything but a plain number stays text, which a numeric setting then
    refuses with the text of the file. The same holds for integers with more digits than any setting accepts."""

    problems: Problems  # collects duplicate keys

    yaml_implicit_resolvers = {  # noqa: RUF012  as PyYAML declares it
        first: [(tag, form) for tag, form in rules if tag not in (_INT, _FLOAT)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            # Merges (<<) may be repeated; the mapping's own keys override the merged ones.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            # As in Python, 1.0 and 1 are one key. construct_mapping below refuses a list or mapping as a key.
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                continue
            if key in lines:
                on = f"lines {lines[key]} and {line}" if lines[key] != line else f"line {line}"
                self.problems.add(f"{key} is given twice, on {on}; keep one of them", str(key).replace("-", "_"))
            lines[key] = line
        return super().construct_mapping(node, deep)


_DIGITS = list("0123456789")
UniqueKeyLoader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,30}|0x[0-9a-fA-F]{1,24})\Z"), ["-", "+", *_DIGITS]
)
UniqueKeyLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    ["-", "+", ".", *_DIGITS],
)


def tree_of(text: str, source: str, problems: Problems) -> Any:
    """Parse YAML text; `problems` collects duplicate keys. Raises ConfigError: not YAML or nested too deeply; the
    message starts with `source`."""
    loader = UniqueKeyLoader(text)
    loader.problems = problems
    try:
        return loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, LookupError, AttributeError) as error:
        # PyYAML raises these for a tag or a date with an unsuitable value.
        raise ConfigError(f"{source} is not YAML: a value does not match its type: {error}") from None
    finally:
        loader.dispose()
