"""Tables generated from code: the pages are up to date, and the tables are complete."""

import importlib
import re
from collections.abc import Callable
from types import ModuleType

import pytest

from megalite.config.describe import settings
from megalite.config.flags import RUN_OPTIONS, parse_arguments
from megalite.config.megatron import DERIVED, FROM_VALUE, VALUES
from tests.e2e.programs import REPOSITORY

SCRIPTS = REPOSITORY / "docs" / "tables"
COMING = (REPOSITORY / "docs" / "from_megatron.md").read_text(encoding="utf-8")

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module as `python docs/tables/write.py` does."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def test_tables_are_up_to_date(load: Load) -> None:
    write = load("write")
    for page in write.PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert without_sizes(write.with_tables(text)) == without_sizes(text), f"{page} is out of date: run make docs"


def test_settings_page_is_up_to_date(load: Load) -> None:
    text = load("config_page").page()
    assert (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8") == text, "run make docs"
    assert [name for name in settings() if f"- `{name}`" not in text] == []
    assert [flag for flag in RUN_OPTIONS if f"- `{flag}" not in text] == []


def without_sizes(text: str) -> str:
    """The page without its line counts, which every change alters a little."""
    return re.sub(r"<!-- table: sizes -->.*?<!-- end -->", "", text, flags=re.DOTALL)


def test_line_counts_of_the_readme(load: Load) -> None:
    """Every package is in one of the halves, and each count is within 5 percent (or 60 lines) of the code's."""
    sizes = load("sizes")
    folders = {path.parent.name for path in (REPOSITORY / "megalite").glob("*/__init__.py")}
    assert sorted((*sizes.CORE, *sizes.TOOLS)) == sorted(folders)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    said = {name: int(count.replace(",", "")) for name, count in re.findall(r"`(\w+)` ([\d,]+)[,| ]", readme)}
    found = {name: sizes.lines(name) for name in folders}
    far = {
        name: (said.get(name), count)
        for name, count in found.items()
        if abs(said.get(name, 0) - count) > max(60, count * 0.05)
    }
    assert far == {}, "run make docs"


def test_every_table_is_on_a_page(load: Load) -> None:
    write = load("write")
    named = [
        name
        for page in write.PAGES
        for name in re.findall("<!-- table: (.*?) -->", (REPOSITORY / page).read_text(encoding="utf-8"))
    ]
    assert sorted(named) == sorted(write.TABLES)


# Combinations of features.


def test_features_are_distinct_settings(load: Load) -> None:
    features = load("composition").FEATURES
    assert len({feature.name for feature in features}) == len(features) >= 40
    assert len({str(sorted(feature.settings.items())) for feature in features}) == len(features)
    for feature in features:
        assert set(feature.settings) <= set(settings()), feature.name


def test_flags_of_each_feature_equal_its_settings(load: Load) -> None:
    """The flags after the names are those of the validated settings."""
    composition = load("composition")
    for feature in composition.FEATURES:
        given = parse_arguments(feature.flags.split())
        found = {
            name: value
            for name, value in feature.settings.items()
            if getattr(getattr(given.config, settings()[name].section), name) != value
        }
        allowed = {"hidden_dropout"} if feature.name == "dropout" else set()
        assert set(found) <= allowed, feature.name


def test_each_feature_works_alone(load: Load) -> None:
    composition = load("composition")
    assert {
        feature.name: why
        for feature in composition.FEATURES
        if (why := composition.refusal(feature.name, feature.name)) is not None
    } == {}


# Coming from Megatron-LM.


def test_megatron_flags_map_to_settings(load: Load) -> None:
    assert set(load("megatron_flags").THEIRS) <= set(settings())


def test_page_has_every_megatron_spelling_with_a_value(load: Load) -> None:
    flags = load("megatron_flags")
    names = [*DERIVED, *FROM_VALUE]
    names += [f"{settings()[name].flags[0]} {word}" for name in VALUES for word in VALUES[name]]
    names += [flags.their_flag(name) for name in flags.THEIRS]
    assert [name for name in names if f"`{name}`" not in COMING] == []


def test_megatron_flags_are_accepted(load: Load) -> None:
    flags = load("megatron_flags")
    for name in flags.THEIRS:
        assert flags.their_flag(name) in settings()[name].flags
        assert len(flags.their_flag(name)) > 5 or name in ("lr", "save", "load", "seed", "sft"), "a short megalite name"
