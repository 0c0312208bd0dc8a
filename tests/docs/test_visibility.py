"""docs/visibility.md names what there is: tags, settings, files."""

import re
from pathlib import Path

from megalite.config.describe import settings
from megalite.config.training import WRITERS
from megalite.training import goodput
from megalite.training.instruments import _COLUMNS, _LABELS
from megalite.training.writers import TENSORBOARD_TAGS

PAGE = (Path(__file__).parents[2] / "docs" / "visibility.md").read_text(encoding="utf-8")


def test_every_tag_exists() -> None:
    shown = set(re.findall(r"`([a-z-]+-(?:time|bytes|count|factor))`", PAGE))
    assert shown - set(TENSORBOARD_TAGS.values()) == set()
    assert {"forward-compute-time", "all-grads-sync-time", "mem-reserved-bytes", "straggler-factor"} <= shown


def test_every_phase_is_explained() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \| .* \| `.*` \|$", PAGE, flags=re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")}
    assert explained == {_LABELS.get(name, name) for name in _COLUMNS if name != "memory"}


def test_every_setting_exists() -> None:
    flags = {flag for setting in settings().values() for flag in setting.flags}
    page, _, runs = PAGE.partition("## Comparing runs")
    shown = set(re.findall(r"--[a-z][a-z-]+", page + runs.partition("## Secrets")[2])) - {
        "--standalone",
        "--nproc-per-node",
        "--config",
    }
    assert shown - flags == set()
    names = ("timing_log_level", "straggler_threshold", "profile_ranks", "record_memory_history", "wandb_project")
    assert {settings()[name].flags[0] for name in names} <= shown


def test_files_and_writers_are_named() -> None:
    for name in (goodput.FILE, "profile/", *WRITERS.builtin):
        assert name in PAGE
