"""Puts stand-ins of apex's extensions on the path, like an installation of apex."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megalite.kernels import probes
from megalite.kernels.probes import EXTENSIONS, why_not_apex

RECORDED = Path(__file__).parent / "recorded"


def clear_probes() -> None:
    """Remove apex's modules and the cached results of all probes."""
    for name in ("apex", *EXTENSIONS, "megalite.kernels.apex"):
        sys.modules.pop(name, None)
    for probe in (probes.apex_extensions, probes.why_not_extension, why_not_apex, probes._why_wrong):
        probe.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clear all apex probes before and after the test."""
    clear_probes()
    yield
    clear_probes()


@pytest.fixture
def apex(fresh: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import megalite.kernels.apex with the stand-ins."""
    monkeypatch.syspath_prepend(RECORDED)
    return importlib.import_module("megalite.kernels.apex")


@pytest.fixture
def installed(apex: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Simulate a machine with apex, with kernels that run on the CPU."""
    monkeypatch.setattr("megalite.kernels.registry.why_not_apex", lambda device: None)
    return apex
