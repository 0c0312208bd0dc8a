"""What an optimizer gets and offers: flat parameters and the tensors in them, the terms of an update, states by name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megalite.config.errors import ConfigError
from megalite.config.optimizer import EMA, HOST_PIECE, OptimizerConfig, state_formats
from megalite.config.run import RunConfig
from megalite.kernels.registry import Kernels
from megalite.topology.host_memory import HostMemory, pinned
from megalite.topology.layout import ShardSpec
from megalite.topology.topology import Topology


@dataclass(frozen=True)
class Segment:
    """The part of a flat parameter that belongs to one tensor of the model.

    A flat parameter may hold only some of the elements of this rank's slice of the tensor; `offset` is the first of them.
    """

    name: str  # of the tensor; the same on every rank that holds a part of it
    start: int  # place in the flat parameter, with `stop`
    stop: int
    offset: int  # first element in the flattened local slice
    global_shape: tuple[int, ...]
    slice: tuple[tuple[int, int], ...]  # per dimension [start, stop) of the local slice in the tensor
    counts: bool
    """In a sum over the world's ranks these elements are counted here; where others hold the same ones, on one alone."""


@dataclass(frozen=True, eq=False)
class FlatParameter:
    """One tensor for the optimizer: the main parameters of a bucket, or of the range of it that this rank updates."""

    param: torch.nn.Parameter
    """Flat; `.grad` is set before a step."""
    decay: bool  # weight decay applies
    segments: tuple[Segment, ...]  # in the order of their places; padding is in none
    orthogonal: bool = False  # it holds nothing but hidden matrices, which Muon orthogonalises
    decoupled_lr: bool = False
    """It holds nothing but word embedding and head, which have their own learning rate."""
    lr_multiplier: float = 1.0  # the learning rate of all it holds is multiplied with it
    host: HostMemory | None = None  # where its states are, if not on the device
    host_main: torch.Tensor | None = None
    """Its values there; None: those of `param`."""

    @property
    def grad(self) -> torch.Tensor:
        assert self.param.grad is not None
        return self.param.grad

    @property
    def values(self) -> torch.Tensor:
        """Of the parameters, wherever they are."""
        return self.param.data if self.host_main is None else self.host_main


