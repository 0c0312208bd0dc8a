"""Check every pair of features with the validator and the schedule's own check."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.pipeline import schedule_of

DP = 4
MICROBATCHES = 8
BASE: Mapping[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 128,
    "seq_length": 64,
    "train_iters": 1000,
    "global_batch_size": DP * MICROBATCHES,
    "data_path": ["corpus_text_document"],
    "tokenizer_model": "tokenizer.model",
    "save_interval": 100,
    "run_dir": "runs/composition",
}
"""A small GPT on which all features are possible."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """A feature of a run: short name, flags and settings."""

    name: str
    flags: str
    settings: Settings


EXPERTS = {"num_experts": 4}
BF16 = {"precision": "bf16"}


def _strategy(name: str, **more: Any) -> Settings:
    return {"dp_strategy": name, **more}


FEATURES = (
    Feature("tp", "--tp 2", {"tp": 2}),
    Feature("sp", "--tp 2 --sequence-parallel", {"tp": 2, "sequence_parallel": True}),
    Feature("cp, ring", "--cp 2", {"cp": 2}),
    Feature("cp, all-to-all", "--cp 2 --cp-comm-type a2a", {"cp": 2, "cp_comm_type": "a2a"}),
    Feature("cp, all-gather", "--cp 2 --cp-comm-type allgather", {"cp": 2, "cp_comm_type": "allgather"}),
    Feature("ep", "--num-experts 4 --ep 2", {**EXPERTS, "ep": 2}),
    Feature("pp", "--pp 2", {"pp": 2}),
    Feature("vpp", "--pp 2 --vpp 2", {"pp": 2, "vpp": 2}),
    Feature("zero bubble", "--pp 2 --pipeline-schedule zb-h1", {"pp": 2, "pipeline_schedule": "zb-h1"}),
    Feature("V schedules", "--pp 2 --pipeline-schedule zb-v", {"pp": 2, "vpp": 2, "pipeline_schedule": "zb-v"}),
    Feature("ZeRO-1", "--dp-strategy distributed-optimizer", _strategy("distributed-optimizer")),
    Feature(
        "ZeRO-2",
        "--dp-strategy distributed-optimizer --shard-gradients",
        _strategy("distributed-optimizer", shard_gradients=True),
    ),
    Feature("ZeRO-3", "--dp-strategy fully-sharded", _strategy("fully-sharded")),
    Feature(
        "hybrid sharding", "--dp-strategy fully-sharded --dp-instances 2", _strategy("fully-sharded", dp_instances=2)
    ),
    Feature("fused all-reduce", "--dp-strategy fused-all-reduce", _strategy("fused-all-reduce")),
    Feature("parameter server", "--dp-strategy parameter-server", _strategy("parameter-server")),
    Feature("sharded server", "--dp-strategy sharded-parameter-server", _strategy("sharded-parameter-server")),
    Feature("asynchronous server", "--dp-strategy async-parameter-server", _strategy("async-parameter-server")),
    Feature("local SGD", "--dp-strategy local-sgd", _strategy("local-sgd")),
    Feature("DiLoCo", "--dp-strategy diloco", _strategy("diloco")),
    Feature("gossip", "--dp-strategy gossip", _strategy("gossip")),
    Feature("compressed gradients", "--grad-compression powersgd", {"grad_compression": "powersgd"}),
    Feature("bf16 wire", "--wire-dtype bf16", {"wire_dtype": "bf16"}),
    Feature("SGD", "--optimizer sgd", {"optimizer": "sgd"}),
    Feature("LAMB", "--optimizer lamb", {"optimizer": "lamb"}),
    Feature("Muon", "--optimizer muon", {"optimizer": "muon"}),
    Feature("SOAP", "--optimizer soap", {"optimizer": "soap"}),
    Feature(
        "1-bit Adam", "--optimizer onebit-adam --freeze-step 100", {"optimizer": "onebit-adam", "freeze_step": 100}
    ),
    Feature(
        "1-bit LAMB", "--optimizer onebit-lamb --freeze-step 100", {"optimizer": "onebit-lamb", "freeze_step": 100}
    ),
    Feature(
        "0/1 Adam", "--optimizer zero-one-adam --freeze-step 100", {"optimizer": "zero-one-adam", "freeze_step": 100}
    ),
    Feature("bf16", "--bf16", BF16),
    Feature("fp16", "--fp16", {"precision": "fp16"}),
    Feature("fp8", "--bf16 --fp8", {**BF16, "fp8": True}),
    Feature("split main parameters", "--bf16 --main-params split", {**BF16, "main_params": "split"}),
    Feature("bf16 moments", "--exp-avg-dtype bf16", {"exp_avg_dtype": "bf16"}),
    Feature("selective recompute", "--recompute-granularity selective", {"recompute_granularity": "selective"}),
    Feature("full recompute", "--recompute-granularity full", {"recompute_granularity": "full"}),
    Feature(
        "recompute ahead",
        "--pp 2 --recompute-granularity full --recompute-ahead",
        {"pp": 2, "recompute_granularity": "full", "recompute_ahead": True},
    ),
    Feature("states in host memory", "--optimizer-cpu-offload", {"optimizer_cpu_offload": True}),
    Feature("activations in host memory", "--cpu-offloading-num-layers 1", {"cpu_offloading_num_layers": 1}),
    Feature("weight averaging", "--ema-decay 0.999", {"ema_decay": 0.999}),
    Feature("compile", "--compile", {"compile": True}),
    Feature(
        "tp overlap",
        "--tp 2 --sequence-parallel --tp-comm-overlap",
        {"tp": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    ),
    Feature("dropout", "--attention-dropout 0.1", {"attention_dropout": 0.1, "hidden_dropout": 0.1}),
    Feature("sliding window", "--sliding-window 16", {"sliding_window": 16}),
    Feature("best-fit packing", "--packing best-fit", {"packing": "best-fit"}),
    Feature("batch ramp-up", "--rampup-batch-size 16 16 1000", {"rampup_batch_size": [16, 16, 1000]}),
    Feature("replica check", "--check-replicas-interval 100", {"check_replicas_interval": 100}),
    Feature("background saves", "--async-save", {"async_save": True}),
)

COLUMNS = ("tp", "sp", "cp, ring", "ep", "pp", "vpp", "V schedules", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""Columns of the README's table; docs/composition.md lists all refused pairs."""
GOES, REFUSED, ONE_OF = "✓", "–", ""


