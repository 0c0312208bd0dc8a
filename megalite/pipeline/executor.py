"""The executor: does what a lowered program says, action by action, and knows no schedule by name."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch.autograd import Variable

from megalite.config.errors import ConfigError
from megalite.pipeline.channels import Channels
from megalite.pipeline.ir.actions import COMPUTE, GRADIENTS, Action, Kind
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.schedule import LiveUnits, Program, live_units
from megalite.pipeline.step_state import Key, StepState, free_output, require_own_memory
from megalite.topology.group import Group
from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat

ForwardStep = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""(stage, microbatch, input or None on the first stage) -> output; on the last stage the microbatch's scalar loss."""


class GradientReducer(Protocol):
    """What the executor tells data parallelism. Stages are global."""

    def arm(self, stage: int, pending: Sequence[torch.nn.Parameter] | None = None) -> None:
        """The action that comes next is the last of this stage: buckets may be reduced as they fill.

        It is a whole backward; or with `pending` a W, which gives exactly the gradients of these parameters, one for
        each time that they are listed. All others are final.
        """

    def launch(self, stage: int) -> None:
        """The stage's gradients are final: start reducing what has not been started."""


class WeightGradients(Protocol):
    """The weight gradients that a stage's I leaves to its W."""

    @property
    def pending(self) -> int:
        """Microbatches between their I and their W."""

    def recording(self, microbatch: int) -> AbstractContextManager[None]:
        """A backward inside gives the input gradient alone."""

    def owed(self, microbatch: int) -> Sequence[torch.nn.Parameter]:
        """The parameters that `run` will report."""

    def run(self, microbatch: int) -> None:
        """Compute them."""

    def forget(self) -> None:
        """Drop what an earlier step, that failed, has left."""


class Tracer(Protocol):
    """Told when computations run: after their inputs have come, so that waiting lies between them."""

    def start(self, action: Action) -> None:
        """The action runs from here."""

    def end(self, action: Action) -> None:
        """It has ended."""


