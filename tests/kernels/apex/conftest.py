"""Puts stand-ins of apex's extensions on the path, like an installation of apex."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megalite.kernels import probes, self_check
from megalite.kernels.probes import EXTENSIONS, why_not_apex

RECORDED = Path(__file__).parent / "recorded"
ADAPTERS = ("layers", "multi_tensor")  # modules that import an extension

Adapter = Callable[[str], ModuleType]


def clear_probes() -> None:
    """Remove apex's modules and the cached results of all probes."""
    for name in ("apex", *EXTENSIONS, *(f"megalite.kernels.apex.{adapter}" for adapter in ADAPTERS)):
        sys.modules.pop(name, None)
    for probe in (probes.apex_extensions, probes.why_not_extension, why_not_apex, self_check._why_wrong):
        probe.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear all apex probes before and after the test."""
    clear_probes()
    yield
    clear_probes()


@pytest.fixture
def adapter(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """Import a module of megalite.kernels.apex with the stand-ins."""
    monkeypatch.syspath_prepend(RECORDED)
    return lambda name: importlib.import_module(f"megalite.kernels.apex.{name}")


@pytest.fixture
def installed(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """Simulate a machine with apex, with kernels that run on the CPU."""
    monkeypatch.setattr("megalite.kernels.registry.why_not_apex", lambda device: None)
    return adapter
