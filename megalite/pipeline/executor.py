"""Execute one pipeline rank's actions of a lowered program, in order, for any schedule."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd import Variable

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.draw import render_grid
from megalite.pipeline.ir.schedule import COMPUTE, Action, Kind, LiveUnits, Program, live_units
from megalite.pipeline.messages import MessageFormat, P2PCommunicator
from megalite.topology.group import Group, Work
from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat

Key = tuple[int, int]  # (stage, microbatch)
_RECEIVE_OF = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


@dataclass
class StepState:
    """Live tensors of a step, by (stage, microbatch)."""

    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Stage inputs, received or passed on within the rank; kept until the backward has computed their gradient."""
    kept_inputs: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    """Stage inputs of forwards that will run again (R) and keep nothing else; None on the first stage."""
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Roots of the live autograd graphs; their storage may already be freed."""
    leaving: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Outputs without a graph that have not been sent yet."""
    output_grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    input_grads: dict[Key, torch.Tensor] = field(default_factory=dict)
    receiving: dict[Action, tuple[Work, torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)


def free_output(output: torch.Tensor) -> None:
    """Free the storage of a graph's root. Its backward still works: the engine does not read the root's data."""
    assert output._base is None, "a stage's output must not be a view: its memory is freed while its graph lives on"
    output.data = output.data.new_empty(1)


ForwardStep = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""(stage, microbatch, input or None on the first stage) -> output, or the microbatch's scalar loss on the last
stage."""


class GradientReducer(Protocol):
    """Callbacks of the executor into data parallelism. Stages are numbered globally."""

    def enable_grad_sync(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        """Allow buckets of this stage to be reduced as they fill, right before the stage's last action of the step.

        That action is a full backward. With `pending` it is a W, which produces one gradient for each entry of
        `pending`; all other gradients of the stage are final."""

    def collect_grads(self, stage: int) -> None:
        """Collect the gradients after a backward of this stage."""

    def start_grad_sync(self, stage: int) -> None:
        """Start all reductions of the stage that have not started; its gradients are final."""

    def set_prefetch(self, stage: int | None, *, backward: bool) -> None:
        """Prepare the weights of this stage for the computation after the coming one, a forward or a backward. None:
        the coming computation is the last of the step that reads weights."""


class WeightGradients(Protocol):
    """Weight gradients of one stage that its I defers to its W."""

    @property
    def pending(self) -> int:
        """Number of microbatches that have run their I but not their W."""

    def deferring(self, microbatch: int) -> AbstractContextManager[None]:
        """Make a backward in this context compute only the input gradient."""

    def parameters(self, microbatch: int) -> Sequence[torch.nn.Parameter]:
        """Return the parameters that get a gradient from `run`."""

    def run(self, microbatch: int) -> None: ...

    def clear(self) -> None:
        """Drop what an earlier, failed step has left."""


class Tracer(Protocol):
    """Records the start and end of each computation. The wait for its inputs comes before the start."""

    def start(self, action: Action) -> None: ...

    def end(self, action: Action) -> None: ...


class Executor:
    """Runs one rank's part of a program.

    Args:
        program: A lowered and validated program, the same on every rank; each rank runs its own row.
        edges: The process group of each directed neighbour pair.
        forward: Computes one stage on one microbatch. It is called twice if the program has an R, first without
            gradients.
        messages: Format of the tensors sent between stages.
        reducer: None in forward-only programs.
        deferred: For each stage of this rank with a split backward.
        check_memory: Compare the live tensors with the program's replay after each action; AssertionError if they differ.
    """

    def __init__(
        self,
        program: Program,
        *,
        rank: int,
        edges: dict[tuple[int, int], Group],
        forward: ForwardStep,
        messages: MessageFormat,
        reducer: GradientReducer | None,
        deferred: Mapping[int, WeightGradients] | None = None,
        tracer: Tracer | None = None,
        heartbeat: Heartbeat = UNWATCHED,
        check_memory: bool = False,
    ) -> None:
        schedule, row = program.schedule, program.actions[rank]
        self._schedule, self._row, self._rank = schedule, row, rank
        self._forward, self._messages = forward, messages
        self._reducer, self._tracer, self._heartbeat = reducer, tracer, heartbeat
        self._deferred = _deferred_for(program, rank, deferred or {})
        self._texts = [str(action).encode() for action in row]
        self._placement, self._last_stage = schedule.placement, schedule.num_stages - 1
        self._forward_only = schedule.forward_only
        self._p2p = P2PCommunicator(edges, rank=rank, send_window=program.send_window)
        self._completes = {action.stage: action for action in row if action.kind in (Kind.B, Kind.W)}
        """Per stage, the action after which its gradients are final."""
        self._receives = {one: one._replace(kind=_RECEIVE_OF[one.kind]) for one in row if one.kind in _RECEIVE_OF}
        """The receive that each computation waits for, if its input comes from another rank."""
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
        """Run one step. Return the microbatches' detached losses on the rank of the last stage, else an empty list."""
        step = StepState()
        for deferred in self._deferred.values():
            deferred.clear()
        for position, action in enumerate(self._row):
            self._heartbeat.begin_action(self._texts[position], position)
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
        self._p2p.drain()
        return step.losses

    def _compute(self, action: Action, step: StepState) -> None:
        receive = self._receives.get(action)
        if receive in step.receiving:
            work, message = step.receiving.pop(receive)
            work.wait()
            received = step.inputs if action.kind is Kind.F else step.output_grads
            received[action.stage, action.microbatch] = self._messages.unpack(message)
        if self._reducer is not None and action in self._following:
            following = self._following[action]
            backward = following is not None and following.kind not in (Kind.F, Kind.R)
            self._reducer.set_prefetch(following and following.stage, backward=backward)
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
                free_output(output)  # the next stage's input shares the memory and is freed by its own backward
        elif not has_graph:
            step.leaving[key] = output

    def _run_forward_again(self, action: Action, step: StepState) -> None:
        key = action.stage, action.microbatch
        step.outputs[key] = output = self._forward_on(key, step.kept_inputs[key], True)
        if action.stage < self._last_stage:  # the output of the first run was sent
            free_output(output)

    def _forward_on(self, key: Key, x: torch.Tensor | None, has_graph: bool) -> torch.Tensor:
        if x is not None and has_graph:
            x.requires_grad_()
        with torch.set_grad_enabled(has_graph):
            return self._forward(*key, x)

    def _run_backward(self, action: Action, step: StepState) -> None:
        """Run a B or an I."""
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
        x = step.kept_inputs.pop(key) if key in step.kept_inputs else step.inputs.pop(key, None)
        if x is None:  # on the first stage
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
            self._p2p.send(self._messages.pack(step.leaving.pop(key)), to=to)
            return
        output = step.outputs[key]
        self._p2p.send(self._messages.pack(output.detach()), to=to, sent=lambda: free_output(output))

    def _send_backward(self, action: Action, step: StepState) -> None:
        grad = step.input_grads.pop((action.stage, action.microbatch)).contiguous()
        self._p2p.send(self._messages.pack(grad), to=self._placement[action.stage - 1])

    def _receive(self, action: Action, step: StepState) -> None:
        neighbour = -1 if action.kind is Kind.RECV_F else 1
        message = self._messages.empty()
        work = self._p2p.receive(message, source=self._placement[action.stage + neighbour])
        step.receiving[action] = work, message

    def _reduce_grad(self, action: Action, step: StepState) -> None:
        if self._reducer is not None:
            self._reducer.start_grad_sync(action.stage)

    def _check_memory(self, expected: LiveUnits, action: Action, step: StepState) -> None:
        pending = sum(deferred.pending for deferred in self._deferred.values())
        found = LiveUnits(len(step.outputs), len(step.kept_inputs), pending)
        assert found == expected, f"after {action} rank {self._rank} holds {found}; the program predicts {expected}"


def _following(row: Sequence[Action]) -> dict[Action, Action | None]:
    """Map each computation that reads weights (all but W) to the next one that does."""
    readers = [action for action in row if action.kind in COMPUTE and action.kind is not Kind.W]
    return dict(itertools.zip_longest(readers, readers[1:]))


def _deferred_for(program: Program, rank: int, deferred: Mapping[int, WeightGradients]) -> dict[int, WeightGradients]:
    """Select the stages of a rank that have a split backward."""
    split = sorted({action.stage for action in program.actions[rank] if action.kind is Kind.I})
    if not deferred.keys() >= set(split):
        raise ConfigError(
            f"schedule {program.schedule.name} splits the backward of stages {split} on pipeline rank {rank}, but deferred "
            f"has {sorted(deferred) or 'none'}: pass weight gradients for them, or use a schedule without I, such as 1f1b"
        )
    return {stage: deferred[stage] for stage in split}


def _engine_backward(output: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Run `output.backward(grad)` without its shape check, which a freed output would fail."""
    if grad is None:
        grad = torch.ones_like(output)
    keep_graph = create_graph = False
    Variable._execution_engine.run_backward(
        (output,), (grad,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
    )
