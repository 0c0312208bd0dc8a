"""Basic help fits a screen, and full help is complete."""

import re
from pathlib import Path

from megalite.config.data import DATA_FILES
from megalite.config.describe import settings
from megalite.config.flags import RUN_OPTIONS, basic_help, full_help
from megalite.config.megatron import DERIVED, SHORTHANDS, WORDS

DOCS = Path(__file__).parents[2] / "docs"


def test_basic_help_fits_a_screen() -> None:
    lines = basic_help("pretrain_gpt.py").splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 125
    text = "\n".join(lines)
    for setting in settings().values():
        assert (f" {setting.flags[0]} " in text) == setting.basic
    assert text.startswith("usage: pretrain_gpt.py ")
    assert "\nparallel   --tp N " in text


def test_full_help_has_every_setting() -> None:
    text = full_help("pretrain_gpt.py")
    assert max(map(len, text.splitlines())) <= 110
    for setting in settings().values():
        assert all(flag in text for flag in setting.flags), setting.name
        assert " ".join(setting.help.split()) in " ".join(text.split())
    assert all(flag in text for flag in (*RUN_OPTIONS, *SHORTHANDS, *WORDS, *DERIVED, *DATA_FILES))
    assert "--sequence-parallel, --no-sequence-parallel" in text
    assert "gpt3-175b" in text


def test_data_parallelism_page_names_and_links_settings() -> None:
    text = (DOCS / "data_parallel.md").read_text(encoding="utf-8")
    flags = {flag[2:] for setting in settings().values() for flag in setting.flags}
    shown = set(re.findall(r"--(?:no-)?([a-z0-9][a-z0-9-]+)", text))
    others = {"fp16", "dry-run", "fix", "nproc-per-node", "preset", "world-size"}
    assert shown - flags == others and len(shown & flags) >= 40
    assert "(config.md#data_parallel)" in text and "(config.md#optimizer)" in text
