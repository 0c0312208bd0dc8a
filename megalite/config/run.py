"""`RunConfig`: everything that decides a run, in one frozen value, and what follows from several of its sections."""

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
    """One section a topic. The same settings are flat on the command line: field names are unique over sections."""

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
        """In a process that gets the config from another: what it names is registered there too."""
        vars(self).update(state)
        import_modules(self.training.imports)


def least_ranks(config: RunConfig) -> int:
    """tp·pp·cp·dp; where dp is open, with the least that experts and dp_instances leave."""
    p, instances = config.parallel, max(config.parallel.dp_instances, 1)
    stage, grid = max(p.tp * p.cp, 1), max(p.expert_tp * p.ep, 1) if config.model.num_experts else 1
    least = grid // math.gcd(stage, grid)
    if instances > 1:  # each has two ranks or more, also of those with the same experts
        groups = (least * max(p.cp, 1), least * stage // grid)
        least *= next(
            n for n in range(1, 2 * instances + 1) if all(n * g % instances == 0 and n * g > instances for g in groups)
        )
    return max(stage * p.pp * (p.dp or least), 1)


def profile_folder(config: RunConfig) -> str | None:
    """Where `profile` writes its folder: to run_dir, else to tensorboard_dir."""
    return config.logging.run_dir or config.logging.tensorboard_dir


def writers(config: RunConfig) -> list[str]:
    """Further writers of metrics: those that `metrics` names, and wandb where there is a project to write to."""
    named, project = config.logging.metrics, config.logging.wandb_project
    return named if project is None or "wandb" in named else [*named, "wandb"]


HUGGING_FACE = "hf:"
"""Before a folder in `load`."""


def hugging_face_folder(load: str | None) -> Path | None:
    """The folder of another format that `load` names, if it does."""
    if load is None or not load.startswith(HUGGING_FACE):
        return None
    return Path(load.removeprefix(HUGGING_FACE)).expanduser()


def resumes(config: RunConfig) -> bool:
    """The run is the one that wrote what it loads: its step and its samples are counted on."""
    c = config.checkpoint
    return c.load is not None and not c.finetune and hugging_face_folder(c.load) is None


def saves(config: RunConfig) -> bool:
    """Something in the settings means that checkpoints are written: to `save`, or else below `run_dir`."""
    t, c = config.training, config.checkpoint
    ends = (c.save_interval, c.export_hf, t.exit_interval, t.exit_duration_in_mins, t.exit_file)
    return any(end is not None for end in ends)


def saves_at(config: RunConfig, step: int) -> bool:
    """A checkpoint is due after this step, wherever the run ends."""
    c = config.checkpoint
    return any(every is not None and step % every == 0 for every in (c.save_interval, c.save_hf_interval))


def save_folder(config: RunConfig) -> str | None:
    """Where checkpoints go: to `save`; not given, below `run_dir`; None if nothing is saved."""
    save, run_dir = config.checkpoint.save, config.logging.run_dir
    if save is not None or run_dir is None or not saves(config):
        return save
    return str(PurePath(run_dir) / "checkpoints")


def scales_loss(config: RunConfig) -> bool:
    """Gradients are somewhere in fp16, in the network or on the wire, and need a loss scale."""
    return "fp16" in (config.training.precision, config.data_parallel.wire_dtype)


def stage_layers(config: RunConfig) -> list[int] | None:
    """The cut that the user gave, if any: layers of each stage."""
    p = config.parallel
    return p.pipeline_layers if p.pipeline_layout is None else parse_pipeline_layout(p.pipeline_layout)


def attention_in_tiles(config: RunConfig) -> str | None:
    """The setting for which attention is computed in pieces that are merged, or None."""
    model, window, parallel = config.model, config.model.sliding_window, config.parallel
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


class Itself(Generic[T]):
    """A value as a key: the object, whatever is in it, which may be lists."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def once_per_object(maxsize: int = 64) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Remembers what a function says of its last first arguments: of these objects, which nothing changes. All that is
    predicted of a config asks for the same parts."""

    def decorate(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @lru_cache(maxsize)
        def known(key: Itself[S], *given: Hashable, **named: Hashable) -> T:
            return function(key.value, *given, **named)  # type: ignore[arg-type]

        return lambda first, *given, **named: known(Itself(first), *given, **named)

    return decorate


def once_per_reading(function: Callable[Concatenate[RunConfig, P], T]) -> Callable[Concatenate[RunConfig, P], T]:
    """A cache for functions of a config: one answer for all configs that agree in every setting which the function has read.

    What is read is recorded, not declared, so no list of settings can become outdated. The function may depend on nothing
    but the settings and its other arguments."""
    answers: dict[Hashable, dict[tuple[str, ...], dict[Hashable, T]]] = {}
    left = _MOST_ANSWERS

    @once_per_object()
    def ask(config: RunConfig, *given: Any, **named: Any) -> T:
        nonlocal left
        if not _can_be_shared(config):
            return function(config, *given, **named)
        by_names = answers.setdefault((*given, *named.items()), {})
        for names, known in by_names.items():
            if (key := _values(config, names)) in known:
                return known[key]
        was_read: dict[str, None] = {}
        sections = {name: _recording(part, f"{name}.", was_read) for name, part in vars(config).items()}
        try:
            answer = function(RunConfig(**sections), *given, **named)
        finally:  # it has read them for a function that gave its own config, too
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
    """False where an answer depends on more than settings: files may change, and a notebook may define a schedule again under
    its name."""
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
    return attrgetter(*names, "model.num_layers", "model.num_layers")  # of a single name it would be no tuple


def _recording(part: Any, prefix: str, was_read: dict[str, None]) -> Any:
    """A copy of a section that records which of its settings are read. What `replace` makes of it does not record: to make it,
    all others were read."""
    kind, slot = _recording_type(next(each for each in type(part).__mro__ if "_record" not in vars(each)))
    copy: Any = object.__new__(kind)
    slot.__set__(copy, (part, prefix, was_read))
    return copy


class _Recorded:
    """A setting of a recording section: its first reading is recorded, and leaves the value in the section itself, where
    further ones find it."""

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
    slot: Any = vars(kind)["_record"]
    return kind, slot
