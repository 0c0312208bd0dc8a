"""A group without other ranks that records when collectives start and are waited for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.topology.group import Group

EVENTS: list[str] = []


@dataclass
class SpyWork:
    name: str

    def wait(self) -> None:
        EVENTS.append(f"wait {self.name}")


class SpyGroup(Group):
    def _note(self, name: str) -> SpyWork:
        EVENTS.append(f"start {name}")
        return SpyWork(name)

    def all_reduce_async(self, tensor: Tensor, *, op: str = "sum") -> SpyWork:
        return self._note("all_reduce")

    def all_gather_async(self, output: Tensor, part: Tensor) -> SpyWork:
        output.zero_()
        return self._note("all_gather")

    def reduce_scatter_async(self, output: Tensor, tensor: Tensor) -> SpyWork:
        output.zero_()
        return self._note("reduce_scatter")

    def rotate_async(self, tensor: Tensor) -> tuple[Tensor, SpyWork]:
        return torch.zeros_like(tensor), self._note("rotate")
