"""Evaluates the loss on held-out data, and reads batches together with the other ranks."""

import torch

from megalite.config.errors import ConfigError
from megalite.data.loader import BatchLoader, Microbatch
from megalite.topology.group import Group
from megalite.topology.topology import Topology
from megalite.training.replica import Replica, consensus
from megalite.training.step import Stepper
from megalite.training.stopping import StopRequest, StopRequests, StopRun


def read_batches(
    loader: BatchLoader | None,
    first_sample: int,
    size: int,
    length: int | None = None,
    *,
    topology: Topology,
    scope: Group,
    stops: StopRequests | None = None,
) -> tuple[list[Microbatch], float]:
    """Return this rank's microbatches of one global batch (none if it reads no data), and the longest time, in seconds,
    that any rank waited for its data.

    `length`: inputs per sample; None: all. `scope`: the ranks that process this batch together. `stops` is None unless
    these are all ranks.

    Collectives: a max all-reduce of three numbers over `scope`; on a fault a gather. If all ranks process the batch, it
    runs on the host, because the device may still compute the previous step.

    Raises:
        ConfigError: a rank cannot read its data; raised on every rank of `scope`.
        StopRun: some rank was requested to stop; raised on every rank."""
    asked = 0 if stops is None else stops.number
    microbatches: list[Microbatch] = []
    fault: Exception | None = None
    waited = 0.0
    if loader is not None:
        try:
            microbatches = loader.load(first_sample, size, length)
            waited = loader.waited
        except (ConfigError, OSError) as error:
            fault = ConfigError(f"rank {topology.rank}: {error}")
        except Exception as error:
            fault = error
    if scope.size > 1:
        group = topology.host if scope.size == topology.world.size else scope
        agreed = torch.tensor(
            [float(fault is not None), waited, float(asked)], dtype=torch.float64, device=group.device
        )
        group.all_reduce(agreed, op="max")
        with group.heartbeat.synchronise():
            failed, waited, asked = agreed.tolist()
        if failed:
            group.raise_on_all_ranks(fault)
    elif fault is not None:
        raise fault
    if asked:
        raise StopRun(StopRequest(int(asked)))
    return microbatches, waited


class ReadAhead:
    """Decides when the next batch is read: from the beginning of a step, or on a GPU while the host waits for the device.

    Threads that read delay a host that launches kernels. If three steps in a row still wait for their data, that is too
    late, and reading begins with the step for the rest of the run."""

    def __init__(self, device: torch.device) -> None:
        self.early = device.type == "cpu"
        self._late_steps = 0  # in a row

    def waited(self, seconds: float) -> None:
        """Note how long a step waited for its data."""
        self._late_steps = self._late_steps + 1 if seconds > 0.005 else 0
        self.early |= self._late_steps == 3


def raise_stop_on_all_ranks(stops: StopRequests, topology: Topology) -> None:
    """Raise StopRun on all ranks if one was requested to stop. Ranks that step independently call it when they synchronize.

    Collectives: a max all-reduce of one number over the world, on the host."""
    asked = torch.tensor([stops.number])
    topology.host.all_reduce(asked, op="max")
    if number := int(asked.item()):
        raise StopRun(StopRequest(number))


class Evaluator:
    """Computes the loss over the first eval_iters global batches of a split, always the same ones: the mean of theirs.

    `samples`: evaluate this many samples instead, each once, and return the mean over all unmasked tokens. The last
    batch is filled with samples without a loss, so that no layout changes the result."""

    def __init__(
        self,
        replica: Replica,
        stepper: Stepper,
        loader: BatchLoader | None,
        stops: StopRequests | None = None,
        samples: int | None = None,
    ) -> None:
        training = replica.config.training
        assert training.global_batch_size is not None
        self._stepper, self._loader, self._stops = stepper, loader, stops
        self._replica, self._topology = replica, replica.topology
        self._size, self._whole = training.global_batch_size, samples is not None
        self._batches = training.eval_iters if samples is None else -(-samples // self._size)

    def prepare(self) -> None:
        """Prefetch the first batch of the next evaluation."""
        if self._loader is not None:
            self._loader.prefetch(0, self._size)

    def loss(self) -> float:
        """Return the mean loss; the same on every rank."""
        total = weights = 0.0
        stop = self._batches * self._size
        with consensus(self._replica):
            for first in range(0, stop, self._size):
                microbatches, _ = read_batches(
                    self._loader,
                    first,
                    self._size,
                    topology=self._topology,
                    scope=self._topology.world,
                    stops=self._stops,
                )
                if self._loader is not None and first + self._size < stop:
                    self._loader.prefetch(first + self._size, self._size)
                loss, tokens = self._stepper.evaluate(microbatches, first_sample=first, batch_size=self._size)
                weight = tokens if self._whole else 1.0
                total, weights = total + loss * weight, weights + weight
        return total / max(weights, 1.0)
