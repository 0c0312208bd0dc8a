"""Puts the stand-ins of apex's extensions on the path, as an installation of apex would."""

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


def forget() -> None:
    """As in a process that has not looked for apex."""
    for name in ("apex", *EXTENSIONS, *(f"megalite.kernels.apex.{adapter}" for adapter in ADAPTERS)):
        sys.modules.pop(name, None)
    for probe in (probes.apex_extensions, probes.why_not_extension, why_not_apex, self_check._why_wrong):
        probe.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing of apex has been looked for, before and after."""
    forget()
    yield
    forget()


@pytest.fixture
def adapter(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """A module of megalite.kernels.apex, on the stand-ins."""
    monkeypatch.syspath_prepend(RECORDED)
    return lambda name: importlib.import_module(f"megalite.kernels.apex.{name}")


@pytest.fixture
def installed(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """As on a machine with apex, whose kernels take the CPU."""
    monkeypatch.setattr("megalite.kernels.registry.why_not_apex", lambda device: None)
    return adapter
