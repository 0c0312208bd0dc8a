"""All pages: each is in the site's navigation, and every link has a target."""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from megalite.cli.main import COMMANDS
from megalite.config.describe import settings
from megalite.config.flags import RUN_OPTIONS
from megalite.config.megatron import STANDS_FOR
from megalite.config.megatron_flags import known_flags
from tests.e2e.programs import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for path in REPOSITORY.glob(pattern)
)


def navigation() -> list[str]:
    """Pages of mkdocs.yml, in order."""
    found: list[str] = []
    for entry in yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]:
        found += [entry] if isinstance(entry, str) else next(iter(entry.values()))
    return found


def test_navigation_has_every_page_once() -> None:
    there = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(navigation()) == there, "give the page a line in mkdocs.yml and run make docs"


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    pages = [page.removesuffix(".md") for page in navigation() if page != "index.md"]
    site = tmp_path / "site"
    assert all((site / page / "index.html").is_file() for page in [*pages, "reference"])
    home, reference = (
        path.read_text(encoding="utf-8") for path in (site / "index.html", site / "reference" / "index.html")
    )
    assert "What composes with what" in home and 'href="tour/"' in home and 'src="images/overview.svg"' in home
    assert 'media="(prefers-color-scheme: dark)" data-md-color-scheme="slate"' in home.replace(
        "data-md-color-media", "media"
    )
    for page in site.rglob("*.html"):  # nothing is fetched from other hosts
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|img|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*", text) == [], page
    assert "find_checkpoint" in reference and "fills in" in reference
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_readme_links_to_the_first_pages() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for page in ("index", "walkthrough", "from_megatron", "api", "architecture", "composition"):
        assert f"](docs/{page}.md)" in text
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        assert f"]({name})" in text


def without_code(text: str) -> str:
    """The page without code blocks and spans."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def links(text: str) -> Iterator[str]:
    """Targets of links and images on this site."""
    for target in re.findall(r"\]\(([^()\s]+)\)", without_code(text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def slug(heading: str) -> str:
    """The anchor that GitHub generates for a heading."""
    plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page; repeated headings get a number."""
    found: dict[str, int] = {}
    names = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE):
        name = slug(heading)
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return frozenset(names)


def broken(page: Path, text: str) -> list[str]:
    """Links of a page without a target."""
    wrong = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        ends_well = found.exists() and found.is_relative_to(REPOSITORY)
        if not ends_well or (anchor and (found.suffix != ".md" or anchor not in anchors(found))):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_have_targets(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


def test_every_page_starts_with_a_command() -> None:
    """Before its first section, except on lists of pages and of other systems."""
    for page in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        opening = page.read_text(encoding="utf-8").partition("\n## ")[0]
        assert page.name in ("index.md", "origins.md") or re.search("^```(console|bash)$", opening, re.MULTILINE), page


def test_every_page_has_one_title() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page


def test_named_files_exist() -> None:
    """A path in a code span of a page about this repository exists at the root, or in megalite/."""
    gone = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for path in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|ya?ml|md))`", text):
            if path.startswith(("runs/", "tokenizer/", "plan")):
                continue
            if not any((root / path).exists() for root in (REPOSITORY, REPOSITORY / "megalite", page.parent)):
                gone.append(f"{page.name}: {path}")
    assert gone == []


def test_named_flags_exist() -> None:
    """Flags in a page's code spans are megalite's, Megatron-LM's, torchrun's, or those of the programs listed here."""
    others = {"--apply_chat_template", "--debug", "--model_args", "--write-preferences"}
    known = {*RUN_OPTIONS, *STANDS_FOR, *known_flags(), *get_args_parser()._option_string_actions, *others}
    known |= {flag for setting in settings().values() for flag in setting.flags}
    commands = list(COMMANDS.values())
    for command in commands:
        known |= set(command.spellings)
        commands += command.commands.values()
    unknown = {}
    for page in (REPOSITORY / "README.md", *DOCS.glob("*.md")):
        spans = " ".join(re.findall(r"`[^`\n]*`", page.read_text(encoding="utf-8")))
        named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", spans) if not flag.endswith("-")}
        if wrong := {flag for flag in named if flag not in known and flag.replace("--no-", "--") not in known}:
            unknown[page.name] = wrong
    assert unknown == {}
