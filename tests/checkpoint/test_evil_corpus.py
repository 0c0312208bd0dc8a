"""Malicious checkpoints: no code runs, nothing is written, nothing hangs, memory stays bounded, and the error names the file."""

import json
import sys
from pathlib import Path

import pytest

from tests.checkpoint.samples import SOLO, assert_holds, find, save_as

if sys.platform != "linux":
    pytest.skip("limits memory and reads /proc as Linux has it", allow_module_level=True)

from tests.checkpoint.evil_child import CORPUS, WATCH
from tests.e2e.forked import train_forked


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Name -> problems; a checkpoint that crashed the process has no entry."""
    child = train_forked(1, tmp_path_factory.mktemp("evil"), seconds=240, command="tests.checkpoint.evil_child:main")
    lines = [json.loads(line) for line in child.out.splitlines()]
    done = {line["name"]: line["problems"] for line in lines}
    missing = [name for name in CORPUS if name not in done]
    if missing:
        done[missing[0]] = [f"the process ended here: {child.err[-3000:]}"]
    return done


def test_watch_detects_forbidden_actions(reports: dict[str, list[str]]) -> None:
    assert reports[WATCH] == []


@pytest.mark.parametrize("name", CORPUS)
def test_malicious_checkpoint_is_handled_safely(reports: dict[str, list[str]], name: str) -> None:
    assert name in reports, "an earlier checkpoint ended the process"
    assert reports[name] == [], "\n".join(reports[name])


def test_saving_does_not_follow_links(tmp_path: Path) -> None:
    """The folder has links to the outside under every name that saving uses."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    save_as(run, SOLO, step=1, seed=1)
    (outside / "deeper").mkdir(parents=True)
    for name in ("latest", "manifest.json", "deeper/part-0.json"):
        (outside / name).write_text("precious")
    (run / "latest").unlink()
    for name, to in {
        "latest": "latest",
        ".latest.new": "latest",
        ".tmp-step-2": "deeper",
        ".tmp-step-9": ".",
        "step-0000002": ".",
        "step-0000003.replaced": "deeper",
    }.items():
        (run / name).symlink_to(outside / to)
    save_as(run, SOLO, step=2, seed=2)
    found = {str(path.relative_to(outside)): path.is_dir() or path.read_text() for path in outside.rglob("*")}
    assert found == {
        "deeper": True,
        "latest": "precious",
        "manifest.json": "precious",
        "deeper/part-0.json": "precious",
    }
    assert (run / "latest").read_text() == "step-0000002\n" and not (run / "latest").is_symlink()
    assert_holds(find(run, step=2), seed=2)
