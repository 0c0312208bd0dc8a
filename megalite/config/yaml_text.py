"""YAML without surprises. Loaded with the first file that is read: help and a command line of flags need none of it."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from megalite.config.errors import ConfigError, Problems

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML's last one would win without a word), and YAML 1.1's odd numbers.

    `1:30:00` is no 5400 and `010` no 8: what is not a plain number stays text, which a setting that wants a number then
    refuses by what is written in the file. So does an integer of more digits than any setting takes."""

    problems: Problems  # gets keys that are given twice

    yaml_implicit_resolvers = {  # noqa: RUF012  as PyYAML declares it
        first: [(tag, form) for tag, form in rules if tag not in (_INT, _FLOAT)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            # A merge (<<) may stand beside others; what it brings gives way to the mapping's own keys.
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            # As Python has it: 1.0 and 1 are one key. A list or mapping is no key, as construct_mapping says below.
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
    """What YAML text holds. `problems`: gets keys that are given twice. Raises ConfigError: it is not YAML, or nested too
    deeply; the message starts with `source`."""
    loader = UniqueKeyLoader(text)
    loader.problems = problems
    try:
        return loader.get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, LookupError, AttributeError) as error:
        # PyYAML's own, for a tag or a date with a value that does not fit.
        raise ConfigError(f"{source} is not YAML: a value is not of the type that it is written as: {error}") from None
    finally:
        loader.dispose()
