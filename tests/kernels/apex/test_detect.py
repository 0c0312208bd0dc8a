"""Detection of apex, on folders laid out like installations."""

import sys
from pathlib import Path

import pytest

from megalite.kernels import probes
from tests.kernels.apex.conftest import RECORDED

RAISES = 'raise AssertionError("imported")\n'


def write(folder: Path, *files: str, text: str = RAISES) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


@pytest.fixture
def site(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def nvidia_apex(site: Path) -> Path:
    """Install NVIDIA's apex without extensions."""
    write(site, "apex/__init__.py", *(f"apex/{file}" for file in probes._FILES))
    return site


def test_missing_apex_is_reported(site: Path) -> None:
    assert probes.apex_extensions() == (None, "apex is not installed")
    assert probes.why_not_extension("amp_C") == "apex is not installed"


@pytest.mark.parametrize("files", [("apex/__init__.py", "apex/auth.py"), ("apex.py",), ("apex/models.py",)])
def test_other_packages_named_apex_are_rejected(site: Path, files: tuple[str, ...]) -> None:
    """Install another apex as package, module or namespace folder; an extension next to it changes nothing."""
    write(site, *files, "amp_C.py")
    found, reason = probes.apex_extensions()
    assert found is None
    assert reason.startswith(f"the apex at {site}/apex") and "is not NVIDIA's" in reason
    assert probes.why_not_extension("amp_C") == reason
    assert "apex" not in sys.modules and "amp_C" not in sys.modules


def test_apex_without_extensions_is_reported(nvidia_apex: Path) -> None:
    assert probes.apex_extensions() == (frozenset(), "")
    assert probes.why_not_extension("amp_C") == "apex is installed without its extension amp_C"
    assert "apex" not in sys.modules


def test_only_installed_extensions_are_available(nvidia_apex: Path) -> None:
    write(nvidia_apex, "amp_C.py", "xentropy_cuda.py", text="")
    assert probes.apex_extensions()[0] == {"amp_C", "xentropy_cuda"}
    assert probes.why_not_extension("amp_C") is None
    missing = probes.why_not_extension("fused_layer_norm_cuda")
    assert missing == "apex is installed without its extension fused_layer_norm_cuda"
    assert "amp_C" in sys.modules and "xentropy_cuda" not in sys.modules and "apex" not in sys.modules


@pytest.mark.parametrize("kind", ["ImportError", "OSError", "RuntimeError"])
def test_extension_of_another_torch_is_reported(nvidia_apex: Path, kind: str) -> None:
    write(nvidia_apex, "amp_C.py", text=f'raise {kind}("undefined symbol: _ZN3c10\\nand more")\n')
    assert probes.why_not_extension("amp_C") == (
        "apex's extension amp_C cannot be loaded (undefined symbol: _ZN3c10); build apex again for this torch"
    )


def test_every_extension_has_a_stand_in() -> None:
    assert {path.stem for path in RECORDED.glob("*.py")} == set(probes.EXTENSIONS)
