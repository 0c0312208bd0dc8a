"""Losses on data that is not trained on, and reading batches in step with the other ranks."""

import torch

from megalite.config.errors import ConfigError
from megalite.data.loader import BatchLoader, Microbatch
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from megalite.training.replica import Replica
from megalite.training.step import Stepper


def read_batches(
    loader: BatchLoader | None, first_sample: int, size: int, *, topology: Topology, scope: Group
) -> tuple[list[Microbatch], float]:
    """This rank's microbatches of one global batch (none where it reads no data), and the seconds that the rank which
    waited longest for its own has waited: all the others wait for it in the step.

    Args:
        scope: the ranks that take this batch together: the world in evaluation, in training the strategy's.

    Collectives: a max all-reduce of two numbers over `scope`; on a fault a gather.

    Raises:
        ConfigError: a rank cannot read its data; the same on every rank of `scope`.
    """
    microbatches: list[Microbatch] = []
    fault: Exception | None = None
    if loader is not None:
        try:
            microbatches = loader.load(first_sample, size)
        except (ConfigError, OSError) as error:
            fault = ConfigError(f"rank {topology.rank}: {error}")
        except Exception as error:
            fault = error
    waited = 0.0 if loader is None or fault is not None else loader.waited
    if scope.size > 1:
        worst = torch.tensor([float(fault is not None), waited], dtype=torch.float64, device=topology.device)
        scope.all_reduce(worst, op="max")
        failed, waited = worst.tolist()
        if failed:
            scope.agree(fault, topology.device)
    elif fault is not None:
        raise fault
    return microbatches, waited


class Evaluator:
    """The loss over the first eval_iters global batches of a split: the same ones each time, so that values can be
    compared.

    Args:
        loader: None on ranks that read no data.
    """

    def __init__(self, replica: Replica, stepper: Stepper, loader: BatchLoader | None) -> None:
        training = replica.config.training
        assert training.global_batch_size is not None
        self._stepper, self._strategy = stepper, replica.strategy
        self._loader = loader
        self._batches = training.eval_iters
        self._size = training.global_batch_size
        self._topology = replica.topology

    def prepare(self) -> None:
        """An evaluation is coming: begin to read its first batch."""
        if self._loader is not None:
            self._loader.prefetch(0, self._size)

    def loss(self) -> float:
        """The mean over the batches; the same on every rank.

        Raises:
            ConfigError: as `read_batches`.
        """
        with self._strategy.consensus():
            return self._mean()

    def _mean(self) -> float:
        losses: list[float] = []
        for first in range(0, self._batches * self._size, self._size):
            microbatches, _ = read_batches(
                self._loader, first, self._size, topology=self._topology, scope=self._topology.world
            )
            if self._loader is not None and len(losses) + 1 < self._batches:
                self._loader.prefetch(first + self._size, self._size)
            losses.append(self._stepper.evaluate(microbatches, first_sample=first, batch_size=self._size))
        return sum(losses) / len(losses)
