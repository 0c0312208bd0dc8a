"""The stages of a model one after the other, as one rank of their pipeline sees them."""

from collections.abc import Mapping

import torch

from megalite.models.gpt import GPTStage
from megalite.pipeline.channels import Channels
from megalite.topology.group import Group
from megalite.topology.topology import Topology

SEND_WINDOW = 64
"""Sends that may be under way on an edge: more than batches of a generation in flight ever have, so that none waits for
a stage that waits for this one."""


class Chain:
    """This rank's stage and its neighbours.

    Activations go from stage to stage, tokens from the last round to the first and on to those between: a message on
    each edge at a time, in the one order that all ranks know from the tokens.

    Args:
        stage: the one stage here.
        pp: the pipeline's ranks.
        edges: (sender, receiver), as pipeline ranks -> the pair's group; the last rank has one to the first.
        send_window: sends that may be under way on an edge; where nothing goes round, few of them save memory.
    """

    def __init__(
        self,
        stage: GPTStage,
        pp: Group,
        edges: Mapping[tuple[int, int], Group],
        *,
        send_window: int = SEND_WINDOW,
    ) -> None:
        self.stage = stage
        self.size, self._rank = pp.size, pp.rank
        self._channels = Channels(dict(edges), rank=pp.rank, send_window=send_window)

    @classmethod
    def of(cls, stage: GPTStage, topology: Topology, *, send_window: int = SEND_WINDOW) -> "Chain":
        """The pipeline that this rank of the topology is in."""
        return cls(stage, topology.pp, topology.edges, send_window=send_window)

    @classmethod
    def whole(cls, stage: GPTStage) -> "Chain":
        """A model in one stage."""
        return cls(stage, Group.solo("pp"), {})

    @property
    def is_first(self) -> bool:
        """The embedding is here."""
        return self._rank == 0

    @property
    def is_last(self) -> bool:
        """The head is here."""
        return self._rank == self.size - 1

    def activations(self, length: int, rows: int) -> torch.Tensor:
        """What the stage before has computed, [length, rows, h]."""
        hidden_size, make = self.stage.config.hidden_size, self.stage.make
        x = torch.empty(length, rows, hidden_size, dtype=make.dtype, device=make.device)
        self._channels.receive(x, source=self._rank - 1).wait()
        return x

    def pass_on(self, x: torch.Tensor) -> None:
        """Send what this stage has computed to the next."""
        self._channels.send(x.contiguous(), to=self._rank + 1)

    def announce(self, tokens: torch.Tensor) -> None:
        """On the last stage: send the tokens that were chosen round to the first."""
        if self.size > 1:
            self._channels.send(tokens, to=0)

    def hear(self, rows: int) -> list[int]:
        """On the other stages: the tokens of the last one, which go on to the next stage that does not have them."""
        tokens = torch.empty(rows, dtype=torch.int64, device=self.stage.device)
        source = self.size - 1 if self.is_first else self._rank - 1
        self._channels.receive(tokens, source=source).wait()
        if self._rank < self.size - 2:
            self._channels.send(tokens, to=self._rank + 1)
        heard: list[int] = tokens.tolist()
        return heard

    def drain(self) -> None:
        """Wait until all that was sent has gone."""
        self._channels.drain()
