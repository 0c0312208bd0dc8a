"""The cut of a model in words, as `--pipeline-layout` takes it: `Et*3|t*4|(tt|)*2L`."""

import re
from collections.abc import Iterator

from megalite.config.errors import ConfigError

_TOKEN = re.compile(
    r"\s*(?:(?P<item>[EtL|])|(?P<open>\()|(?P<close>\))|\*\s*(?P<times>\d{1,6})|(?P<comma>,))\s*"
)
_MOST = 1_000_000
_EXAMPLE = 'e.g. "Et*3|t*4|t*4|t*2L" for four stages of 3, 4, 4 and 2 layers'


def parse_pipeline_layout(text: str) -> list[int]:
    """Layers of each stage. `E` is the embedding, `t` a layer, `L` head and loss, `|` the next stage; `x*n` and
    `(...)*n` repeat, commas and spaces say nothing. The language is Megatron-LM's, without its `m`.

    Raises:
        ConfigError: the text is not in that language, or embedding or head are not where the model has them.
    """
    items = "".join(_expanded(text))
    stages = items.split("|")
    if items.count("E") != 1 or not items.startswith("E"):
        raise _wrong(
            text, f"the embedding E must come once, at the very beginning, but here it reads {items[:40]}"
        )
    if items.count("L") != 1 or not items.endswith("L"):
        raise _wrong(text, f"the head L must come once, at the very end, but here it reads ...{items[-40:]}")
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        raise _wrong(text, f"stage {empty} of {len(stages)} is empty, and each needs something to do")
    return [stage.count("t") for stage in stages]


def _expanded(text: str) -> Iterator[str]:
    """The text with repetitions written out."""
    groups: list[list[str]] = [[]]
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None and text[position] == "m":
            raise _wrong(text, "multi-token prediction (m) is not supported")
        if token is None:
            raise _wrong(text, f"{text[position]!r} at character {position + 1} means nothing")
        position = token.end()
        if token["item"]:
            groups[-1].append(token["item"])
        elif token["open"]:
            groups.append([])
        elif token["close"]:
            if len(groups) == 1:
                raise _wrong(text, f"the ) at character {position} closes nothing")
            group = "".join(groups.pop())
            groups[-1].append(group)
        elif token["times"]:
            times = int(token["times"])
            if not groups[-1] or times < 1:
                raise _wrong(text, f"*{times} at character {position} repeats nothing")
            repeated = groups[-1].pop()
            if times * len(repeated) > _MOST:
                raise _wrong(text, f"*{times} at character {position} makes more than {_MOST} items")
            groups[-1].append(repeated * times)
    if len(groups) > 1:
        raise _wrong(text, "a ( is not closed")
    return iter(groups[0])


def _wrong(text: str, reason: str) -> ConfigError:
    return ConfigError(f"pipeline_layout {text!r}: {reason}; {_EXAMPLE}")
