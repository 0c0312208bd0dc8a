"""A folder's format is inferred from its contents; ambiguous folders and others are refused."""

from pathlib import Path

import pytest

from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.megatron.write import write_megatron
from megalite.conversion.native import write_native
from megalite.conversion.open import detect_format, open_weights
from megalite.conversion.weights import ConversionError
from tests.conversion.samples import LLAMA, MadeUp


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    weights = MadeUp(home, LLAMA)
    write_native(weights, home / "native")
    write_huggingface(weights, home / "huggingface")
    write_megatron(weights, home / "megatron", tp=1, pp=1)
    return home


@pytest.mark.parametrize("name", ["native", "huggingface", "megatron"])
def test_each_format_is_recognized(models: Path, name: str) -> None:
    assert detect_format(models / name) == name
    weights = open_weights(models / name)
    assert weights.format == ("megalite" if name == "native" else name)
    assert weights.read("final_norm.weight").equal(MadeUp(models, LLAMA).read("final_norm.weight"))


@pytest.mark.parametrize(("name", "inner"), [("native", "step-0000000"), ("megatron", "release")])
def test_one_step_of_a_folder_is_recognized(models: Path, name: str, inner: str) -> None:
    assert detect_format(models / name / inner) == name
    assert open_weights(models / name / inner).path == models / name / inner


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(ConversionError, match=r"no model of a known format.*step-\*.*config.json.*notes.txt"):
        open_weights(tmp_path)
    with pytest.raises(ConversionError, match="is a file; give its folder"):
        open_weights(tmp_path / "notes.txt")
    with pytest.raises(ConversionError, match="missing does not exist"):
        open_weights(tmp_path / "missing")


def test_folder_with_two_formats_needs_a_choice(models: Path, tmp_path: Path) -> None:
    for name in ("native", "huggingface"):
        for entry in (models / name).iterdir():
            (tmp_path / entry.name).symlink_to(entry)
    with pytest.raises(ConversionError, match=r"native or huggingface; choose one with --from native"):
        open_weights(tmp_path)
    assert open_weights(tmp_path, format="native").format == "megalite"


def test_step_of_a_hugging_face_folder_is_refused(models: Path) -> None:
    with pytest.raises(ConversionError, match=r"--step 3 has no effect"):
        open_weights(models / "huggingface", step=3)
