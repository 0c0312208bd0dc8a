"""Tables that are made from the code: the pages have them as they are now, and they are complete."""

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


def test_the_pages_are_up_to_date(load: Load) -> None:
    write = load("write")
    for page in write.PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert without_sizes(write.with_tables(text)) == without_sizes(text), f"{page} is out of date: run make docs"


def test_the_page_of_settings(load: Load) -> None:
    text = load("config_page").page()
    assert (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8") == text, "run make docs"
    assert [name for name in settings() if f"- `{name}`" not in text] == []
    assert [flag for flag in RUN_OPTIONS if f"- `{flag}" not in text] == []


def without_sizes(text: str) -> str:
    """The page without its line counts, which every change moves a little."""
    return re.sub(r"<!-- table: sizes -->.*?<!-- end -->", "", text, flags=re.DOTALL)


def test_the_line_counts_of_the_readme(load: Load) -> None:
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


# What composes with what.


def test_features_are_settings_and_differ(load: Load) -> None:
    features = load("composition").FEATURES
    assert len({feature.name for feature in features}) == len(features) >= 40
    assert len({str(sorted(feature.settings.items())) for feature in features}) == len(features)
    for feature in features:
        assert set(feature.settings) <= set(settings()), feature.name


def test_each_feature_is_asked_for_by_its_flags(load: Load) -> None:
    """The flags beside the names are those of the settings that were put to the validator."""
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


def test_what_is_said_to_be_theirs_is_a_setting(load: Load) -> None:
    assert set(load("megatron_flags").THEIRS) <= set(settings())


def test_every_spelling_of_theirs_with_a_value_is_on_the_page(load: Load) -> None:
    flags = load("megatron_flags")
    names = [*DERIVED, *FROM_VALUE]
    names += [f"{settings()[name].flags[0]} {word}" for name in VALUES for word in VALUES[name]]
    names += [flags.their_flag(name) for name in flags.THEIRS]
    assert [name for name in names if f"`{name}`" not in COMING] == []


def test_their_flags_are_read(load: Load) -> None:
    flags = load("megatron_flags")
    for name in flags.THEIRS:
        assert flags.their_flag(name) in settings()[name].flags
        assert len(flags.their_flag(name)) > 5 or name in ("lr", "save", "load", "seed", "sft"), "a short name of ours"
