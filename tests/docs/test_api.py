"""docs/api.md and docs/extend.md: the code blocks of a page run in order and print the shown output."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from megalite import BLOCKS, DATASETS, KERNELS, LOSSES, LR_SCHEDULES, OPTIMIZERS, STRATEGIES
from tests.e2e.programs import REPOSITORY

BLOCK = re.compile(r"^```python\n(.*?)^```\n+(?:^```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
KINDS = "dataset,layer,activation,loss,optimizer,learning-rate schedule,pipeline schedule,strategy,kernel,writer"


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "count"), [("api.md", 9), ("extend.md", 9)])
def test_blocks_print_the_shown_output(name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for registry in (BLOCKS, DATASETS, KERNELS, LOSSES, LR_SCHEDULES, OPTIMIZERS, STRATEGIES):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    blocks = BLOCK.findall(page(name))
    assert len(blocks) == page(name).count("```python") == count
    assert name != "api.md" or all(shown for _, shown in blocks)
    names: dict[str, object] = {"__name__": "notebook"}
    for block, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        assert printed.strip("\n") == shown.strip("\n"), block


def test_extension_page_is_short_and_complete() -> None:
    text = page("extend.md")
    assert len(text.split()) <= 1000
    assert len(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).split()) <= 700
    sections = [part.split("\n", 1) for part in re.split("^## ", text, flags=re.MULTILINE)]
    shown = {kind: body for kind in KINDS.split(",") for title, body in sections if kind in title}
    assert list(shown) == KINDS.split(",")
    assert [kind for kind, body in shown.items() if "```python" not in body and "examples.extend." not in body] == []
