"""docs/failures.md tells the exit statuses that the code has."""

import json
import re
from dataclasses import asdict

from megalite.config import exit_codes
from megalite.training.stopping import Ending
from tests.e2e.programs import REPOSITORY


def test_the_table_of_statuses() -> None:
    text = (REPOSITORY / "docs" / "failures.md").read_text()
    table = text.partition("## Exit status\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE))
    assert {int(status): meaning for status, meaning in rows.items()} == dict(exit_codes.MEANINGS)


def test_each_status_has_a_meaning() -> None:
    values = {value for value in vars(exit_codes).values() if isinstance(value, int)}
    assert values == set(exit_codes.MEANINGS)


def test_what_is_left_for_scripts() -> None:
    text = (REPOSITORY / "docs" / "failures.md").read_text()
    shown = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert asdict(Ending(**shown)) == shown
    assert shown["exit_code"] == exit_codes.REQUEUE
