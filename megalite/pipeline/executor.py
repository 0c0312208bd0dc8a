"""The executor: does what a lowered program says, action by action, and knows no schedule by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd import Variable

from megalite.pipeline.channels import Channels
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.schedule import Program
from megalite.topology.group import Group, Work

ForwardStep = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""(stage, microbatch, input or None on the first stage) -> output; on the last stage the microbatch's scalar loss."""


class GradientReducer(Protocol):
    """What the executor tells data parallelism. Stages are global."""

    def arm(self, stage: int) -> None:
        """The backward that comes next is the last of this stage: buckets may be reduced as they fill."""

    def launch(self, stage: int) -> None:
        """The stage's gradients are final: start reducing what has not been started."""


@dataclass
class _Step:
    """Tensors alive during one run, by (stage, microbatch)."""

    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    output_grads: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    input_grads: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    receiving: dict[tuple[str, int, int], Work] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)


class Executor:
    """Runs one rank's part of a program.

    Args:
        program: a lowered and validated program; every rank of the pipeline runs its own row of the same one.
        rank: this pipeline rank.
        edges: the process group of each directed neighbour pair.
        forward: computes one stage on one microbatch.
        activation_shape: shape of the tensors that travel between stages.
        reducer: told when gradients become final; None in forward-only programs.
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
    ) -> None:
        schedule = program.schedule
        self._program = program
        self._rank = rank
        self._forward = forward
        self._shape, self._dtype, self._device = activation_shape, dtype, device
        self._reducer = reducer
        self._placement = schedule.placement
        self._last_stage = schedule.num_stages - 1
        self._forward_only = schedule.forward_only
        self._channels = Channels(edges, rank=rank, send_window=program.send_window)
        self._last_backward = {
            action.stage: action for action in program.actions[rank] if action.kind is Kind.B
        }
        self._do = {
            Kind.F: self._run_forward,
            Kind.B: self._run_backward,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
            Kind.REDUCE_GRAD: self._reduce_grad,
        }

    def run(self) -> list[torch.Tensor]:
        """One step. Returns the microbatch losses if the last stage is here, else nothing; detached."""
        step = _Step()
        for action in self._program.actions[self._rank]:
            try:
                self._do[action.kind](action, step)
            except Exception as error:
                error.add_note(
                    f"in {action} on pipeline rank {self._rank} of:\n{render_grid(self._program.schedule)}"
                )
                raise
        self._channels.drain()
        return step.losses

    def _run_forward(self, action: Action, step: _Step) -> None:
        stage, microbatch = key = action.stage, action.microbatch
        x = None
        if stage > 0:
            self._await(Kind.RECV_F, key, step)
            x = step.inputs[key]
            if not self._forward_only:
                x.requires_grad_()
        with torch.set_grad_enabled(not self._forward_only):
            output = self._forward(stage, microbatch, x)
        if self._forward_only:
            step.inputs.pop(key, None)
        if stage == self._last_stage:
            step.losses.append(output.detach())
        if stage < self._last_stage and self._is_here(stage + 1):
            step.inputs[stage + 1, microbatch] = output.detach()
        leaves = stage < self._last_stage and not self._is_here(stage + 1)
        if leaves or not self._forward_only:
            step.outputs[key] = output

    def _run_backward(self, action: Action, step: _Step) -> None:
        stage, microbatch = key = action.stage, action.microbatch
        output = step.outputs.pop(key)
        grad = None
        if stage < self._last_stage:
            self._await(Kind.RECV_B, key, step)
            grad = step.output_grads.pop(key)
        if self._reducer is not None and self._last_backward[stage] == action:
            self._reducer.arm(stage)
        _engine_backward(output, grad)
        x = step.inputs.pop(key, None)
        if x is None:
            return
        assert x.grad is not None, action
        if self._is_here(stage - 1):
            step.output_grads[stage - 1, microbatch] = x.grad
        else:
            step.input_grads[key] = x.grad

    def _send_forward(self, action: Action, step: _Step) -> None:
        key = action.stage, action.microbatch
        output = step.outputs[key]
        if self._forward_only:
            del step.outputs[key]
        assert output._base is None, (
            "a stage's output must not be a view: its memory is freed once it is sent"
        )

        def free() -> None:
            # Only the graph behind it is needed from here on; the engine does not look at the root's data.
            output.data = output.data.new_empty(1)

        self._channels.send(output.detach(), to=self._placement[action.stage + 1], sent=free)

    def _receive_forward(self, action: Action, step: _Step) -> None:
        key = action.stage, action.microbatch
        step.inputs[key] = buffer = self._buffer()
        source = self._placement[action.stage - 1]
        step.receiving[action.kind, *key] = self._channels.receive(buffer, source=source)

    def _send_backward(self, action: Action, step: _Step) -> None:
        grad = step.input_grads.pop((action.stage, action.microbatch)).contiguous()
        self._channels.send(grad, to=self._placement[action.stage - 1])

    def _receive_backward(self, action: Action, step: _Step) -> None:
        key = action.stage, action.microbatch
        step.output_grads[key] = buffer = self._buffer()
        source = self._placement[action.stage + 1]
        step.receiving[action.kind, *key] = self._channels.receive(buffer, source=source)

    def _reduce_grad(self, action: Action, step: _Step) -> None:
        if self._reducer is not None:
            self._reducer.launch(action.stage)

    def _await(self, kind: Kind, key: tuple[int, int], step: _Step) -> None:
        work = step.receiving.pop((kind, *key), None)
        if work is not None:
            work.wait()

    def _buffer(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self._device)

    def _is_here(self, stage: int) -> bool:
        return self._placement[stage] == self._rank


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
