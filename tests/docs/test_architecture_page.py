"""docs/architecture.md and CONTRIBUTING.md say what the tree and the architecture test say."""

import re

from tests.e2e.programs import REPOSITORY
from tests.support.layers import ROWS

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_rows_are_those_of_the_test() -> None:
    shown = [
        {name.removeprefix("megalite.") for name in re.findall(r"`([^`]+)`", packages)}
        for packages in re.findall(r"^\| \d+ \| (.*?) \|", PAGE, re.MULTILINE)
    ]
    enforced = [{name.removeprefix("megalite.") for name in row} - {"megalite"} for row in ROWS]
    assert shown == enforced


def test_every_package_has_a_room() -> None:
    section = PAGE.partition("## The rooms")[2].partition("\n## ")[0]
    folders = {path.parent.name for path in (REPOSITORY / "megalite").glob("*/__init__.py")}
    assert {name for name in folders if f"`{name}`" not in section} == set()


def test_the_glossary_has_thirty_terms() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?!term|-)(.+?) \| (.+) \|$", text.partition("## Glossary")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert len(rows) >= 30
    assert len({term for term, _ in rows}) == len(rows)
