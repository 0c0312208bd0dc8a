"""The executor: does what a lowered program says, action by action, and knows no schedule by name."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.autograd import Variable

from megalite.config.errors import ConfigError
from megalite.config.registry import imported
from megalite.pipeline.ir.actions import COMPUTE, Action, Kind
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.schedule import LiveUnits, Program, live_units
from megalite.topology.group import Group, Work
from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat

if TYPE_CHECKING:  # loaded when it is named
    from megalite.pipeline.compression import MessageCodec


class _Pending(NamedTuple):
    work: Work
    tensor: torch.Tensor
    sent: Callable[[], None] | None


class Channels:
    """Sends and receives of one pipeline rank. `edges`: (sender, receiver) in pipeline ranks -> the pair's group,
    sender first. `send_window`: sends that may be pending on one edge before the oldest is waited for."""

    def __init__(self, edges: dict[tuple[int, int], Group], *, rank: int, send_window: int) -> None:
        self._edges = edges
        self._rank = rank
        self._window = send_window
        self._pending: dict[int, deque[_Pending]] = {}

    def send(self, tensor: torch.Tensor, *, to: int, sent: Callable[[], None] | None = None) -> None:
        """Start a send to pipeline rank `to`; `sent` runs once it is complete. The tensor is kept until then."""
        pending = self._pending.setdefault(to, deque())
        while len(pending) >= self._window:
            self._finish(pending)
        work = self._edges[self._rank, to].send_async(tensor, to=1)
        pending.append(_Pending(work, tensor, sent))

    def receive(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Post a receive into `tensor`; wait on the result before reading it."""
        return self._edges[source, self._rank].receive_async(tensor, source=0)

    def drain(self) -> None:
        """Wait for every send."""
        for pending in self._pending.values():
            while pending:
                self._finish(pending)

    @staticmethod
    def _finish(pending: deque[_Pending]) -> None:
        oldest = pending.popleft()
        oldest.work.wait()
        if oldest.sent is not None:
            oldest.sent()


Key = tuple[int, int]  # (stage, microbatch)
_MESSAGE_OF = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
_FORWARDS = (Kind.F, Kind.R)


@dataclass
class StepState:
    """What is alive, by (stage, microbatch)."""

    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Received or handed over, until the backward has their gradient."""
    kept_inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    """The same where the forward keeps nothing else and runs again; None on the first stage, which has none."""
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Roots of the graphs that are alive; their own memory may be gone."""
    leaving: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Outputs without a graph that are to be sent."""
    output_grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    input_grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    receiving: dict[Action, tuple[Work, torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)

    def take_input(self, key: Key) -> torch.Tensor | None:
        """The stage's input for its backward, no longer held here; None on the first stage."""
        if key in self.kept_inputs:
            return self.kept_inputs.pop(key)
        return self.inputs.pop(key, None)


def free_output(output: torch.Tensor) -> None:
    """Give back the memory of a graph's root. The graph stays: the engine does not look at the root's data."""
    assert output._base is None, "a stage's output must not be a view: its memory is freed while its graph lives on"
    output.data = output.data.new_empty(1)


ForwardStep = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""(stage, microbatch, input or None on the first stage) -> output; on the last stage the microbatch's scalar loss."""


