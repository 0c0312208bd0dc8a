"""Writes constraints.txt: one version of everything that `make demo` and `make test` install (`make lock`).

pyproject.toml states what is supported; the lock states what was tested. It is made of what is installed in this
environment, for Python 3.11 to 3.13 on Linux x86_64 alike, so it names no index, no path and no build of torch.
"""

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = """\
# What `make` installs: every distribution of the dev extra, at the version that the tests ran with. Written by `make lock`;
# pyproject.toml states the ranges that are supported. Good for Python 3.11 to 3.13 on Linux x86_64.
"""


def needed(python: str) -> set[str]:
    """Distributions that the dev extra installs with that Python, by their canonical names.

    Raises:
        SystemExit: one of them is not installed here, so that nothing is known of it.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    todo = [(Requirement(text), "") for text in (*project["dependencies"], *extras["dev"])]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate(_environment(python, extra)):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras} - {known for other, known in seen if other == name}:
            if name == project["name"]:
                todo += [(Requirement(text), wanted) for text in extras.get(wanted, ())]
                continue
            seen.add((name, wanted))
            todo += [(Requirement(text), wanted) for text in _requirements(name, python)]
    return {name for name, _ in seen}


def _requirements(name: str, python: str) -> list[str]:
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        sys.exit(f"{name}, which Python {python} needs, is not installed here: install the dev extra, then lock again")


def _environment(python: str, extra: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "extra": extra,
    }


def pins(text: str) -> Iterator[tuple[str, str]]:
    """(canonical name, version) of each line."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            yield canonicalize_name(name), version


def lock() -> str:
    """The text of constraints.txt for what is installed here."""
    names = set().union(*map(needed, PYTHONS))
    # Builds of one version, such as 2.13.0+cpu, are left to the index.
    return HEADER + "".join(f"{name}=={Version(distribution(name).version).public}\n" for name in sorted(names))


if __name__ == "__main__":
    LOCK.write_text(lock(), encoding="utf-8")
