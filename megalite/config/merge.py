"""Levels of settings (preset, files, flags), and their merge into one RunConfig."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalite.config.data import DATA_FILES
from megalite.config.describe import replace, settings
from megalite.config.errors import ConfigError, Problems, Reported, raise_at_end, shortened
from megalite.config.megatron import (
    CONFLICTS,
    DERIVED,
    DIFFERENCES,
    FROM_VALUE,
    SHORTHANDS,
    SINKHORN_SCORES,
    expert_layers,
    hybrid_layers,
    layer_list,
    settings_of_word,
    stretched,
)
from megalite.config.megatron_flags import ALREADY_SO, DIFFERS, NO_EFFECT_HERE, Note
from megalite.config.model import LINEAR_SIZES
from megalite.config.parallel import PIPELINE_SCHEDULES, parse_pipeline_layout
from megalite.config.run import RunConfig, save_folder
from megalite.config.strategies import ALIASES, STRATEGIES
from megalite.config.training import parse_batch_schedule


@dataclasses.dataclass(frozen=True)
class Given:
    """A value and its source: `flag --tp`, `file run.yaml`, `preset gpt3-175b`."""

    value: Any
    source: str


class Level:
    """The settings of one preset, one file or the command line; a setting given twice must have one value."""

    def __init__(self, *, always_explicit: bool = False) -> None:
        self.always_explicit = always_explicit
        """Whether values equal to the default are explicit (flags); a dumped config restates every default."""
        self.given: dict[str, Given] = {}
        self.derived: dict[str, Given] = {}
        self.notes: list[Note] = []
        """Accepted flags and keys that set nothing."""

    def add(self, name: str, value: Any, source: str) -> None:
        """Record a setting, or those of an alias. Raises ConfigError: the level has it with another value."""
        if name == "dp_strategy" and value in ALIASES and value not in STRATEGIES:
            meant = ALIASES[value]
            named = ", ".join(f"{setting} {fixed}" for setting, fixed in meant.items())
            self.notes.append(Note(f"dp_strategy {value}", DIFFERS, f"{named} here"))
            for setting, fixed in meant.items():
                self.add(setting, fixed, source)
            return
        _add(self.given, name, Given(value, source))

    def add_megatron_flag(self, flag: str, value: Any, where: str, source: str) -> None:
        """Record a flag of `megatron.STANDS_FOR`: its settings, or the flag itself if `merge` derives them. `value` is
        True for a flag without one. Raises ConfigError: the value is not legal; the message starts with `where`."""
        given: Mapping[str, Any] = {}
        takes = DERIVED[flag][0] if flag in DERIVED else None if flag in SHORTHANDS else str
        if takes is None and value is not True:
            raise ConfigError(f"{where} takes no value but true, got {shortened(value)}; remove it")
        if flag in DERIVED:
            if takes is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{where} takes a whole number such as 4, got {shortened(value)}")
            _add(self.derived, flag, Given(value, source))
        elif flag in SHORTHANDS:
            given = SHORTHANDS[flag]
        elif flag in FROM_VALUE:
            if not isinstance(value, str) and (
                flag in DATA_FILES or isinstance(value, bool) or not isinstance(value, (int, float))
            ):
                what = "the path of a file" if flag in DATA_FILES else "one value"
                raise ConfigError(f"{where} takes {what}, got {shortened(value)}")
            given = FROM_VALUE[flag][0](str(value), where)
        else:
            given = settings_of_word(flag, value if isinstance(value, str) else shortened(value), where)
            source = f"{where} {value}"
        if flag in DIFFERENCES:
            self.notes.append(Note(flag, DIFFERS, DIFFERENCES[flag]))
        for name, fixed in given.items():
            self.add(name, fixed, source)


def _together(*imports: Given) -> list[str]:
    return list(dict.fromkeys(module for given in imports for module in given.value))


def _add(table: dict[str, Given], name: str, new: Given) -> None:
    if name == "imports" and name in table:
        new = table[name] = Given(_together(table[name], new), new.source)
    old = table.setdefault(name, new)
    if old.value != new.value:
        both = " and ".join(f"{shortened(given.value)} by {given.source}" for given in (old, new))
        raise ConfigError(f"{name} is given twice: {both}; {CONFLICTS.get(name, 'keep one of them')}")


@dataclasses.dataclass(frozen=True)
class Merged:
    """The config and the source of each of its settings."""

    config: RunConfig
    provenance: dict[str, str]  # setting -> `default`, `preset NAME`, `file PATH` or `flag --NAME`
    explicit: frozenset[str]
    """Settings that the user set: by a flag, or by a file with a value other than the default."""
    notes: tuple[Note, ...] = ()  # accepted flags of Megatron-LM that set nothing


def merge(levels: Sequence[Level], problems: Problems | None = None) -> Merged:
    """Lay the levels over the defaults, later ones on top. `problems` collects what is wrong; default: raised together.
    Raises ConfigError: a derived flag contradicts a setting of its level or cannot be met exactly."""
    with raise_at_end(problems) as found:
        _resolve_derived(levels, found)
    top = _topmost(levels)
    imports = [level.given["imports"] for level in levels if "imports" in level.given]
    if len(imports) > 1:  # a level adds modules to those of other levels
        top["imports"] = Given(_together(*imports), imports[-1].source)
    _drop_derived_folder(levels, top)
    explicit = {
        name
        for level in levels
        for name, given in level.given.items()
        if top.get(name) is given and not given.source.startswith("preset ")
        if level.always_explicit or given.value != settings()[name].default
    }
    provenance = {name: top[name].source if name in top else "default" for name in settings()}
    config = replace(RunConfig(), **{name: given.value for name, given in top.items()})
    return Merged(config, provenance, frozenset(explicit), tuple(note for level in levels for note in level.notes))


def _topmost(levels: Sequence[Level]) -> dict[str, Given]:
    return {name: given for level in levels for name, given in level.given.items()}


def _drop_derived_folder(levels: Sequence[Level], top: dict[str, Given]) -> None:
    """Drop a checkpoint folder that a file derived from its run_dir, as files of former versions do, if a later level
    sets another run_dir: the folder would belong to another run. It then follows from the new run_dir."""
    values = {name: given.value for name, given in top.items() if name != "save"}
    for level in levels:
        save, run_dir = level.given.get("save"), level.given.get("run_dir")
        if level.always_explicit or save is None or top.get("save") is not save or top.get("run_dir") is run_dir:
            continue
        former = None if run_dir is None else run_dir.value
        if save.value is not None and save.value == save_folder(replace(RunConfig(), **{**values, "run_dir": former})):
            del top["save"]


def _resolve_derived(levels: Sequence[Level], problems: Problems) -> None:
    """Add to each level the settings of its derived flags, which depend on all other settings."""
    for level in levels:
        for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
            if flag in level.derived:
                with problems.collecting({"num_layers"}):
                    _hybrid_layers(level, flag, levels)
    for level in levels:
        per_chunk = level.derived.get("--num-layers-per-virtual-pipeline-stage")
        if per_chunk:
            with problems.collecting({"vpp"}):
                level.add("vpp", _chunks(per_chunk, _sizes(levels, problems)), per_chunk.source)
    with problems.collecting({"pipeline_layout", "vpp"}):
        _chunks_of_layout_and_schedule(levels, problems)
    for level in levels:
        first = level.derived.get("--decoder-first-pipeline-num-layers")
        last = level.derived.get("--decoder-last-pipeline-num-layers")
        if given := first or last:
            with problems.collecting({"pipeline_layers"}):
                level.add("pipeline_layers", _uneven_layers(first, last, _sizes(levels, problems)), given.source)
        grouped = level.derived.get("--group-query-attention")
        if grouped and "num_query_groups" not in problems.wrong and _value(levels, "num_query_groups") is None:
            problems.add(f"{grouped.source} has no effect without the number of groups; add --num-query-groups, e.g. 8")
        accounted = [level.derived[flag] for flag in _ACCOUNTED if flag in level.derived]
        if accounted:
            with problems.collecting({"pipeline_layers"}):
                level.add("pipeline_layers", _accounted_layers(level, _sizes(levels, problems)), accounted[0].source)
        for flag, resolve in _RESOLVED.items():
            if flag in level.derived:
                with problems.collecting():
                    resolve(level, level.derived[flag], levels)


_MAMBA = {"linear_key_head_dim": 128, "linear_value_head_dim": 64, "linear_num_key_heads": 8}
"""Megatron-LM's defaults of Mamba-2; the default of its heads is twice the hidden size / linear_value_head_dim."""


