"""Which code wrote a checkpoint, told from git's own files."""

import subprocess
from pathlib import Path

import torch

from megalite.checkpoint.save import code_version, git_revision


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    git(tmp_path, "init", "--initial-branch", "a/b")
    assert git_revision(tmp_path) is None  # no commit yet
    git(tmp_path, "commit", "--allow-empty", "--message", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_revision(tmp_path) == head
    git(tmp_path, "pack-refs", "--all")
    assert git_revision(tmp_path) == head
    git(tmp_path, "checkout", "--detach")
    assert git_revision(tmp_path) == head


def test_versions() -> None:
    found = code_version()
    assert found["torch"] == str(torch.__version__) and found["megalite"] and found["python"]
