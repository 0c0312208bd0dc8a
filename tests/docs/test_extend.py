"""docs/extend.md: its blocks run one after the other, and print what the page says."""

import contextlib
import io
import re

import pytest

from megalite import DATASETS, KERNELS, LR_SCHEDULES, OPTIMIZERS
from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n+(?:^```text\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL)


def test_the_blocks_print_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (DATASETS, KERNELS, LR_SCHEDULES, OPTIMIZERS):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    assert len(BLOCKS) == PAGE.count("```python") == 6
    names: dict[str, object] = {"__name__": "notebook"}
    for block, shown in BLOCKS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        assert out.getvalue() == shown, block


def test_the_page_is_short_and_has_all_kinds() -> None:
    assert len(PAGE.split()) <= 1000
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 700
    for kind in (
        "dataset",
        "layer",
        "optimizer",
        "learning-rate schedule",
        "pipeline schedule",
        "strategy",
        "kernel",
        "writer",
    ):
        assert re.search(f"^## .*{kind}", PAGE, re.MULTILINE), kind
