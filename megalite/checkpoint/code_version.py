"""Which code wrote a checkpoint."""

import platform
from pathlib import Path
from typing import Any

import torch

import megalite


def code_version() -> dict[str, Any]:
    """Versions of megalite, Python and torch, and the git revision where megalite runs from a working copy."""
    return {
        "megalite": megalite.__version__,
        "revision": git_revision(Path(megalite.__file__).parents[1]),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def git_revision(root: Path) -> str | None:
    """The commit checked out in `root`, read from git's own files; None if there is none."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        loose = git / name
        if loose.is_file():
            return loose.read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