def alternatives(one: Feature, other: Feature) -> bool:
    """Return whether two features are values of the same setting."""
    return any(one.settings[name] != other.settings[name] for name in one.settings.keys() & other.settings.keys())


@cache
def refusal(one: str, other: str) -> str | None:
    """Return why two features do not work together; None if they do."""
    by_name = {feature.name: feature for feature in FEATURES}
    asked = {**by_name[one].settings, **by_name[other].settings}
    config = replace(RunConfig(), **{**BASE, **asked})
    p = config.parallel
    try:
        found = validate(config, p.tp * p.cp * p.pp * DP, frozenset(asked))
        named = found.parallel.schedule_name != "auto"  # auto is built for any sizes
        for count in microbatch_counts(found) if named else ():
            schedule_of(found, count)
    except ConfigError as error:
        return str(error)
    return None


def readme_table() -> str:
    """Return a sentence of features that work with all of `COLUMNS`, and a table of the others; equal rows share a
    line."""
    by_name = {feature.name: feature for feature in FEATURES}
    rows: dict[tuple[str, ...], list[str]] = {}
    for feature in FEATURES:
        rows.setdefault(_cells(feature, by_name), []).append(feature.name)
    good = [name for cells, names in rows.items() if REFUSED not in cells for name in names]
    lines = [
        f"Every two of {'; '.join(name for name in COLUMNS if name in good)} work together, and each of them with "
        f"{'; '.join(name for name in good if name not in COLUMNS)}. Of the others:",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        f"|---|{':-:|' * len(COLUMNS)}",
        *(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items() if REFUSED in cells),
    ]
    return "\n".join(lines) + "\n"


def _cells(feature: Feature, by_name: Mapping[str, Feature]) -> tuple[str, ...]:
    found = []
    for column in COLUMNS:
        if column == feature.name or alternatives(feature, by_name[column]):
            found.append(ONE_OF)
        else:
            found.append(GOES if refusal(feature.name, column) is None else REFUSED)
    return tuple(found)


def flags_table() -> str:
    """Return the flags of each feature."""
    return "".join(f"- {feature.name}: `{feature.flags}`\n" for feature in FEATURES)


def refused_table() -> str:
    """Return all refused pairs: features refused with the same others share a row."""
    refused: dict[str, list[str]] = {}
    for one, other in itertools.combinations(FEATURES, 2):
        if not alternatives(one, other) and refusal(one.name, other.name) is not None:
            refused.setdefault(one.name, []).append(other.name)
    rows: dict[str, list[str]] = {}
    for name, others in refused.items():
        rows.setdefault("; ".join(others), []).append(name)
    lines = ["| | does not go with |", "|---|---|"]
    return "\n".join([*lines, *(f"| {'; '.join(names)} | {others} |" for others, names in rows.items())]) + "\n"


def counted() -> str:
    """Return one line with the numbers of pairs and refused pairs."""
    pairs = [(one, other) for one, other in itertools.combinations(FEATURES, 2) if not alternatives(one, other)]
    refused = sum(refusal(one.name, other.name) is not None for one, other in pairs)
    return f"Of {len(pairs)} pairs of {len(FEATURES)} features {refused} are refused.\n"