def _hybrid_layers(level: Level, flag: str, levels: Sequence[Level]) -> None:
    """Megatron-LM counts mixers and MLPs as layers, and separates pipeline stages by |."""
    given = level.derived[flag]
    pattern, parts = str(given.value), str(given.value).split("|")
    if "/" in pattern:
        raise ConfigError(
            f"{given.source} {shortened(pattern)} has MTP layers after /; use --mtp-num-layers, for copies of the last layer"
        )
    found, theirs = hybrid_layers("".join(parts), given.source), level.given.get("num_layers")
    if ("E" in pattern) != (_value(levels, "num_experts") is not None):
        works = "has E; add --num-experts 8" if "E" in pattern else "has no E; write E for -, or remove num_experts"
        raise ConfigError(f"{given.source} {shortened(pattern)} {works}")
    if theirs is not None and theirs.value == len("".join(parts)):
        del level.given["num_layers"]
    if len(parts) > 1:
        found["pipeline_layers"] = [hybrid_layers(part, given.source)["num_layers"] for part in parts]
        chunks, rest = divmod(len(parts), _value(levels, "pp"))
        if rest:
            raise ConfigError(
                f"{given.source} has {len(parts)} stages, not a multiple of pp {_value(levels, 'pp')}; use --pp {len(parts)}"
            )
        found["vpp"] = chunks
    if found.get("experimental_attention_variant") == "mamba2":
        size = _topmost(levels).get("linear_value_head_dim", Given(_MAMBA["linear_value_head_dim"], "")).value
        found |= _MAMBA | {"linear_num_value_heads": max(1, 2 * _value(levels, "hidden_size") // size)}
        found = {
            name: value for name, value in found.items() if not (name in LINEAR_SIZES and name in _topmost(levels))
        }
    for name, value in found.items():
        level.add(name, value, given.source)
    why = f"a mixer and the MLP after it are one layer: num_layers {found['num_layers']}"
    level.notes.append(Note(flag, ALREADY_SO, why))


def _no_position_embedding(level: Level, given: Given, levels: Sequence[Level]) -> None:
    """Megatron-LM allows it with RoPE only; learned position embeddings contradict it."""
    if (kind := _value(levels, "position_embedding_type")) == "learned_absolute":
        raise ConfigError(f"{given.source} contradicts position_embedding_type {kind}; use rope or none")
    level.notes.append(Note("--no-position-embedding", ALREADY_SO, f"position_embedding_type is {kind}"))


def _load_balancing(level: Level, given: Given, levels: Sequence[Level]) -> None:
    """Megatron-LM's aux_loss is computed over all sequences of a microbatch."""
    kind, has_one = str(given.value), bool(_value(levels, "moe_aux_loss_coeff"))
    if kind == "sinkhorn":
        one = _value(levels, "moe_router_topk") == 1
        scores = zip(SINKHORN_SCORES, ("sigmoid" if one else "softmax", not one, 1.0), strict=True)
        for name, value in (("moe_router_sinkhorn", True), *scores):
            level.add(name, value, given.source)
        why = "tokens are balanced over each sequence; in Megatron-LM over the part of a microbatch on each rank"
        level.notes.append(Note("--moe-router-load-balancing-type sinkhorn", DIFFERS, why))
    elif kind == "none":
        level.add("moe_aux_loss_coeff", 0.0, given.source)
    elif kind not in ("aux_loss", "seq_aux_loss") and (has_one or kind != "global_aux_loss"):
        raise ConfigError(
            f"{given.source} {kind} is refused: this loss is not supported; use aux_loss, seq_aux_loss or none"
        )
    elif kind == "aux_loss" and has_one:
        level.add("moe_aux_loss_sequences", _value(levels, "micro_batch_size"), given.source)
    else:
        flag = "--moe-router-load-balancing-type"
        level.notes.append(Note(flag, ALREADY_SO, "the load-balancing loss is computed per sequence"))


def _expert_layers(level: Level, given: Given, levels: Sequence[Level]) -> None:
    """Parse Megatron-LM's list of layers: dense layers, then every n-th has experts."""
    layers, pattern = _value(levels, "num_layers"), layer_list(str(given.value), given.source)
    if len(pattern) != layers or (found := expert_layers(pattern)) is None:
        raise ConfigError(
            f"{given.source} {given.value} must have 0 or 1 for each of num_layers {layers}, 1 for every n-th of them after dense "
            f"ones, such as ([0]*1+[1]*{layers - 1})"
        )
    for name, value in zip(DERIVED["--moe-layer-freq"][1], found, strict=True):
        level.add(name, value, given.source)


def _rope_type(level: Level, given: Given, levels: Sequence[Level]) -> None:
    """In Megatron-LM it selects YaRN for multi-latent attention only."""
    latent = _value(levels, "multi_latent_attention")
    if given.value not in ("rope", "yarn") or (given.value == "yarn" and not latent):
        raise ConfigError(f"{given.source} cannot be {given.value} here; use rope, or --rope-scaling yarn")
    level.notes.append(
        Note("--rope-type", ALREADY_SO, "--rope-scaling and --rotary-scaling-factor set the scaling of RoPE")
    )


def _llama3_scaling(level: Level, given: Given, levels: Sequence[Level]) -> None:
    """Megatron-LM's multi-latent attention has a separate RoPE, which ignores it."""
    if _value(levels, "multi_latent_attention"):
        level.notes.append(Note("--use-rope-scaling", NO_EFFECT_HERE, "multi-latent attention is only scaled by YaRN"))
    else:
        level.add("rope_scaling", "llama3", given.source)


def _yarn_scaling(level: Level, given: Given, levels: Sequence[Level]) -> None:
    """Megatron-LM only reads it in multi-latent attention with rope type yarn, the default."""
    found, kind = stretched(str(given.value), given.source), level.derived.get("--rope-type")
    if found and not (_value(levels, "multi_latent_attention") and (kind is None or kind.value == "yarn")):
        why = "it applies to multi-latent attention with rope type yarn; else use --rope-scaling yarn"
        level.notes.append(Note("--rotary-scaling-factor", NO_EFFECT_HERE, why))
        return
    for name, value in found.items():
        level.add(name, value, given.source)


def _sharded_states(level: Level, given: Given, _: Sequence[Level]) -> None:
    """Megatron-LM requires it beside FSDP, which already shards the states."""
    strategy = level.given.get("dp_strategy")
    if strategy is not None and strategy.value == "fully-sharded" and strategy.source != "flag --dp-strategy":
        level.notes.append(Note("--use-distributed-optimizer", ALREADY_SO, "fully-sharded shards the states too"))
    else:
        level.add("dp_strategy", "distributed-optimizer", given.source)


def _eval_batch(level: Level, given: Given, levels: Sequence[Level]) -> None:
    schedule, size = _value(levels, "step_batch_size_schedule"), _value(levels, "global_batch_size")
    if schedule is not None:
        size = parse_batch_schedule(schedule)[-1][1]
    if given.value != size:
        raise ConfigError(
            f"{given.source} {given.value} is refused: evaluations use batches of global_batch_size {size}; leave it out, and "
            "scale --eval-iters"
        )
    level.notes.append(Note("--eval-global-batch-size", ALREADY_SO, "evaluations use batches of global_batch_size"))


_RESOLVED: Mapping[str, Callable[[Level, Given, Sequence[Level]], None]] = {
    "--no-position-embedding": _no_position_embedding,
    "--moe-layer-freq": _expert_layers,
    "--moe-router-load-balancing-type": _load_balancing,
    "--use-distributed-optimizer": _sharded_states,
    "--eval-global-batch-size": _eval_batch,
    "--rope-type": _rope_type,
    "--use-rope-scaling": _llama3_scaling,
    "--rotary-scaling-factor": _yarn_scaling,
}
_ACCOUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""Embedding and loss replace one layer of the first and of the last stage."""


def _accounted_layers(level: Level, sizes: tuple[int, int, int]) -> list[int]:
    layers, pp, vpp = sizes
    stages, ends = pp * vpp, [int(flag in level.derived) for flag in _ACCOUNTED]
    each, rest = divmod(layers + sum(ends), stages)
    source = " and ".join(level.derived[flag].source for flag in _ACCOUNTED if flag in level.derived)
    if rest or stages < 2:
        raise ConfigError(
            f"{source}: num_layers {layers} and {sum(ends)} more do not divide among pp·vpp = {pp}·{vpp} stages; leave it out: "
            "the default split accounts for embedding and head"
        )
    return [each - ends[0] * (stage == 0) - ends[1] * (stage == stages - 1) for stage in range(stages)]


def _chunks_of_layout_and_schedule(levels: Sequence[Level], problems: Problems) -> None:
    """Derive vpp, if it is not set, from the stages of a layout, as Megatron-LM does, or 2 for a V schedule."""
    if problems.wrong & {"pp", "vpp", "pipeline_layout", "pipeline_schedule"}:
        raise Reported
    top, pp = _topmost(levels), _value(levels, "pp")
    layout, schedule = top.get("pipeline_layout"), top.get("pipeline_schedule")
    if "vpp" in top or pp < 2:
        return
    if layout and layout.value is not None:
        stages = len(parse_pipeline_layout(layout.value))
        source, vpp = layout, stages // pp if stages % pp == 0 else 1
    elif schedule and schedule.value and PIPELINE_SCHEDULES.facts(schedule.value).chunks == "vee":
        source, vpp = schedule, 2
    else:
        return
    if vpp > 1:
        level = next(level for level in levels if any(source is each for each in level.given.values()))
        level.add("vpp", vpp, source.source)


def _value(levels: Sequence[Level], name: str) -> Any:
    top = _topmost(levels)
    return top[name].value if name in top else settings()[name].default


def _sizes(levels: Sequence[Level], problems: Problems) -> tuple[int, int, int]:
    """Return (num_layers, pp, vpp). Raises Reported: one of them is wrong, which the rules report."""
    names = ("num_layers", "pp", "vpp")
    layers, pp, vpp = (_value(levels, name) for name in names)
    if problems.wrong & set(names) or min(layers, pp, vpp) < 1:
        raise Reported
    return layers, pp, vpp


def _chunks(per_chunk: Given, sizes: tuple[int, int, int]) -> int:
    """Return vpp = num_layers / pp / (layers of one virtual stage)."""
    layers, pp, _ = sizes
    source = f"{per_chunk.source} {per_chunk.value}"
    if pp == 1:
        raise ConfigError(f"{source} needs pp > 1, but pp is 1; add --pp 2 or remove it")
    if layers % pp or per_chunk.value < 1 or (layers // pp) % per_chunk.value:
        works = [str(size) for size in range(1, layers // pp + 1) if layers % (pp * size) == 0]
        remedy = f"use one of {', '.join(works)}" if works else "use --vpp, with --pipeline-layers"
        raise ConfigError(f"{source} does not divide num_layers / pp = {layers} / {pp}; {remedy}")
    return layers // pp // per_chunk.value


def _uneven_layers(first: Given | None, last: Given | None, sizes: tuple[int, int, int]) -> list[int]:
    """Return the layers of each virtual stage if first and last rank have given numbers and the others share the
    rest."""
    layers, pp, vpp = sizes
    source = " and ".join(f"{given.source} {given.value}" for given in (first, last) if given)
    ends = {rank: given.value for rank, given in ((0, first), (pp - 1, last)) if given}
    if pp == 1:
        raise ConfigError(f"{source} needs pp > 1, but pp is {pp}; add --pp 2 or remove it")
    rest, others = layers - sum(ends.values()), pp - len(ends)
    share = rest // others if others else 0
    per_rank = [ends.get(rank, share) for rank in range(pp)]
    if sum(per_rank) != layers or any(count < vpp or count % vpp for count in per_rank):
        raise ConfigError(
            f"{source} leaves {rest} of {layers} layers for {others} other pipeline ranks with {vpp} virtual stage(s) "
            f"each, which does not divide evenly; set the layers of all {pp * vpp} stages with --pipeline-layers"
        )
    return [per_rank[stage % pp] // vpp for stage in range(pp * vpp)]
