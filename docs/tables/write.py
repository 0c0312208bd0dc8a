"""Writes docs/config.md, and the tables of README.md and docs that are made from the code: `python docs/tables/write.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between them is replaced. `tests/docs/test_tables.py`
compares the pages with what this script makes.
"""

import re
from collections.abc import Callable

import chains
import composition
import config_page
import megatron_flags
import pages
import sc21
import sizes

ROOT = pages.ROOT
TABLES: dict[str, Callable[[], str]] = {
    "chains": chains.table,
    "composition": composition.readme_table,
    "composition, flags": composition.flags_table,
    "composition, refused": composition.refused_table,
    "composition, counted": composition.counted,
    "Megatron-LM, settings": megatron_flags.settings_table,
    "Megatron-LM, other flags": megatron_flags.other_flags_table,
    "pages": pages.index,
    "SC'21, tables 1 and 2": sc21.table,
    "sizes": sizes.table,
}
PAGES = ("README.md", "docs/index.md", "docs/composition.md", "docs/from_megatron.md", "benchmarks/results/README.md")
_PLACE = re.compile(r"(?<=<!-- table: )(.+?)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The page with its tables as they are now."""
    return _PLACE.sub(lambda place: f"{place[1]}{place[2]}\n{TABLES[place[1]]()}\n", text)


def main() -> None:
    """Write the pages again."""
    (ROOT / "docs" / "config.md").write_text(config_page.page(), encoding="utf-8")
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
