"""docs/tour.md: short enough to read, and everything that it names exists."""

import ast
import re
from pathlib import Path

from tests.e2e.programs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tour.md").read_text(encoding="utf-8")
MOST_FILES, MOST_LINES = 15, 2500


def stops() -> list[tuple[Path, list[str]]]:
    """(file, classes and functions to read in it; none: all of it) in reading order."""
    found = []
    for heading in re.findall(r"^## \d+\. (.*)$", PAGE, re.MULTILINE):
        path, *names = re.findall(r"`([^`]+)`", heading)
        found.append((REPOSITORY / path, names))
    return found


def lines_of(path: Path, name: str) -> int:
    """Lines of `function`, `Class` or `Class.method`, decorators included."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
        ]
        assert len(inside) == 1, f"{path.name} has no {name}"
        (node,) = inside
    assert isinstance(node, ast.ClassDef | ast.FunctionDef) and node.end_lineno is not None
    return node.end_lineno - min(d.lineno for d in (node, *node.decorator_list)) + 1


def test_tour_is_short() -> None:
    found = stops()
    assert 10 <= len(found) <= MOST_FILES
    assert len({path for path, _ in found}) == len(found)
    lines = sum(
        sum(lines_of(path, name) for name in names) if names else len(path.read_text(encoding="utf-8").splitlines())
        for path, names in found
    )
    assert 1000 <= lines <= MOST_LINES, lines


def test_tour_starts_at_the_entry_and_explains_each_stop() -> None:
    found = stops()
    assert found[0][0].name == "pretrain_gpt.py"
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert all(len(section.partition("\n")[2].split()) >= 15 for section in sections)
