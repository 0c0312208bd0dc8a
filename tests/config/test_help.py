"""Help fits a screen and has everything."""

from pathlib import Path

from megalite.config.data import DATA_FILES
from megalite.config.describe import settings
from megalite.config.flags import RUN_OPTIONS
from megalite.config.help import basic_help, full_help
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


def test_full_help_has_everything() -> None:
    text = full_help("pretrain_gpt.py")
    assert max(map(len, text.splitlines())) <= 110
    for setting in settings().values():
        assert all(flag in text for flag in setting.flags), setting.name
        assert " ".join(setting.help.split()) in " ".join(text.split())
    assert all(flag in text for flag in (*RUN_OPTIONS, *SHORTHANDS, *WORDS, *DERIVED, *DATA_FILES))
    assert "--sequence-parallel, --no-sequence-parallel" in text
    assert "gpt3-175b" in text


def test_the_page_about_data_parallelism_names_every_setting_of_it() -> None:
    text = (DOCS / "data_parallel.md").read_text(encoding="utf-8")
    kinds = ("sgd_", "lamb_", "muon_", "soap_", "adam_", "exp_avg", "freeze_", "onebit_", "local_step", "variance_")
    names = [
        setting.flags[0][2:]
        for name, setting in settings().items()
        if setting.section == "data_parallel" or name.startswith(kinds)
    ]
    assert len(names) == 45
    assert [name for name in names if f"--{name}" not in text and f"--no-{name}" not in text] == []
