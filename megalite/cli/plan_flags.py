"""The command line of `megalite plan`: its own flags, and what all settings become: a request to the planner."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config.byte_size import parse_byte_size
from megalite.config.describe import replace as with_settings
from megalite.config.describe import settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.rules.data_parallel import check_data_parallel
from megalite.config.rules.optimizers import check_optimizer
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.tokenizers.build import build_tokenizer
from megalite.planner.hardware.cluster import Cluster, load_cluster
from megalite.planner.hardware.stack import SoftwareStack, load_stack
from megalite.planner.search.request import SEARCHED, STRATEGIES, Request, parse_constraint
from megalite.planner.search.search import not_default

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
USUAL_MEMORY = 0.9
"""Of the device's: allocator, kernels and communication need some that is not in the formulas."""
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NOT_SEARCHED = {
    "pipeline_schedule_file": "is for one schedule",
    "pipeline_costs": "belongs to schedule auto, which is built, not searched",
    "pipeline_memory_limit": "is what --max-memory says of all memory",
    "recompute_ahead": "is not searched",
    "recompute_method": "is not searched: full recompute is of each layer",
    "recompute_num_layers": "is not searched: full recompute is of each layer",
}


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
            raise ConfigError(
                f"{needed} is missing; write e.g. megalite plan --preset gpt3-175b {needed} {example}"
            )
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
    explicit = invocation.explicit
    for name, why in _NOT_SEARCHED.items():
        if name in explicit:
            raise ConfigError(f"{name} {values_of(invocation.config)[name]} {why}; remove it")
    fixed = _fixed(invocation)
    for text in constraints:
        name, values = parse_constraint(text)
        if fixed.get(name, values) != values:
            raise ConfigError(
                f"--fix {text} and {name} {','.join(map(str, fixed[name]))} contradict; keep one of them"
            )
        fixed[name] = values
    config = invocation.config
    if config.training.global_batch_size is None:
        raise ConfigError("the batch is not set; add --global-batch-size, e.g. 1536")
    if invocation.provenance["precision"] == "default":
        peaks = cluster.accelerator.peak_flops
        order = [precision for precision in ("bf16", "fp16", "fp32", "fp64") if precision in peaks]
        best = max(order, key=lambda precision: peaks[precision])  # the first of equals
        config = with_settings(config, precision=best)
    config = _shared(config)
    strategies = _possible_strategies(config)
    allowed = tuple(name for name in fixed.get("dp_strategy", STRATEGIES) if name in strategies)
    if not allowed:
        raise ConfigError(
            f"dp_strategy {','.join(fixed['dp_strategy'])} does not go with the other settings; use "
            f"{', '.join(strategies) or 'other settings'}"
        )
    if allowed != STRATEGIES:
        fixed["dp_strategy"] = allowed
    return Request(config=config, world_size=ranks, fixed=fixed, memory_limit=limit)


def _fixed(invocation: Invocation) -> dict[str, tuple[Any, ...]]:
    """Searched settings that the user gave."""
    values, explicit = values_of(invocation.config), invocation.explicit
    fixed = {name: (values[name],) for name in SEARCHED if name in explicit and values[name] is not None}
    if "shard_gradients" in explicit and values["shard_gradients"]:
        fixed["dp_strategy"] = ("zero-2",)
    (strategy,) = fixed.get("dp_strategy", ("all-reduce",))
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"dp_strategy {strategy} is not searched; use one of {', '.join(STRATEGIES)}, or leave it out"
        )
    if fixed.get("pipeline_schedule") == ("auto",):
        raise ConfigError("pipeline_schedule auto is built, not searched; name another, or leave it out")
    return fixed


def _shared(config: RunConfig) -> RunConfig:
    """What is not searched, validated and with all sizes known."""
    p, default = config.parallel, settings()
    searched = {name: default[name].default for name in (*SEARCHED, "shard_gradients", "dp")}
    cut = {"pipeline_layers": p.pipeline_layers, "pipeline_layout": p.pipeline_layout}
    bare = with_settings(config, **searched, **dict.fromkeys(cut))
    if bare.model.vocab_size is None:
        tokenizer = build_tokenizer(bare.data, None)
        if tokenizer is None:
            raise ConfigError(
                "the size of the vocabulary is not known, and memory depends on it; add --vocab-size 50257 (or "
                "--tokenizer-model FILE)"
            )
        bare = with_settings(bare, vocab_size=tokenizer.vocab_size)
    alone = validate(with_settings(bare, cp_comm_type="p2p"), 1)
    return with_settings(alone, dp=None, etp=p.etp, cp_comm_type=p.cp_comm_type, **cut)


def _possible_strategies(config: RunConfig) -> list[str]:
    """Those that the optimizer and the other settings of data parallelism go with."""
    found = []
    for name in STRATEGIES:
        zero = name == "zero-2"
        strategy = "distributed-optimizer" if zero else name
        tried = with_settings(config, dp=2, dp_strategy=strategy, shard_gradients=zero)
        try:
            check_data_parallel(tried, not_default(tried))
            check_optimizer(tried, not_default(tried))
        except ConfigError:
            continue
        found.append(name)
    return found
