"""What reading any YAML file needs: no key twice, and the names of files that might be meant."""

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from megalite.config.errors import ConfigError


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML's last one would win without a word)."""

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
                raise ConfigError(f"{key} is given twice, on {on}; keep one of them")
            lines[key] = line
        return super().construct_mapping(node, deep)


def near_files(path: Path) -> str:
    """`: did you mean x?` for files of similar name in the same folder."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return f": there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
