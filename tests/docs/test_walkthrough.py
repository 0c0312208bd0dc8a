"""docs/walkthrough.md, run completely: from raw text to a model with the same texts in transformers and megalite."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.docs.execution import execute, link_clone
from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY, losses

pytestmark = pytest.mark.e2e

PAGE = (REPOSITORY / "docs" / "walkthrough.md").read_text(encoding="utf-8")
COMMANDS = list(commands_in(PAGE, "docs/walkthrough.md"))
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder."""
    found = tmp_path_factory.mktemp("walkthrough")
    link_clone(found)
    return found


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    """First words of each command -> output of all such commands; and the output of the Python block."""
    printed: dict[str, str] = {}
    with contextlib.chdir(folder):
        for command in COMMANDS:
            outcome = execute(command)
            assert outcome.status == 0, f"{command.line}\n{outcome.out}\n{outcome.err}"
            name = " ".join(command.words[:2])
            printed[name] = printed.get(name, "") + outcome.out
        (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, {})
        printed["transformers"] = out.getvalue()
    return printed


def test_every_step_is_run() -> None:
    words = [" ".join(command.words[:2]) for command in COMMANDS]
    assert words == [
        "export OMP_NUM_THREADS=1",
        "python examples/quickstart/build_corpus.py",
        "megalite train-tokenizer",
        "megalite preprocess",
        "megalite data",
        "megalite train",
        "megalite plan",
        "torchrun --nproc-per-node",
        "megalite inspect",
        "megalite generate",
        "megalite convert",
    ]


def test_loss_falls(said: dict[str, str], folder: Path) -> None:
    assert "4 ranks = tp 2 x cp 1 x dp 1 x pp 2" in said["torchrun --nproc-per-node"]
    found = losses(folder / "runs" / "walkthrough")
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert found[-1][1] < found[0][1] - 0.5
    assert "sha256 OK" in said["megalite inspect"]


def test_transformers_generates_the_same_text(said: dict[str, str]) -> None:
    ours = said["megalite generate"]
    assert ours.startswith("The import statement") and len(ours) > 40
    assert said["transformers"] == ours
