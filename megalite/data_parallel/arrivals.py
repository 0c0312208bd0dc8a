"""Parameters that are on their way while the next forward already runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megalite.data_parallel.buckets import Bucket
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.group import Work


class Arrivals:
    """Each module waits for the buckets of its own parameters just before it computes.

    Args:
        stages: this rank's modules.
        buckets: all of theirs.
        overlap: False: whatever is expected is waited for with `wait_unless_overlapped`, and modules wait for nothing.
    """

    def __init__(
        self, stages: Mapping[int, torch.nn.Module], buckets: Iterable[Bucket], *, overlap: bool
    ) -> None:
        self._overlap = overlap
        self._coming: dict[Bucket, Work] = {}
        if overlap:
            bucket_of = {placed.parameter: bucket for bucket in buckets for placed in bucket.placed}
            for stage in stages.values():
                for module in stage.modules():
                    self._wait_before(module, bucket_of)

    def _wait_before(self, module: torch.nn.Module, bucket_of: Mapping[Any, Bucket]) -> None:
        own = [p for p in module.parameters(recurse=False) if isinstance(p, ShardedParameter)]
        buckets = tuple(dict.fromkeys(bucket_of[parameter] for parameter in own))
        if buckets:
            module.register_forward_pre_hook(lambda *_: self._wait_for(buckets))

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        if self._coming:
            for bucket in buckets:
                work = self._coming.pop(bucket, None)
                if work is not None:
                    work.wait()

    def expect(self, bucket: Bucket, work: Work) -> None:
        """The bucket's parameters are there once `work` is done."""
        self._coming[bucket] = work

    def wait_unless_overlapped(self) -> None:
        """All has been asked for: where forwards do not wait by themselves, wait here."""
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Until everything is there."""
        for work in self._coming.values():
            work.wait()
        self._coming.clear()


def first_needed_first(buckets: Mapping[int, list[Bucket]]) -> list[Bucket]:
    """In the order of the next forward: stages are kept in that order, the buckets of each in the backward's."""
    return [bucket for own in buckets.values() for bucket in reversed(own)]
