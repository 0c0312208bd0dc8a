"""Define the base class of optimizers and their inputs: flat parameters, their segments, and the terms of an update.

SGD, the simplest optimizer, shows how they are used."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.sgd import sgd

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

    A flat parameter may contain only some elements of this rank's slice of the tensor; `offset` is the first of them.
    """

    name: str  # of the tensor; the same on every rank with a part of it
    start: int  # first element in the flat parameter
    stop: int
    offset: int  # first element in the flattened local slice
    global_shape: tuple[int, ...]
    slice: tuple[tuple[int, int], ...]  # per dimension [start, stop) of the local slice in the tensor
    counts: bool
    """Whether this rank adds these elements to sums over the world; of ranks with equal elements exactly one does."""


@dataclass(frozen=True, eq=False)
class FlatParameter:
    """One tensor for the optimizer: the main parameters of a bucket, or of the range of it that this rank updates."""

    param: torch.nn.Parameter
    """Flat; `.grad` is set before a step."""
    decay: bool  # weight decay applies
    segments: tuple[Segment, ...]  # ordered by start; padding is in none
    orthogonal: bool = False  # contains only hidden matrices, which Muon orthogonalises
    decoupled_lr: bool = False
    """Whether it contains only word embedding and head, which have a separate learning rate."""
    lr_multiplier: float = 1.0  # factor of the learning rate
    host: HostMemory | None = None  # host memory with its states, if they are offloaded
    host_main: torch.Tensor | None = None
    """Offloaded values; None: those of `param`."""

    @property
    def grad(self) -> torch.Tensor:
        assert self.param.grad is not None
        return self.param.grad

    @property
    def values(self) -> torch.Tensor:
        """Values of the parameters, on the device or in host memory."""
        return self.param.data if self.host_main is None else self.host_main


Part = tuple[FlatParameter, int, int]  # elements [start, stop) of a flat parameter