Part = tuple[FlatParameter, int, int]  # elements [start, stop) of a flat parameter


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a flat parameter on the device, to be updated there."""

    flat: FlatParameter
    start: int
    stop: int
    param: torch.Tensor
    states: list[torch.Tensor]  # in their order
    copy: torch.Tensor | None  # its part of `Update.copies`

    @property
    def grad(self) -> torch.Tensor:
        return self.flat.grad[self.start : self.stop]


Rows = Mapping[str, Sequence[tuple[int, int, float]]]


@dataclass(frozen=True, kw_only=True)
class Update:
    """The terms of an update, in addition to the gradients."""

    step: int  # the current step, counted from 1
    lr: float
    weight_decay: float
    decoupled_lr: float | None = None  # that of flat parameters with `decoupled_lr`
    factor: float = 1.0  # gradients must still be multiplied with it: it undoes the loss scale and clips
    clipped_rows: Rows = field(default_factory=dict)
    """By tensor: first row, one past the last, and what they are multiplied with after the step (QK-clip)."""
    copies: Mapping[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Where new parameters are put as well, rounded: for optimizers with `writes_copies`."""

    def rate(self, flat: FlatParameter) -> float:
        """The learning rate of a flat parameter."""
        rate = self.lr if self.decoupled_lr is None or not flat.decoupled_lr else self.decoupled_lr
        return rate * flat.lr_multiplier

    def kept_of(self, flat: FlatParameter) -> float:
        """The share of a flat parameter that decay leaves."""
        return 1.0 - self.rate(flat) * self.weight_decay

    @property
    def kept(self) -> float:
        """`kept_of` where all have one rate."""
        return 1.0 - self.lr * self.weight_decay


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an optimizer may use of a run, in addition to its settings."""

    topology: Topology
    kernels: Kernels
    replicas_agree: bool  # data-parallel ranks have the same weights after each update


class MatrixState(NamedTuple):
    """A state of one matrix, which the rank that works on it alone has."""

    name: str
    spec: ShardSpec  # under the tensor's name and in all of them: [matrices, n, n]
    values: torch.Tensor  # of that shape, and live: loading writes into it


Exchange = Callable[[FlatParameter, torch.Tensor], None]
"""In place: a flat tensor like the parameter becomes its mean over the data-parallel ranks, as well as the wire allows."""


class Optimizer(ABC):
    """Steps flat parameters from their `.grad`. States are made at once, so that memory is known at the start and a
    checkpoint has a place to go: those that the optimizer is registered with, and they start from 0; and the average of
    `ema_decay`, which starts from the parameters.

    A flat parameter is a part of many tensors, which differs from layout to layout: what is not element by element goes
    by `segments`, or numbers depend on the layout.

    `states`: other names, where it works for another optimizer."""

    applies_factor: bool = False
    """`step` multiplies gradients with `update.factor` itself, in the pass that it makes anyway."""
    writes_copies: bool = False  # `step` fills `update.copies`, in the same pass
    from_zeros: frozenset[str] = frozenset()
    """State tensors that a checkpoint of another optimizer need not have: they start from 0."""
    from_parameters: frozenset[str] = frozenset((EMA,))  # likewise; they start from the parameters

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, states: Sequence[str] | None = None
    ) -> None:
        self.parameters, self.config = parameters, config
        self.notes: list[str] = []
        """Lines for the log, the same on every rank; the training loop takes them out after each step."""
        self.updates = 0
        """Updates made so far; bias correction depends on it. With fp16 it is less than the number of steps."""
        self._states: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self._averages: dict[torch.nn.Parameter, torch.Tensor] = {}
        for flat in parameters:
            formats = state_formats(config, hidden_matrix=flat.orthogonal)
            formats = formats if states is None else dict.fromkeys(states, "main")
            self._states[flat.param] = {
                name: _zeros(flat, state_dtype(flat, kind)) for name, kind in formats.items() if name != EMA
            }
            if config.ema_decay is not None:
                self._averages[flat.param] = _zeros(flat, flat.param.dtype).copy_(flat.values)
            if flat.host is not None:
                kept = [*self.state(flat.param).values(), *([] if flat.host_main is None else [flat.host_main])]
                flat.host.reserve(min(HOST_PIECE, flat.param.numel()) * sum(each.element_size() for each in kept))

    @classmethod
    def from_config(cls, parameters: Sequence[FlatParameter], config: RunConfig, context: Context) -> "Optimizer":
        """The optimizer of a run."""
        return cls(parameters, config.optimizer)

    @abstractmethod
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters. Unless it `applies_factor`, gradients have been multiplied with that already.
        `exchange`: passed where `reduces_gradients(update.step)` is False: gradients are this rank's own.

        Collectives: those of `exchange`, and small sums over the world where whole tensors' norms are needed."""

    def pieces(
        self, parts: Iterable[Part], update: Update | None = None, *, states: bool = True, values: bool = True
    ) -> Iterator[Piece]:
        """Each part in turn, on the device; what is written into param and states until the next one stays.

        Parts of what is in host memory have at most `HOST_PIECE` elements. While one is worked on the next comes in and
        the one before goes out.

        `update`: an update goes over these parts for the last time: those in host memory are finished before they
        leave. `states`, `values`: which of them are needed."""
        parts = list(parts)
        host = next((flat.host for flat, _, _ in parts if flat.host is not None), None)
        averages = self._averages if update is not None else {}
        kept = [[*self._states[flat.param].values()] if states else [] for flat, _, _ in parts]
        visitors: list[list[torch.Tensor]] = []
        for (flat, start, stop), each in zip(parts, kept, strict=True):
            more = [averages[flat.param]] if flat.param in averages else []
            more += [flat.host_main] if values and flat.host_main is not None else []
            visitors.append([] if flat.host is None else [tensor[start:stop] for tensor in (*each, *more)])
        here = [[] for _ in parts] if host is None else host.stream(visitors)
        for (flat, start, stop), each, visiting in zip(parts, kept, here, strict=True):
            param = flat.param.data[start:stop]
            if flat.host is None:
                visiting = [tensor[start:stop] for tensor in each]
            elif values and flat.host_main is not None:
                *visiting, param = visiting
            copy = None if update is None else update.copies.get(flat.param)
            copy = None if copy is None else copy[start:stop]
            yield Piece(flat, start, stop, param, visiting[: len(each)], copy)
            if flat.host is not None and update is not None:
                # As `clip_rows`, the strategy's rounding and `average` do to the others, in their order.
                clipped = _clip(flat, update.clipped_rows, param, start)
                if copy is not None and (clipped or not self.writes_copies):
                    copy.copy_(param)
                for average in visiting[len(each) :]:
                    self._average(average, param)

    def reduces_gradients(self, step: int) -> bool:
        """The step needs gradients summed over ranks; else the optimizer averages its own states."""
        return True

    def alone(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> "Optimizer | None":
        """One of the same kind over other `parameters` that no other rank shares, which reduces gradients up to
        step `freeze_step` and not after it: to measure what steps cost. None: this one always reduces gradients."""
        return None

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The flat state tensors of one parameter, of its shape, by name; writing into them changes the state.
        What is in host memory may be read inside the strategy's `main_in_memory`."""
        average = {EMA: self._averages[parameter]} if self._averages else {}
        return self._states[parameter] | average

    @torch.no_grad()
    def average(self) -> None:
        """A step has been taken: move the averages of `ema_decay` towards the parameters, ema ← d·ema + (1-d)·x. Those in
        host memory have been, by `pieces`."""
        for flat in self.parameters:
            if flat.host is None and flat.param in self._averages:
                self._average(self._averages[flat.param], flat.param.data)

    def _average(self, average: torch.Tensor, values: torch.Tensor) -> None:
        assert self.config.ema_decay is not None
        average.lerp_(values, 1.0 - self.config.ema_decay)

    @torch.no_grad()
    def clip_rows(self, rows: Rows) -> None:
        """Multiply rows of tensors, as `Update.clipped_rows` says them; those in host memory have been, by `pieces`."""
        for flat in self.parameters:
            if flat.host is None:
                _clip(flat, rows, flat.param.data, 0)

    def evaluated(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What is evaluated in place of the parameter, where that is another tensor."""
        return self._averages[parameter] if self.config.eval_ema else None

    def tensor_state(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """(state, tensor name) -> what there is once per tensor of the model, such as a trust ratio. All ranks that hold
        a part of the tensor have the same; writing into it changes the state."""
        return {}

    def matrix_states(self) -> list[MatrixState]:
        """What there is of matrices that this rank works on, beside `state`."""
        return []

    def counters(self) -> dict[str, Any]:
        """Further numbers that a checkpoint keeps: the same on every rank, and plain JSON."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved `counters`; those of another optimizer (or none) are ignored."""


def whole_parts(parameters: Iterable[FlatParameter]) -> Iterator[Part]:
    """All of these, whole, but in pieces where they come from host memory."""
    for flat in parameters:
        yield from cut_part(flat, 0, flat.param.numel())


def cut_part(flat: FlatParameter, start: int, stop: int) -> Iterator[Part]:
    """One part, in pieces where it comes from host memory."""
    step = max(stop - start, 1) if flat.host is None else HOST_PIECE
    yield from ((flat, first, min(first + step, stop)) for first in range(start, stop, step))


def _clip(flat: FlatParameter, rows: Rows, values: torch.Tensor, first: int) -> bool:
    """Multiply rows among the `values` of a flat parameter from element `first` on; whether there were any."""
    found, last = False, first + values.numel()
    for part in flat.segments:
        (top, bottom), *rest = part.slice
        width, shift = math.prod(stop - start for start, stop in rest), part.start - part.offset
        for row, end, factor in rows.get(part.name, ()):
            start = max((max(row, top) - top) * width + shift, part.start, first)
            stop = min((min(end, bottom) - top) * width + shift, part.stop, last)
            if start < stop:
                values[start - first : stop - first].mul_(factor)
                found = True
    return found


def _zeros(flat: FlatParameter, dtype: torch.dtype) -> torch.Tensor:
    if flat.host is not None:
        return pinned(flat.param.numel(), dtype, flat.param.device).zero_()
    return torch.zeros_like(flat.param.data, dtype=dtype)


def state_dtype(flat: FlatParameter, kind: str) -> torch.dtype:
    """Of a state that is stated as `main` or `bf16`."""
    return torch.bfloat16 if kind == "bf16" else flat.param.dtype


def check_states(name: str, optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer keeps what it was registered with: dry run and planner count that."""
    for flat in optimizer.parameters:
        formats = state_formats(optimizer.config, hidden_matrix=flat.orthogonal)
        stated = {state: state_dtype(flat, kind) for state, kind in formats.items()}
        kept = {state: values.dtype for state, values in optimizer.state(flat.param).items()}
        if kept != stated:
            here, there = (
                ", ".join(f"{key} ({of})" for key, of in found.items()) or "none" for found in (kept, stated)
            )
            raise ConfigError(
                f"optimizer {name} keeps the states {here}, but is registered with {there}, by which memory is "
                "planned; correct `states` where it is registered"
            )
