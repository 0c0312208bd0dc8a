"""The list of docs/index.md, from mkdocs.yml: a page is added by one line there."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def navigation() -> dict[str, list[str]]:
    """Section -> its pages, relative to docs, in order; the index itself is in none."""
    entries: list[Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return {name: pages for entry in entries if isinstance(entry, dict) for name, pages in entry.items()}


def title(page: str) -> str:
    """The first heading of a page."""
    first = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith("# "), f"docs/{page} begins with {first!r}, not with its title"
    return first.removeprefix("# ")


def index() -> str:
    """A list a section, with the titles that the pages have."""
    parts = []
    for section, pages in navigation().items():
        parts.append(f"## {section}\n")
        parts.append("".join(f"- [{title(page)}]({page})\n" for page in pages))
    return "\n".join(parts)
