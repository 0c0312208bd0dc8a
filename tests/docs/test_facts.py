"""Lists in the pages equal the code: exit statuses, topics of the doctor, tags and phases, packages."""

import json
import re
from dataclasses import asdict

import pytest

from megalite.cli.main import main
from megalite.config import errors
from megalite.config.training import WRITERS
from megalite.training import records
from megalite.training.instruments import _COLUMNS, _LABELS
from megalite.training.stopping import Ending
from megalite.training.writers import TENSORBOARD_TAGS
from tests.cli.test_doctor import TOPICS
from tests.e2e.programs import REPOSITORY
from tests.support.layers import ROWS


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    return page(name).partition(f"## {heading}\n")[2].partition("\n## ")[0]


# docs/failures.md


def test_pages_list_the_exit_statuses() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", section("docs/failures.md", "Exit status"), re.MULTILINE))
    assert {int(status): meaning for status, meaning in rows.items()} == dict(errors.MEANINGS)
    assert {value for name, value in vars(errors).items() if name[0].isupper() and isinstance(value, int)} == {
        *errors.MEANINGS
    }


def test_documented_exit_json_is_valid() -> None:
    shown = json.loads(page("docs/failures.md").partition("```json\n")[2].partition("```")[0])
    assert asdict(Ending(**shown)) == shown
    assert shown["exit_code"] == errors.REQUEUE


# docs/doctor.md


def test_topics_and_error_of_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    text = page("docs/doctor.md")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == TOPICS
    (error,) = re.findall(r"^error: .*(?:\n- .*)*$", text, re.MULTILINE)
    assert main(["train", "--num-layer", "4"]) == 2
    assert capsys.readouterr().err == f"{error}\n"


# docs/visibility.md


def test_tags_and_phases_are_documented() -> None:
    text = page("docs/visibility.md")
    shown = set(re.findall(r"`([a-z-]+-(?:time|bytes|count|factor))`", text))
    assert shown - set(TENSORBOARD_TAGS.values()) == set()
    assert {"forward-compute-time", "all-grads-sync-time", "mem-reserved-bytes", "straggler-factor"} <= shown
    rows = re.findall(r"^\| ([a-z, ]+) \| .* \| `.*` \|$", text, flags=re.MULTILINE)
    explained = {name for row in rows for name in row.split(", ")}
    assert explained == {_LABELS.get(name, name) for name in _COLUMNS if name != "memory"}
    assert [name for name in (records.SESSIONS, "profile/", *WRITERS.builtin) if name not in text] == []


# docs/architecture.md and CONTRIBUTING.md


def test_import_rows_are_documented() -> None:
    shown = [
        {name.removeprefix("megalite.") for name in re.findall(r"`([^`]+)`", packages)}
        for packages in re.findall(r"^\| \d+ \| (.*?) \|", page("docs/architecture.md"), re.MULTILINE)
    ]
    assert shown == [{name.removeprefix("megalite.") for name in row} - {"megalite"} for row in ROWS]


def test_packages_and_terms_are_documented() -> None:
    packages = section("docs/architecture.md", "The packages")
    folders = {path.parent.name for path in (REPOSITORY / "megalite").glob("*/__init__.py")}
    assert {name for name in folders if f"`{name}`" not in packages} == set()
    rows = re.findall(r"^\| (?!term|-)(.+?) \| (.+) \|$", section("CONTRIBUTING.md", "Glossary"), re.MULTILINE)
    assert len(rows) == len({term for term, _ in rows}) >= 30