class Executor:
    """Runs one rank's part of a program.

    Args:
        program: a lowered and validated program; every rank of the pipeline runs its own row of the same one.
        rank: this pipeline rank.
        edges: the process group of each directed neighbour pair.
        forward: computes one stage on one microbatch; where the program has an R it is called twice, first without
            gradients.
        activation_shape: shape of the tensors that travel between stages.
        reducer: told when gradients become final; None in forward-only programs.
        tapes: of each stage here whose backward the program splits.
        heartbeat: told of every action.
        check_memory: after each action compare what is held with the replay of the program, and raise AssertionError
            where they differ.

    Raises:
        ConfigError: the program splits the backward of a stage that has no tape.
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
        reducer: GradientReducer | None,
        tapes: Mapping[int, WeightGradients] | None = None,
        tracer: Tracer | None = None,
        heartbeat: Heartbeat = UNWATCHED,
        check_memory: bool = False,
    ) -> None:
        schedule, row = program.schedule, program.actions[rank]
        self._schedule, self._row = schedule, row
        self._rank = rank
        self._forward = forward
        self._shape, self._dtype, self._device = activation_shape, dtype, device
        self._reducer = reducer
        self._tapes = _tapes_for(program, rank, tapes)
        self._tracer = tracer
        self._heartbeat = heartbeat
        self._texts = [str(action).encode() for action in row]
        self._placement = schedule.placement
        self._last_stage = schedule.num_stages - 1
        self._forward_only = schedule.forward_only
        self._channels = Channels(edges, rank=rank, send_window=program.send_window)
        self._completes = {action.stage: action for action in row if action.kind in (Kind.B, Kind.W)}
        """Of each stage the action after which its gradients are final."""
        self._expected: list[LiveUnits] | None = None
        if check_memory:
            nothing = [LiveUnits(0, 0, 0)] * len(row)
            self._expected = nothing if self._forward_only else live_units(row)
        self._do = {
            Kind.F: self._run_forward,
            Kind.R: self._run_forward_again,
            Kind.B: self._run_backward,
            Kind.I: self._run_backward,
            Kind.W: self._run_weight_gradients,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
            Kind.REDUCE_GRAD: self._reduce_grad,
        }

    def run(self) -> list[torch.Tensor]:
        """One step. Returns the microbatch losses if the last stage is here, else nothing; detached."""
        step = StepState()
        for tape in self._tapes.values():
            tape.forget()
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
                error.add_note(
                    f"in {action} on pipeline rank {self._rank} of:\n{render_grid(self._schedule)}"
                )
                raise
        self._channels.drain()
        return step.losses

    def _compute(self, action: Action, step: StepState) -> None:
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            step.finish_receive(Kind.RECV_F, key)
        elif action.kind in GRADIENTS:
            step.finish_receive(Kind.RECV_B, key)
        if self._tracer is not None:
            self._tracer.start(action)
        self._do[action.kind](action, step)
        if self._tracer is not None:
            self._tracer.end(action)

    def _run_forward(self, action: Action, step: StepState) -> None:
        stage, microbatch = key = action.stage, action.microbatch
        again = key in self._schedule.recomputed
        has_graph = not (again or self._forward_only)
        output = self._forward_on(key, step.inputs.get(key), has_graph)
        if not has_graph:
            x = step.inputs.pop(key, None)
            if again:
                step.kept_inputs[key] = x
        if has_graph:
            step.outputs[key] = output
        if stage == self._last_stage:
            step.losses.append(output.detach())
        elif self._is_here(stage + 1):
            step.inputs[stage + 1, microbatch] = output.detach()
            if has_graph:
                # The next stage's input has the memory, and lets it go with its own backward.
                require_own_memory(output)
                free_output(output)
        elif not has_graph:
            step.leaving[key] = output

    def _run_forward_again(self, action: Action, step: StepState) -> None:
        key = action.stage, action.microbatch
        step.outputs[key] = output = self._forward_on(key, step.kept_inputs[key], True)
        if action.stage < self._last_stage:  # the first run's output is the one that has gone on
            require_own_memory(output)
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
            with self._tapes[stage].recording(microbatch):
                _engine_backward(output, grad)
        else:
            if self._reducer is not None and self._completes[stage] == action:
                self._reducer.arm(stage)
            _engine_backward(output, grad)
        x = step.take_input(key)
        if x is None:
            return
        assert x.grad is not None, action
        if self._is_here(stage - 1):
            step.output_grads[stage - 1, microbatch] = x.grad
        else:
            step.input_grads[key] = x.grad

    def _run_weight_gradients(self, action: Action, step: StepState) -> None:
        tape = self._tapes[action.stage]
        if self._reducer is not None and self._completes[action.stage] == action:
            self._reducer.arm(action.stage, tape.owed(action.microbatch))
        tape.run(action.microbatch)

    def _send_forward(self, action: Action, step: StepState) -> None:
        key, to = (action.stage, action.microbatch), self._placement[action.stage + 1]
        if key in step.leaving:
            self._channels.send(step.leaving.pop(key), to=to)
            return
        output = step.outputs[key]
        require_own_memory(output)
        self._channels.send(output.detach(), to=to, sent=lambda: free_output(output))

    def _receive_forward(self, action: Action, step: StepState) -> None:
        step.inputs[action.stage, action.microbatch] = buffer = self._buffer()
        self._receive(action, buffer, self._placement[action.stage - 1], step)

    def _send_backward(self, action: Action, step: StepState) -> None:
        grad = step.input_grads.pop((action.stage, action.microbatch)).contiguous()
        self._channels.send(grad, to=self._placement[action.stage - 1])

    def _receive_backward(self, action: Action, step: StepState) -> None:
        step.output_grads[action.stage, action.microbatch] = buffer = self._buffer()
        self._receive(action, buffer, self._placement[action.stage + 1], step)

    def _receive(self, action: Action, buffer: torch.Tensor, source: int, step: StepState) -> None:
        work = self._channels.receive(buffer, source=source)
        step.receiving[action.kind, action.stage, action.microbatch] = work

    def _reduce_grad(self, action: Action, step: StepState) -> None:
        if self._reducer is not None:
            self._reducer.launch(action.stage)

    def _check_memory(self, expected: LiveUnits, action: Action, step: StepState) -> None:
        pending = sum(tape.pending for tape in self._tapes.values())
        found = LiveUnits(len(step.outputs), len(step.kept_inputs), pending)
        assert found == expected, (
            f"after {action} rank {self._rank} holds {found}; the program says {expected}"
        )

    def _buffer(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def _is_here(self, stage: int) -> bool:
        return self._placement[stage] == self._rank


def _tapes_for(
    program: Program, rank: int, tapes: Mapping[int, WeightGradients] | None
) -> dict[int, WeightGradients]:
    """The tapes of the stages on a rank whose backward is split."""
    given = tapes or {}
    split = {action.stage for action in program.actions[rank] if action.kind in (Kind.I, Kind.W)}
    missing = sorted(split - given.keys())
    if missing:
        raise ConfigError(
            f"schedule {program.schedule.name} splits the backward of stages {sorted(split)} on pipeline rank {rank}, "
            f"but tapes has {sorted(given) or 'none'}: give a weight tape for stages {missing}, or use a schedule "
            "without I and W, such as 1f1b"
        )
    return {stage: given[stage] for stage in sorted(split)}


def _engine_backward(output: torch.Tensor, grad: torch.Tensor | None) -> None:
    """`output.backward(grad)` without the shape check that a freed output would fail."""
    if grad is None:
        grad = torch.ones_like(output)
    Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
