"""How large the project is: `python -m tests.support.measures`. The ceilings fall when it shrinks; a feature alone raises one."""

import statistics
from collections import Counter
from pathlib import Path

from tests.support.layers import own_imports, read_modules

ROOT = Path(__file__).parents[2]
SMALL = 60
"""Lines; a shorter file with one importer belongs to its importer."""
CEILINGS = {
    "megalite: lines": 77_844,
    "megalite: files": 307,
    "megalite: longest file": 500,
    "megalite: small files with one importer": 0,
    "tests: lines": 70_622,
    "benchmarks: lines": 7_970,
    "docs: words": 35_461,
}


def measures() -> dict[str, int]:
    """The numbers that `CEILINGS` bounds, and the median file."""
    lines = {folder: _lines(folder) for folder in ("megalite", "tests", "benchmarks")}
    rooms = sorted(count for path, count in lines["megalite"].items() if path.name != "__init__.py")
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *ROOT.glob("docs/*.md")]
    return {
        "megalite: lines": sum(lines["megalite"].values()),
        "megalite: files": len(lines["megalite"]),
        "megalite: median file": round(statistics.median(rooms)),
        "megalite: longest file": rooms[-1],
        "megalite: small files with one importer": len(small_files()),
        "tests: lines": sum(lines["tests"].values()),
        "benchmarks: lines": sum(lines["benchmarks"].values()),
        "docs: words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }


def small_files() -> list[str]:
    """Modules below `SMALL` lines that one module alone imports."""
    modules = read_modules(ROOT)
    known = {module.name for module in modules}
    importers = Counter(name for module in modules for name in own_imports(module, known))
    return [
        module.name
        for module in modules
        if module.name.startswith("megalite.")
        and not module.is_package
        and module.text.count("\n") < SMALL
        and importers[module.name] == 1
    ]


def _lines(folder: str) -> dict[Path, int]:
    return {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py")}


if __name__ == "__main__":
    for name, number in measures().items():
        print(f"{number:7,}  {name}")
    print("\n".join(small_files()))
