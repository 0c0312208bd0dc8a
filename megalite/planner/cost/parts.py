"""`Parts`: what some piece of work takes, by what it keeps busy; pieces add up, and become seconds at the end."""

from dataclasses import dataclass, fields

import numpy as np

from megalite.planner.cost.workload import Number
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack

ALTERNATION = 6.0
"""q: how the times of host and device combine. Infinite if each stretch of a stage were bound by the same one of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Seconds by kind, and counts of what the host starts. Fields are numbers or arrays over layouts."""

    gemm: Number = 0.0
    """Matrix products, the attention core among them."""
    memory: Number = 0.0
    """Operations that read and write."""
    tensor: Number = 0.0
    """Collectives of tensor parallelism."""
    context: Number = 0.0
    """What context parallelism leaves exposed beside the attention core."""
    expert: Number = 0.0
    """Exchange of rows between experts."""
    operations: Number = 0.0
    """Kernels that the host starts."""
    collectives: Number = 0.0

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def __mul__(self, times: Number) -> "Parts":
        return Parts(**{name: getattr(self, name) * times for name in _NAMES})

    def exposed_tensor(self, stack: SoftwareStack) -> Number:
        """Seconds of tensor parallelism's collectives that no matrix product hides."""
        hidden = np.minimum(self.tensor, self.gemm) if stack.overlap_tensor_parallel else 0.0
        return self.tensor - hidden

    def device_seconds(self, cluster: Cluster, stack: SoftwareStack) -> Number:
        """What the device needs, if the host is never late."""
        starts = self.operations * cluster.accelerator.kernel_seconds
        return self.gemm + self.memory + self.exposed_tensor(stack) + self.context + self.expert + starts

    def host_seconds(self, stack: SoftwareStack) -> Number:
        """What the host needs to start everything."""
        return self.operations * stack.operation_seconds + self.collectives * stack.collective_seconds

    def seconds(self, cluster: Cluster, stack: SoftwareStack) -> Number:
        """The slower of device and host, and more where both are close; on a CPU, which is both, their sum.

        (device^q + host^q)^(1/q): stretches in which one waits for the other alternate.
        """
        device, host = self.device_seconds(cluster, stack), self.host_seconds(stack)
        if not cluster.accelerator.asynchronous:
            return device + host
        most = np.maximum(device, host)
        least = np.minimum(device, host) / np.where(most > 0, most, 1.0)
        return most * (1.0 + least**ALTERNATION) ** (1.0 / ALTERNATION)


_NAMES = tuple(field.name for field in fields(Parts))