@dataclass(frozen=True, eq=False)
class FlatPart:
    """A part of a flat parameter, on the device for an update."""

    flat: FlatParameter
    start: int
    stop: int
    param: torch.Tensor
    states: list[torch.Tensor]  # in the order of the optimizer's state names
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
    decoupled_lr: float | None = None  # learning rate of flat parameters with `decoupled_lr`
    factor: float = 1.0  # still to be multiplied with gradients; undoes the loss scale and clips
    clipped_rows: Rows = field(default_factory=dict)
    """Tensor name -> (first row, one past the last, factor of these rows after the step), for QK-clip."""
    copies: Mapping[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Main parameter -> tensor for the new values, rounded: for optimizers with `writes_copies`."""

    def rate(self, flat: FlatParameter) -> float:
        """Return the learning rate of a flat parameter."""
        rate = self.lr if self.decoupled_lr is None or not flat.decoupled_lr else self.decoupled_lr
        return rate * flat.lr_multiplier

    def decay_factor_of(self, flat: FlatParameter) -> float:
        """Return the factor of weight decay on a flat parameter."""
        return 1.0 - self.rate(flat) * self.weight_decay

    @property
    def decay_factor(self) -> float:
        """The factor of weight decay if all parameters have one rate."""
        return 1.0 - self.lr * self.weight_decay


@dataclass(frozen=True, kw_only=True)
class Context:
    """Parts of a run that an optimizer may use, in addition to its settings."""

    topology: Topology
    kernels: Kernels
    replicas_agree: bool  # data-parallel ranks have the same weights after each update


class MatrixState(NamedTuple):
    """A state of one matrix, stored only on the rank that owns the matrix."""

    name: str
    spec: ShardSpec  # this matrix in a state [matrices, n, n] with the tensor's name
    values: torch.Tensor  # [1, n, n], live: loading writes into it


Exchange = Callable[[FlatParameter, torch.Tensor], None]
"""Replaces a flat tensor like the parameter, in place, by its (lossy) mean over the data-parallel ranks."""


class Optimizer(ABC):
    """Steps flat parameters by their `.grad`. The constructor creates all states, so that memory is known at the start and
    a checkpoint can be loaded. The registered states start from 0, the average of `ema_decay` from the parameters.

    A flat parameter contains parts of many tensors, which depend on the layout. Computations that are not element-wise
    must use `segments`; otherwise results depend on the layout.

    `states`: names of the states, if they are not the registered ones."""

    applies_factor: bool = False
    """Whether `step` multiplies gradients with `update.factor`, in a pass that it needs anyway."""
    writes_copies: bool = False  # `step` fills `update.copies`, in the same pass
    from_zeros: frozenset[str] = frozenset()
    """State tensors that start from 0 if a checkpoint of another optimizer lacks them."""
    from_parameters: frozenset[str] = frozenset((EMA,))  # likewise, starting from the parameters

    def __init__(
        self, parameters: Sequence[FlatParameter], config: OptimizerConfig, states: Sequence[str] | None = None
    ) -> None:
        self.parameters, self.config = parameters, config
        self.notes: list[str] = []
        """Lines for the log, the same on every rank; the training loop removes them after each step."""
        self.updates = 0
        """Number of updates so far, for bias correction. With fp16 it can be less than the number of steps."""
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
        """Return the optimizer of a run."""
        return cls(parameters, config.optimizer)

    @abstractmethod
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters. Without `applies_factor`, gradients have been multiplied with the factor already.
        `exchange`: passed if `reduces_gradients(update.step)` is False: gradients are then not reduced over ranks.

        Collectives: those of `exchange`, and small sums over the world if the norms of whole tensors are needed."""

    def pieces(
        self, parts: Iterable[Part], update: Update | None = None, *, states: bool = True, values: bool = True
    ) -> Iterator[FlatPart]:
        """Yield each part on the device; values written to param and states before the next iteration persist.

        Offloaded parts must have at most `HOST_PIECE` elements. While one is processed, the next one is copied in and the
        previous one out.

        `update`: passed in the last pass of an update: offloaded parts are clipped, rounded and averaged before they are
        copied out. `states`, `values`: whether states and parameters are needed."""
        parts = list(parts)
        host = next((flat.host for flat, _, _ in parts if flat.host is not None), None)
        averages = self._averages if update is not None else {}
        kept = [[*self._states[flat.param].values()] if states else [] for flat, _, _ in parts]
        offloaded: list[list[torch.Tensor]] = []
        for (flat, start, stop), each in zip(parts, kept, strict=True):
            more = [averages[flat.param]] if flat.param in averages else []
            more += [flat.host_main] if values and flat.host_main is not None else []
            offloaded.append([] if flat.host is None else [tensor[start:stop] for tensor in (*each, *more)])
        on_device = [[] for _ in parts] if host is None else host.stream(offloaded)
        for (flat, start, stop), each, tensors in zip(parts, kept, on_device, strict=True):
            param = flat.param.data[start:stop]
            if flat.host is None:
                tensors = [tensor[start:stop] for tensor in each]
            elif values and flat.host_main is not None:
                *tensors, param = tensors
            copy = None if update is None else update.copies.get(flat.param)
            copy = None if copy is None else copy[start:stop]
            yield FlatPart(flat, start, stop, param, tensors[: len(each)], copy)
            if flat.host is not None and update is not None:
                # The same operations, in the same order, as `clip_rows`, the strategy's rounding and `average`.
                clipped = _clip(flat, update.clipped_rows, param, start)
                if copy is not None and (clipped or not self.writes_copies):
                    copy.copy_(param)
                for average in tensors[len(each) :]:
                    self._average(average, param)

    def reduces_gradients(self, step: int) -> bool:
        """Return whether the step needs gradients summed over ranks; if not, the optimizer averages its states."""
        return True

    def for_measurement(self, parameters: Sequence[FlatParameter], *, freeze_step: int) -> "Optimizer | None":
        """Return an optimizer of the same kind over other `parameters`, without other ranks, that reduces gradients only
        up to step `freeze_step`, for measurements. None: this optimizer always reduces gradients."""
        return None

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the flat state tensors of one parameter by name, as live tensors. Offloaded states may be read inside
        the strategy's `main_in_memory`."""
        average = {EMA: self._averages[parameter]} if self._averages else {}
        return self._states[parameter] | average

    @torch.no_grad()
    def average(self) -> None:
        """Move the averages of `ema_decay` towards the parameters after a step, ema ← d·ema + (1-d)·x. `pieces` has done
        this for offloaded ones."""
        for flat in self.parameters:
            if flat.host is None and flat.param in self._averages:
                self._average(self._averages[flat.param], flat.param.data)

    def _average(self, average: torch.Tensor, values: torch.Tensor) -> None:
        assert self.config.ema_decay is not None
        average.lerp_(values, 1.0 - self.config.ema_decay)

    @torch.no_grad()
    def clip_rows(self, rows: Rows) -> None:
        """Multiply rows of tensors by the factors of `Update.clipped_rows`; `pieces` has done this for offloaded ones."""
        for flat in self.parameters:
            if flat.host is None:
                _clip(flat, rows, flat.param.data, 0)

    def evaluated(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the values to evaluate instead of the parameter; None: the parameter."""
        return self._averages[parameter] if self.config.eval_ema else None

    def tensor_state(self) -> Mapping[tuple[str, str], torch.Tensor]:
        """Return (state, tensor name) -> a live state of a whole tensor, such as a trust ratio, which is equal on all
        ranks with a part of the tensor."""
        return {}

    def matrix_states(self) -> list[MatrixState]:
        """Return the states of matrices that this rank owns, in addition to `state`."""
        return []

    def counters(self) -> dict[str, Any]:
        """Return further numbers for the checkpoint: plain JSON, the same on every rank."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Load saved `counters`; those of another optimizer (or none) are ignored."""


def whole_parts(parameters: Iterable[FlatParameter]) -> Iterator[Part]:
    """Yield all elements of `parameters`, in pieces if they are offloaded."""
    for flat in parameters:
        yield from cut_part(flat, 0, flat.param.numel())


def cut_part(flat: FlatParameter, start: int, stop: int) -> Iterator[Part]:
    """Yield one part, in pieces if it is offloaded."""
    step = max(stop - start, 1) if flat.host is None else HOST_PIECE
    yield from ((flat, first, min(first + step, stop)) for first in range(start, stop, step))


def _clip(flat: FlatParameter, rows: Rows, values: torch.Tensor, first: int) -> bool:
    """Multiply rows in `values`, which start at element `first` of the flat parameter; return whether it has any."""
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
    """Return the type of a state that is registered as `main` or `bf16`."""
    return torch.bfloat16 if kind == "bf16" else flat.param.dtype


def check_states(name: str, optimizer: Optimizer) -> None:
    """Raise ConfigError unless the optimizer has its registered states, with which dry run and planner compute memory."""
    for flat in optimizer.parameters:
        formats = state_formats(optimizer.config, hidden_matrix=flat.orthogonal)
        registered = {state: state_dtype(flat, kind) for state, kind in formats.items()}
        actual = {state: values.dtype for state, values in optimizer.state(flat.param).items()}
        if actual != registered:
            texts = (
                ", ".join(f"{key} ({dtype})" for key, dtype in found.items()) or "none"
                for found in (actual, registered)
            )
            raise ConfigError(
                "optimizer {} keeps the states {}, but is registered with {}, from which memory is planned; correct "
                "`states` in its registration".format(name, *texts)
            )


class SGD(Optimizer):
    """Steps by b = μb + g,  x = (1 - lr·λ)x - lr·b; Nesterov's form steps by g + μb instead of b.

    Weight decay is decoupled, as in AdamW here. torch's SGD adds λx to the
    gradient instead, which momentum accumulates to λ/(1-μ); decoupled, `--weight-decay` means the same with every
    optimizer. The buffer starts at 0, and there is no dampening, as in torch."""

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "SGD steps by reduced gradients"
        for piece in self.pieces(whole_parts(self.parameters), update):
            if piece.flat.decay and update.weight_decay != 0.0:
                piece.param.mul_(update.decay_factor_of(piece.flat))
            momentum: list[torch.Tensor | None] = [*piece.states]
            sgd(
                *([piece.param], [piece.grad], momentum),
                fused=True,
                lr=update.rate(piece.flat),
                momentum=self.config.sgd_momentum,
                nesterov=self.config.sgd_nesterov,
                weight_decay=0.0,
                dampening=0.0,
                maximize=False,
            )
        self.updates += 1
