"""`RunConfig`: all settings of a run in one frozen value, and functions of several of its sections."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from megalite.config.compute import ComputeConfig
from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import PIPELINE_SCHEDULES, DataParallelConfig, ParallelConfig, parse_pipeline_layout
from megalite.config.registry import import_modules
from megalite.config.training import CheckpointConfig, LoggingConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings, in sections. Field names are unique over sections, because the command line is flat."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a config that another process sent: its imports are registered here too."""
        vars(self).update(state)
        import_modules(self.training.imports)


def least_ranks(config: RunConfig) -> int:
    """Return the smallest world size, tp·pp·cp·dp; an open dp is the least that experts and dp_instances allow."""
    p, instances = config.parallel, max(config.parallel.dp_instances, 1)
    stage, grid = max(p.tp * p.cp, 1), max(p.expert_tp * p.ep, 1) if config.model.num_experts else 1
    least = grid // math.gcd(stage, grid)
    if instances > 1:  # each has two ranks or more, also among those with the same experts
        groups = (least * max(p.cp, 1), least * stage // grid)
        least *= next(
            n for n in range(1, 2 * instances + 1) if all(n * g % instances == 0 and n * g > instances for g in groups)
        )
    return max(stage * p.pp * (p.dp or least), 1)


def profile_folder(config: RunConfig) -> str | None:
    """Return the folder that `profile` writes to: run_dir, else tensorboard_dir."""
    return config.logging.run_dir or config.logging.tensorboard_dir


def writers(config: RunConfig) -> list[str]:
    """Return the additional writers: those in `metrics`, and wandb if a project is set."""
    named, project = config.logging.metrics, config.logging.wandb_project
    return named if project is None or "wandb" in named else [*named, "wandb"]


HUGGING_FACE = "hf:"
"""Prefix of a Hugging Face folder in `load`."""


def hugging_face_folder(load: str | None) -> Path | None:
    """Return the Hugging Face folder that `load` names; None if it is a checkpoint folder."""
    if load is None or not load.startswith(HUGGING_FACE):
        return None
    return Path(load.removeprefix(HUGGING_FACE)).expanduser()


def resumes(config: RunConfig) -> bool:
    """Return whether the run continues the one that wrote the checkpoint, with its step and sample counts."""
    c = config.checkpoint
    return c.load is not None and not c.finetune and hugging_face_folder(c.load) is None


def saves(config: RunConfig) -> bool:
    """Return whether the settings make the run write checkpoints, to `save` or below `run_dir`."""
    t, c = config.training, config.checkpoint
    ends = (c.save_interval, c.export_hf, t.exit_interval, t.exit_duration_in_mins, t.exit_file)
    return any(end is not None for end in ends)


def saves_at(config: RunConfig, step: int) -> bool:
    """Return whether a checkpoint is due after this step, apart from the end of the run."""
    c = config.checkpoint
    return any(every is not None and step % every == 0 for every in (c.save_interval, c.save_hf_interval))


def save_folder(config: RunConfig) -> str | None:
    """Return the checkpoint folder: `save`, or one below `run_dir`; None if nothing is saved."""
    save, run_dir = config.checkpoint.save, config.logging.run_dir
    if save is not None or run_dir is None or not saves(config):
        return save
    return str(PurePath(run_dir) / "checkpoints")


def scales_loss(config: RunConfig) -> bool:
    """Return whether gradients are in fp16, in the network or on the wire, and need a loss scale."""
    return "fp16" in (config.training.precision, config.data_parallel.wire_dtype)


def stage_layers(config: RunConfig) -> list[int] | None:
    """Return the user's layers of each stage; None if they are not set."""
    p = config.parallel
    return p.pipeline_layers if p.pipeline_layout is None else parse_pipeline_layout(p.pipeline_layout)


def attention_in_tiles(config: RunConfig) -> str | None:
    """Return the setting that requires attention in tiles that are merged; None: no tiles."""
    model, window, parallel = config.model, config.model.sliding_window, config.parallel
    if model.is_sparse:
        return None
    if model.attn_logit_softcapping is not None:
        return f"attn_logit_softcapping {model.attn_logit_softcapping:g}"
    if model.softmax_type != "vanilla":
        return f"softmax_type {model.softmax_type}"
    if (
        window is not None
        and window < config.training.seq_length
        and any(map(model.has_window, range(model.num_layers)))
    ):
        return f"sliding_window {window}"
    if config.data.packs_documents:
        return "sft" if config.data.sft else "packing best-fit"
    if config.data.reset_attention_mask:
        return "reset_attention_mask"
    if parallel.cp > parallel.cp_heads:
        return f"cp {parallel.cp} with cp_comm_type {parallel.cp_comm_type}"
    return None


P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class IdentityKey(Generic[T]):
    """A dict key that compares an object by identity; the object itself may be unhashable."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def cache_by_object(maxsize: int = 64) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Cache a function by the identity of its first argument, for the last `maxsize` objects, which nothing may change.
    All predictions about a config share the same parts."""

    def decorate(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @lru_cache(maxsize)
        def known(key: IdentityKey[S], *args: Hashable, **kwargs: Hashable) -> T:
            return function(key.value, *args, **kwargs)  # type: ignore[arg-type]

        return lambda first, *args, **kwargs: known(IdentityKey(first), *args, **kwargs)

    return decorate


def cache_by_reading(function: Callable[Concatenate[RunConfig, P], T]) -> Callable[Concatenate[RunConfig, P], T]:
    """Cache a function of a config: one result for all configs that agree in every setting that the function has read.

    Reads are recorded, not declared, so no list of settings can become outdated. The result may depend on nothing but
    the settings and the other arguments."""
    answers: dict[Hashable, dict[tuple[str, ...], dict[Hashable, T]]] = {}
    left = _MOST_ANSWERS

    @cache_by_object()
    def ask(config: RunConfig, *args: Any, **kwargs: Any) -> T:
        nonlocal left
        if not _can_be_shared(config):
            return function(config, *args, **kwargs)
        by_names = answers.setdefault((*args, *kwargs.items()), {})
        for names, known in by_names.items():
            if (key := _values(config, names)) in known:
                return known[key]
        was_read: dict[str, None] = {}
        sections = {name: _recording(part, f"{name}.", was_read) for name, part in vars(config).items()}
        try:
            answer = function(RunConfig(**sections), *args, **kwargs)
        finally:  # reads them from `config`, which may itself record for a caller
            names = tuple(was_read)
            key = _values(config, names)
        by_names.setdefault(names, {})[key] = answer
        if (left := left - 1) < 0:
            answers.clear()
            left = _MOST_ANSWERS
        return answer

    return ask


_MOST_ANSWERS = 4096  # of one function


def _can_be_shared(config: RunConfig) -> bool:
    """Return False if a result depends on more than settings: files may change, and a notebook may redefine a schedule
    under its name."""
    p = config.parallel
    known = p.pipeline_schedule is None or p.pipeline_schedule in PIPELINE_SCHEDULES.builtin
    return known and p.pipeline_schedule_file is None and p.pipeline_costs is None


def _values(config: RunConfig, names: tuple[str, ...]) -> tuple[Hashable, ...]:
    values = _getter(names)(config)
    try:
        hash(values)
    except TypeError:
        return tuple([tuple(value) if type(value) is list else value for value in values])
    return values


@cache
def _getter(names: tuple[str, ...]) -> Callable[[RunConfig], tuple[Any, ...]]:
    return attrgetter(*names, "model.num_layers", "model.num_layers")  # attrgetter of a single name returns no tuple


def _recording(part: Any, prefix: str, was_read: dict[str, None]) -> Any:
    """Return a copy of a section that records which of its settings are read. A copy made from it by `replace` does not
    record: making it has read all other settings."""
    kind, slot = _recording_type(next(each for each in type(part).__mro__ if "_record" not in vars(each)))
    copy: Any = object.__new__(kind)
    slot.__set__(copy, (part, prefix, was_read))
    return copy


class _Recorded:
    """Descriptor of a setting in a recording section: the first read is recorded and stores the value in the section,
    where later reads find it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, section: Any, kind: type) -> Any:
        part, prefix, was_read = section._record
        was_read[prefix + self.name] = None
        value = getattr(part, self.name)
        object.__setattr__(section, self.name, value)
        return value


@cache
def _recording_type(section: type) -> tuple[type, Any]:
    settings = {each.name: _Recorded(each.name) for each in fields(section)}

    def everything(self: Any) -> dict[str, Any]:
        return {name: getattr(self, name) for name in settings}

    names = {"__slots__": ("_record",), "__dict__": property(everything), **settings}
    kind = type(section.__name__, (section,), names)
    return kind, vars(kind)["_record"]
