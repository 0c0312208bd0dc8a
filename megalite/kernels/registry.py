"""Which kernel serves an operation: every implementation, what it takes, and the choice among them.

A module asks when it is built and keeps the function that it gets, so a call costs no more than the call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.compute import BACKENDS, OPERATIONS
from megalite.config.errors import ConfigError
from megalite.kernels.implementations import IMPLEMENTATIONS, Implementation, Use
from megalite.kernels.onednn import why_not_onednn
from megalite.kernels.preferences import Preferences, shipped_preferences
from megalite.kernels.probes import why_not_apex, why_not_triton


def why_not_backend(backend: str, device: str) -> str | None:
    """Why no kernel of a backend can run on a device of that type here, or None. Probed once a process."""
    if backend == "torch":
        return None
    if backend == "onednn":
        return why_not_onednn(device)
    return why_not_triton(device) if backend == "triton" else why_not_apex(device)


@dataclass(frozen=True)
class Choice:
    """What serves one use."""

    operation: str
    use: Use
    backend: str
    why: str
    """Asked for, or which rule of the table of preferences."""


class Kernels:
    """Chooses the kernels of one run and remembers what it chose.

    Args:
        requests: operation -> backend, which then serves every use of the operation.
        preferences: the order among backends where nothing is asked for.
    """

    def __init__(
        self, requests: Mapping[str, str] | None = None, *, preferences: Preferences | None = None
    ) -> None:
        self._requests = dict(requests or {})
        self._preferences = preferences or shipped_preferences()
        self._chosen: dict[tuple[str, Use], tuple[Choice, Any]] = {}

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if a backend that was asked for cannot run on `device`, or has no such operation."""
        for operation, backend in self._requests.items():
            found = _of_backend(operation, backend)
            reason = why_not_backend(backend, device.type) or found.why_not_here()
            if reason is not None:
                raise ConfigError(_refusal(operation, backend, reason))

    def get(self, operation: str, *, device: torch.device, dtype: torch.dtype, size: int) -> Any:
        """The function (of the cross-entropy: the module with its two functions) that serves a use.

        Args:
            operation: a key of OPERATIONS.
            dtype: of the activations, or of the flat tensor.
            size: of the last dimension; of an optimizer's operation the number of elements.

        Raises:
            ConfigError: what was asked for does not take this use.
        """
        use = Use(device.type, dtype, size)
        if (operation, use) not in self._chosen:
            choice = self._choose(operation, use, device)
            self._chosen[operation, use] = choice, _of_backend(operation, choice.backend).load()
        return self._chosen[operation, use][1]

    def fuses(self, operation: str, *, device: torch.device, dtype: torch.dtype, size: int) -> bool:
        """What serves the use is one kernel, so that it pays to leave it work that a matrix product could take along."""
        self.get(operation, device=device, dtype=dtype, size=size)
        return self._chosen[operation, Use(device.type, dtype, size)][0].backend != "torch"

    @property
    def chosen(self) -> Sequence[Choice]:
        """So far, in the order in which modules asked."""
        return [choice for choice, _ in self._chosen.values()]

    def summary(self) -> dict[str, str]:
        """Operation -> backend; several with a plus sign between them."""
        backends: dict[str, set[str]] = {}
        for choice in self.chosen:
            backends.setdefault(choice.operation, set()).add(choice.backend)
        return {operation: "+".join(sorted(found)) for operation, found in sorted(backends.items())}

    def _choose(self, operation: str, use: Use, device: torch.device) -> Choice:
        asked = self._requests.get(operation)
        if asked is not None:
            reason = why_not(operation, asked, use)
            if reason is not None:
                raise ConfigError(_refusal(operation, asked, reason))
            return Choice(operation, use, asked, "asked for")
        order, why = self._preferences.order(operation, use, device)
        for backend in order:
            if backend in IMPLEMENTATIONS[operation] and why_not(operation, backend, use) is None:
                return Choice(operation, use, backend, why)
        return Choice(operation, use, "torch", "nothing else takes it")


def why_not(operation: str, backend: str, use: Use) -> str | None:
    """Why a backend cannot serve a use here, or None."""
    return why_not_backend(backend, use.device) or _of_backend(operation, backend).why_not(use)


def backends_of(operation: str) -> list[str]:
    """Those that have a kernel for it, in the order of BACKENDS."""
    return [backend for backend in BACKENDS if backend in IMPLEMENTATIONS[operation]]


def _of_backend(operation: str, backend: str) -> Implementation:
    found = IMPLEMENTATIONS[operation].get(backend)
    if found is None:
        has = ", ".join(backends_of(operation))
        raise ConfigError(f"kernels: {backend} has no {operation} ({OPERATIONS[operation]}); there is {has}")
    return found


def _refusal(operation: str, backend: str, reason: str) -> str:
    return f"kernels: {operation}={backend} cannot be had: {reason}; use {operation}=torch"
