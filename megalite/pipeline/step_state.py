"""The tensors that one run of a program holds on one rank."""

from dataclasses import dataclass, field

import torch

from megalite.pipeline.ir.actions import Kind
from megalite.topology.group import Work

Key = tuple[int, int]
"""(stage, microbatch)"""


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
    receiving: dict[tuple[Kind, int, int], Work] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)

    def take_input(self, key: Key) -> torch.Tensor | None:
        """The stage's input for its backward, no longer held here; None on the first stage."""
        if key in self.kept_inputs:
            return self.kept_inputs.pop(key)
        return self.inputs.pop(key, None)

    def finish_receive(self, kind: Kind, key: Key) -> None:
        """Wait until the message is there, if one comes."""
        work = self.receiving.pop((kind, *key), None)
        if work is not None:
            work.wait()


def require_own_memory(output: torch.Tensor) -> None:
    """What `free_output` may be called on."""
    assert output._base is None, (
        "a stage's output must not be a view: its memory is freed while its graph lives on"
    )


def free_output(output: torch.Tensor) -> None:
    """Give back the memory of a graph's root. The graph stays: the engine does not look at the root's data."""
    output.data = output.data.new_empty(1)
