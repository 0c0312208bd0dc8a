"""The command line of `megalite plan`: its own flags, and what all settings become: a request to the planner."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalite.config.byte_size import parse_byte_size
from megalite.config.describe import replace as with_settings
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.run import RunConfig
from megalite.planner.hardware import Cluster, SoftwareStack, load_cluster, load_stack
from megalite.planner.search.request import (
    USUAL_MEMORY,
    Request,
    fixed_settings,
    parse_constraint,
    refuse_not_searched,
    request_for,
)
from megalite.tokenizers.build import build_tokenizer

FLAGS: Mapping[str, tuple[str, str]] = {
    "--cluster": ("NAME", "machines: a name that comes with megalite, or a YAML file"),
    "--gpus": ("N", "ranks"),
    "--stack": ("NAME", "software: fused (default) or unfused, or a YAML file"),
    "--fix": ("NAME=VALUE,..", "allow only these values, e.g. schedule=zb-v; may be repeated"),
    "--max-memory": ("SIZE", "of a rank, e.g. 70GB; default 90 % of the device's"),
    "--tokens": ("N", "length of the training that is told, e.g. 1.5T (default 300B)"),
    "--top": ("N", "layouts to show (default 5)"),
    "--output": ("FILE", "write the best as a config for training, the others beside it"),
    "--html": ("FILE", "write a report: one file, no network"),
    "--explain": ("", "draw the step of the best layout"),
    "--json": ("", "everything as data"),
}
"""Flag -> (its value, what it does)."""
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A parsed command line."""

    request: Request
    cluster: Cluster
    stack: SoftwareStack
    top: int
    tokens: float
    output: Path | None
    html: Path | None
    explain: bool
    json: bool


def parse_plan(argv: Sequence[str]) -> Asked:
    """What was asked for.

    Raises:
        ConfigError: a flag or value that cannot be, or a setting that the search has no place for.
    """
    own, rest = _split(argv)
    invocation = parse_arguments(rest, others=FLAGS)
    for needed, example in (("--cluster", "dgx-a100"), ("--gpus", "512")):
        if needed not in own:
            raise ConfigError(f"{needed} is missing; write e.g. megalite plan --preset gpt3-175b {needed} {example}")
    cluster = load_cluster(own["--cluster"][0])
    stack = load_stack(own.get("--stack", ["fused"])[0])
    if invocation.dry_run:
        raise ConfigError("--dry-run has no effect: a plan starts nothing; remove it")
    limit = cluster.accelerator.memory_bytes * USUAL_MEMORY
    if "--max-memory" in own:
        limit = _size(own["--max-memory"][0])
    ranks = _whole(own, "--gpus", 1)
    tokens = _tokens(own.get("--tokens", ["300B"])[0])
    return Asked(
        request=request_of(invocation, cluster, ranks, own.get("--fix", []), limit),
        cluster=cluster,
        stack=stack,
        top=_whole(own, "--top", 5),
        tokens=tokens,
        output=_path(own, "--output"),
        html=_path(own, "--html"),
        explain="--explain" in own,
        json="--json" in own,
    )


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Our flags with their values, and the settings."""
    own: dict[str, list[str]] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            rest.append(word)
            continue
        if flag in own and flag != "--fix":
            raise ConfigError(f"{flag} is given twice; keep one of them")
        if FLAGS[flag][0]:
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{flag} needs a value ({FLAGS[flag][0]})")
                value = words.pop(0)
            own.setdefault(flag, []).append(value)
        elif equals:
            raise ConfigError(f"{flag} takes no value, got {value}")
        else:
            own[flag] = []
    return own, rest


def _whole(own: Mapping[str, list[str]], flag: str, default: int) -> int:
    word = own.get(flag, [str(default)])[0]
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{flag} takes a whole number of at least 1, such as 8, got {word}")
    return int(word)


def _size(text: str) -> float:
    size = parse_byte_size(text)
    if size is None:
        raise ConfigError(f"--max-memory is {text}; it is a size with its unit, e.g. 70GB or 64GiB")
    return size


def _tokens(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMBT]?)", text, re.ASCII | re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--tokens is {text}; it is a number above 0 such as 300B or 1.5T")
    return float(match[1]) * _UNITS[match[2].upper()]


def _path(own: Mapping[str, list[str]], flag: str) -> Path | None:
    return Path(own[flag][0]) if flag in own else None


def request_of(
    invocation: Invocation, cluster: Cluster, ranks: int, constraints: Sequence[str], limit: float
) -> Request:
    """Settings that are searched become constraints, the others the config that every layout shares.

    Raises:
        ConfigError: the model is not legal, something needed is missing, or the search has no place for a setting.
    """
    refuse_not_searched(invocation.config, invocation.explicit)
    fixed = fixed_settings(invocation.config, invocation.explicit)
    for text in constraints:
        name, values = parse_constraint(text)
        if fixed.get(name, values) != values:
            raise ConfigError(f"--fix {text} and {name} {','.join(map(str, fixed[name]))} contradict; keep one of them")
        fixed[name] = values
    config = invocation.config
    if config.training.global_batch_size is None:
        raise ConfigError("the batch is not set; add --global-batch-size, e.g. 1536")
    if invocation.provenance["precision"] == "default":
        peaks = cluster.accelerator.peak_flops
        order = [precision for precision in ("bf16", "fp16", "fp32", "fp64") if precision in peaks]
        best = max(order, key=lambda precision: peaks[precision])  # the first of equals
        config = with_settings(config, precision=best)
    return request_for(_with_vocabulary(config), world_size=ranks, fixed=fixed, memory_limit=limit)


def _with_vocabulary(config: RunConfig) -> RunConfig:
    if config.model.vocab_size is not None:
        return config
    tokenizer = build_tokenizer(config.data, None)
    if tokenizer is None:
        raise ConfigError(
            "the size of the vocabulary is not known, and memory depends on it; add --vocab-size 50257 (or "
            "--tokenizer-model FILE)"
        )
    return with_settings(config, vocab_size=tokenizer.vocab_size)