class GradientReducer(Protocol):
    """Calls of the executor into data parallelism; stages are global."""

    def enable_grad_sync(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        """The action that comes next is the last of this stage: buckets may be reduced as they fill.

        It is a whole backward; or with `pending` a W, which gives exactly the gradients of these parameters, one for
        each time that they are listed. All others are final.
        """

    def collect_grads(self, stage: int) -> None:
        """A backward of this stage is over."""

    def start_grad_sync(self, stage: int) -> None:
        """The stage's gradients are final: start reducing what has not been started."""

    def announce(self, stage: int | None, *, backward: bool) -> None:
        """The weights of this stage are used next but one: in the computation after the one that comes now, a forward or
        a backward. None: there is no further in this step."""


class WeightGradients(Protocol):
    """The weight gradients that a stage's I leaves to its W."""

    @property
    def pending(self) -> int:
        """Microbatches between their I and their W."""

    def deferring(self, microbatch: int) -> AbstractContextManager[None]:
        """A backward inside gives the input gradient alone."""

    def parameters(self, microbatch: int) -> Sequence[torch.nn.Parameter]:
        """The parameters that `run` will report."""

    def run(self, microbatch: int) -> None: ...

    def clear(self) -> None:
        """Drop what an earlier step, that failed, has left."""


class Tracer(Protocol):
    """Notified when computations run: after their inputs have come, so that waiting lies between them."""

    def start(self, action: Action) -> None: ...

    def end(self, action: Action) -> None: ...


class Executor:
    """Runs one rank's part of a program.

    Args:
        program: a lowered and validated program; every rank of the pipeline runs its own row of the same one.
        edges: the process group of each directed neighbour pair.
        forward: computes one stage on one microbatch; where the program has an R it is called twice, first without
            gradients.
        activation_shape: shape of the tensors that travel between stages.
        shared: ranks with the same tensors, each of which sends its part of them and gathers what comes (Narayanan et al.
            2021, section 4.1); None: each rank sends whole tensors.
        compression: as `pipeline_compression` says.
        reducer: None in forward-only programs.
        deferred: of each stage here with a split backward.
        check_memory: after each action compare what is held with the replay of the program, and raise AssertionError
            where they differ.
    """

    def __init__(
        self,
        program: Program,
        *,
        rank: int,
        edges: dict[tuple[int, int], Group],
        forward: ForwardStep,
        activation_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        shared: Group | None = None,
        compression: str = "none",
        reducer: GradientReducer | None,
        deferred: Mapping[int, WeightGradients] | None = None,
        tracer: Tracer | None = None,
        heartbeat: Heartbeat = UNWATCHED,
        check_memory: bool = False,
    ) -> None:
        schedule, row = program.schedule, program.actions[rank]
        self._schedule, self._row, self._rank = schedule, row, rank
        self._forward = forward
        self._shape, self._dtype, self._device = activation_shape, dtype, device
        self._reducer, self._tracer, self._heartbeat = reducer, tracer, heartbeat
        self._deferred = _deferred_for(program, rank, deferred or {})
        self._texts = [str(action).encode() for action in row]
        self._placement = schedule.placement
        self._last_stage = schedule.num_stages - 1
        self._forward_only = schedule.forward_only
        self._shared = shared or Group.solo("tp")
        self._codec: MessageCodec | None = None
        if compression != "none":
            make, count = imported("megalite.pipeline.compression:make_codec"), math.prod(activation_shape)
            self._codec = make(compression, count // self._shared.size, dtype, device)
        self._channels = Channels(edges, rank=rank, send_window=program.send_window)
        self._completes = {action.stage: action for action in row if action.kind in (Kind.B, Kind.W)}
        """Of each stage the action after which its gradients are final."""
        self._messages = {one: one._replace(kind=_MESSAGE_OF[one.kind]) for one in row if one.kind in _MESSAGE_OF}
        """What each computation may have to wait for."""
        self._following = _following(row)
        self._expected: list[LiveUnits] | None = None
        if check_memory:
            self._expected = [LiveUnits(0, 0, 0)] * len(row) if self._forward_only else live_units(row)
        self._do = {
            Kind.F: self._run_forward,
            Kind.R: self._run_forward_again,
            Kind.B: self._run_backward,
            Kind.I: self._run_backward,
            Kind.W: self._run_weight_gradients,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive,
            Kind.REDUCE_GRAD: self._reduce_grad,
        }

    def run(self) -> list[torch.Tensor]:
        """One step. Returns the microbatch losses if the last stage is here, else nothing; detached."""
        step = StepState()
        for deferred in self._deferred.values():
            deferred.clear()
        for position, action in enumerate(self._row):
            self._heartbeat.act(self._texts[position], position)
            try:
                if action.kind in COMPUTE:
                    self._compute(action, step)
                else:
                    self._do[action.kind](action, step)
                if self._expected is not None:
                    self._check_memory(self._expected[position], action, step)
            except Exception as error:
                error.add_note(f"in {action} on pipeline rank {self._rank} of:\n{render_grid(self._schedule)}")
                raise
        self._channels.drain()
        return step.losses

    def _compute(self, action: Action, step: StepState) -> None:
        message = self._messages.get(action)
        if message in step.receiving:
            work, part = step.receiving.pop(message)
            work.wait()
            held = step.inputs if action.kind is Kind.F else step.output_grads
            held[action.stage, action.microbatch] = self._gathered(part)
        if self._reducer is not None and action in self._following:
            following = self._following[action]
            self._reducer.announce(
                following and following.stage, backward=following is not None and following.kind not in _FORWARDS
            )
        if self._tracer is not None:
            self._tracer.start(action)
        self._do[action.kind](action, step)
        if self._tracer is not None:
            self._tracer.end(action)

    def _run_forward(self, action: Action, step: StepState) -> None:
        stage, microbatch = key = action.stage, action.microbatch
        again = key in self._schedule.recomputed
        has_graph = not (again or self._forward_only)
        x = step.inputs.get(key)
        output = self._forward_on(key, x, has_graph)
        if has_graph:
            step.outputs[key] = output
        else:
            step.inputs.pop(key, None)
            if again:
                step.kept_inputs[key] = x
        if stage == self._last_stage:
            step.losses.append(output.detach())
        elif self._placement[stage + 1] == self._rank:
            step.inputs[stage + 1, microbatch] = output.detach()
            if has_graph:
                free_output(output)  # the next stage's input has the memory, and frees it with its own backward
        elif not has_graph:
            step.leaving[key] = output

    def _run_forward_again(self, action: Action, step: StepState) -> None:
        key = action.stage, action.microbatch
        step.outputs[key] = output = self._forward_on(key, step.kept_inputs[key], True)
        if action.stage < self._last_stage:  # the first run's output is the one that was sent
            free_output(output)

    def _forward_on(self, key: Key, x: torch.Tensor | None, has_graph: bool) -> torch.Tensor:
        if x is not None and has_graph:
            x.requires_grad_()
        with torch.set_grad_enabled(has_graph):
            return self._forward(*key, x)

    def _run_backward(self, action: Action, step: StepState) -> None:
        """B, or its half I."""
        stage, microbatch = key = action.stage, action.microbatch
        output = step.outputs.pop(key)
        grad = step.output_grads.pop(key) if stage < self._last_stage else None
        if action.kind is Kind.I:
            with self._deferred[stage].deferring(microbatch):
                _engine_backward(output, grad)
        else:
            if self._reducer is not None and self._completes[stage] == action:
                self._reducer.enable_grad_sync(stage)
            _engine_backward(output, grad)
        if self._reducer is not None:
            self._reducer.collect_grads(stage)
        x = step.take_input(key)
        if x is None:
            return
        assert x.grad is not None, action
        if self._placement[stage - 1] == self._rank:
            step.output_grads[stage - 1, microbatch] = x.grad
        else:
            step.input_grads[key] = x.grad

    def _run_weight_gradients(self, action: Action, step: StepState) -> None:
        deferred = self._deferred[action.stage]
        if self._reducer is not None and self._completes[action.stage] == action:
            self._reducer.enable_grad_sync(action.stage, deferred.parameters(action.microbatch))
        deferred.run(action.microbatch)

    def _send_forward(self, action: Action, step: StepState) -> None:
        key, to = (action.stage, action.microbatch), self._placement[action.stage + 1]
        if key in step.leaving:
            self._channels.send(self._part(step.leaving.pop(key)), to=to)
            return
        output = step.outputs[key]
        self._channels.send(self._part(output.detach()), to=to, sent=lambda: free_output(output))

    def _send_backward(self, action: Action, step: StepState) -> None:
        grad = step.input_grads.pop((action.stage, action.microbatch)).contiguous()
        self._channels.send(self._part(grad), to=self._placement[action.stage - 1])

    def _receive(self, action: Action, step: StepState) -> None:
        neighbour = -1 if action.kind is Kind.RECV_F else 1
        count = self._shared.size
        if self._codec is not None:
            part = torch.empty(self._codec.nbytes, dtype=torch.uint8, device=self._device)
        else:
            part = self._empty(self._shape if count == 1 else (math.prod(self._shape) // count,))
        work = self._channels.receive(part, source=self._placement[action.stage + neighbour])
        step.receiving[action] = work, part

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank sends of a tensor: elements in a row, the same number on each, or the message for them."""
        part = tensor if self._shared.size == 1 else tensor.view(self._shared.size, -1)[self._shared.rank]
        return part if self._codec is None else self._codec.encode(part.view(-1))

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        if self._codec is not None:
            part = self._codec.decode(part)
        if self._shared.size == 1:
            return part.view(self._shape)
        whole = self._empty(self._shape)
        self._shared.all_gather(whole.view(-1), part)
        return whole

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _reduce_grad(self, action: Action, step: StepState) -> None:
        if self._reducer is not None:
            self._reducer.start_grad_sync(action.stage)

    def _check_memory(self, expected: LiveUnits, action: Action, step: StepState) -> None:
        pending = sum(deferred.pending for deferred in self._deferred.values())
        found = LiveUnits(len(step.outputs), len(step.kept_inputs), pending)
        assert found == expected, f"after {action} rank {self._rank} holds {found}; the program says {expected}"


def _following(row: Sequence[Action]) -> dict[Action, Action | None]:
    """After each computation that reads weights, the next that does; a W reads none."""
    readers = [action for action in row if action.kind in COMPUTE and action.kind is not Kind.W]
    return dict(itertools.zip_longest(readers, readers[1:]))


def _deferred_for(program: Program, rank: int, given: Mapping[int, WeightGradients]) -> dict[int, WeightGradients]:
    """Those of the stages on a rank that have a split backward."""
    split = sorted({action.stage for action in program.actions[rank] if action.kind is Kind.I})
    if not given.keys() >= set(split):
        raise ConfigError(
            f"schedule {program.schedule.name} splits the backward of stages {split} on pipeline rank {rank}, but deferred "
            f"has {sorted(given) or 'none'}: give weight gradients for them, or use a schedule without I, such as 1f1b"
        )
    return {stage: given[stage] for stage in split}


def _engine_backward(output: torch.Tensor, grad: torch.Tensor | None) -> None:
    """`output.backward(grad)` without the shape check that a freed output would fail."""
    if grad is None:
        grad = torch.ones_like(output)
    keep_graph = create_graph = False
    Variable._execution_engine.run_backward(
        (output,), (grad,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
    )
