"""docs/api.md: its blocks run one after the other and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n+(?:^```text\n(.*?)^```)?", PAGE, re.MULTILINE | re.DOTALL)


def test_the_blocks_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 8
    names: dict[str, object] = {}
    for block, shown in BLOCKS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(block, names)
        printed = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
        assert printed.strip("\n") == shown.strip("\n"), block


def test_every_block_shows_what_it_prints() -> None:
    assert all(shown for _, shown in BLOCKS)
    assert PAGE.count("```python") == len(BLOCKS)
