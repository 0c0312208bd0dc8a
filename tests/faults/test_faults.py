"""Runs that are killed at ten instants, of as many sorts, and what finds out whether something was lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.samples import SOLO, save_as
from tests.faults.compare import check_records, check_state, open_sound
from tests.faults.scenarios import LAYOUTS, SAVINGS
from tests.faults.trap import WRITES

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the victims' files in /proc")


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_no_kill_changes_a_run(tmp_path: Path) -> None:
    """Every layout, and every way to save: ten kills, no loss, no hang, the same bits.

    The seed is one whose first ten kills are of many kinds.
    """
    command = [sys.executable, "-m", "tests.faults", "10", "--seed", "10", "--folder", str(tmp_path / "runs")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failures"] == []
    assert report["kills"] >= 10 and len(report["by_kind"]) >= 8, report
    met = [name.split("; ") for name in report["by_run"]]
    assert {layout for layout, _ in met} == {layout.name for layout in LAYOUTS}
    assert {saving for _, saving in met} == {saving.name for saving in SAVINGS}
    assert report["tensors_compared"] > 70 * report["runs"]


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_no_stop_leaves_anything() -> None:
    """Five starts, most of them stopped by a signal: nothing is lost and nothing is left. `make test-cycles` makes more."""
    command = [sys.executable, "-m", "tests.faults.cycles", "5", "--seed", "0"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["cycles"] == 5 and not report["failure"]
    assert sum(count for name, count in report["ended"].items() if name.endswith("saved")) >= 2, report


BEFORE_THE_MEETING = """
import sys
from pathlib import Path
from tests.faults.corpus import build
from tests.faults.life import Blow, live, prepare_to_fork
from tests.faults.scenarios import LAYOUTS, SAVINGS
from tests.faults.story import Laboratory

prepare_to_fork()
root = Path(sys.argv[1])
command = Laboratory(root, build(root), 0).command(LAYOUTS[0], SAVINGS[0], root / "run")
life = live(2, command, root / "run", root / "log", Blow((1,), after_seconds=0.0))
print(life.hung, life.launcher_ended, life.statuses)
"""


def test_peers_of_one_that_never_came_are_ended_as_a_launcher_ends_them(tmp_path: Path) -> None:
    """They wait where the ranks meet: that is no hang."""
    command = [sys.executable, "-c", BEFORE_THE_MEETING, str(tmp_path)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True, timeout=250)
    assert done.stdout.splitlines()[-1:] == ["() True [-9, -9]"], f"{done.stdout}\n{done.stderr}"


SAVE = """
import os, shutil, sys
from pathlib import Path
from tests.faults.trap import Point, Trap

folder, note = Path(sys.argv[1]), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
point = Point(sys.argv[3], sys.argv[4], int(sys.argv[5])) if len(sys.argv) > 3 else None
Path("elsewhere").mkdir(exist_ok=True)
trap = Trap(folder, point, note)
trap.set()
Path("elsewhere").joinpath("file").write_bytes(b"not counted")
(folder / "aside").mkdir()
for name in ("a", "b"):
    file = os.open(folder / "aside" / name, os.O_WRONLY | os.O_CREAT)
    os.write(file, b"12345678")
    os.pwritev(file, [b"12", b"345678"], 8)
    os.fsync(file)
    os.close(file)
(folder / "aside").rename(folder / "b")
(folder / "b" / "a").replace(folder / "b" / "weights.safetensors")
(folder / "b" / "weights.safetensors").read_bytes()
(folder / "b" / "weights.safetensors").unlink()
(folder / "b" / "nothing").unlink(missing_ok=True)
shutil.rmtree(folder / "b")
trap.tell()
"""
"""A program like a save, a load and a removal: the folder, the note and the point are its arguments."""


def _killed(tmp_path: Path, *point: str) -> tuple[int, dict[str, int], str, dict[str, bytes]]:
    """The status, counts and last words of `SAVE`, and the files that it leaves."""
    folder, note = tmp_path / "folder", tmp_path / "note"
    folder.mkdir()
    command = [sys.executable, "-c", SAVE, str(folder), str(note), *point]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    told = json.loads(note.read_text())
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return done.returncode, told["counts"], told["died"], files


def test_trap_counts_what_happens_in_its_folder(tmp_path: Path) -> None:
    status, counts, died, files = _killed(tmp_path)
    assert (status, died, files) == (0, "", {})
    assert counts == {
        "mkdir": 1,
        "open": 2,
        "write": 2,
        "pwritev": 2,
        "fsync": 2,
        "rename": 1,
        "replace": 1,
        "load": 1,
        "removal": 1,
        "unlink": 2,
        "rmdir": 1,
    }


WHOLE, HALF = b"1234567812345678", b"12345678"
LEFT: dict[tuple[str, str, str], dict[str, bytes]] = {
    ("mkdir", "before", "1"): {},
    ("open", "before", "1"): {},
    ("open", "after", "2"): {"aside/a": WHOLE, "aside/b": b""},
    ("write", "before", "2"): {"aside/a": WHOLE, "aside/b": b""},
    ("write", "inside", "1"): {"aside/a": b"1234"},
    ("write", "after", "1"): {"aside/a": HALF},
    ("pwritev", "inside", "2"): {"aside/a": WHOLE, "aside/b": HALF + b"1234"},
    ("fsync", "after", "1"): {"aside/a": WHOLE},
    ("rename", "before", "1"): {"aside/a": WHOLE, "aside/b": WHOLE},
    ("rename", "after", "1"): {"b/a": WHOLE, "b/b": WHOLE},
    ("replace", "after", "1"): {"b/weights.safetensors": WHOLE, "b/b": WHOLE},
    ("load", "before", "1"): {"b/weights.safetensors": WHOLE, "b/b": WHOLE},
    ("removal", "before", "1"): {"b/weights.safetensors": WHOLE, "b/b": WHOLE},
    ("removal", "after", "1"): {"b/b": WHOLE},
    ("unlink", "after", "1"): {"b/b": WHOLE},
    ("unlink", "after", "2"): {},
    ("rmdir", "before", "1"): {},
}


@pytest.mark.parametrize("point", LEFT, ids=" ".join)
def test_trap_springs_where_it_is_set(tmp_path: Path, point: tuple[str, str, str]) -> None:
    status, counts, died, files = _killed(tmp_path, *point)
    assert status == -9
    assert files == LEFT[point]
    assert died == f"{point[1]} {point[0]}"
    assert counts[point[0]] == int(point[2])


def test_every_write_can_be_cut_off() -> None:
    assert {name for name in dir(os) if name.removeprefix("p").startswith("write")} == set(WRITES)


def _row(step: int, loss: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "consumed_samples": 4 * step}


def test_one_bit_of_a_loss_is_seen() -> None:
    reference = [_row(1, 0.1), _row(2, 0.3)]
    check_records([_row(1, 0.1)], reference, 0.0)
    check_records([_row(1, 0.1), _row(2, 0.1 + 0.2)], reference, 1e-9)
    with pytest.raises(AssertionError, match=r"step 2: loss is 0\.30000000000000004, uninterrupted 0\.3$"):
        check_records([_row(1, 0.1), _row(2, 0.1 + 0.2)], reference, 0.0)
    with pytest.raises(AssertionError, match="step is 2"):
        check_records([_row(2, 0.3)], reference, 0.0)
    with pytest.raises(AssertionError, match="3 steps"):
        check_records([*reference, _row(3, 0.2)], reference, 0.0)


def test_another_state_is_seen(tmp_path: Path) -> None:
    for name, seed in (("ours", 1), ("same", 1), ("other", 2)):
        save_as(tmp_path / name, SOLO, step=3, seed=seed)
    ours, same, other = (open_sound(tmp_path / name, 3) for name in ("ours", "same", "other"))
    assert check_state(ours, same, 0.0) == len(ours.keys())
    with pytest.raises(AssertionError, match="differs from the uninterrupted run's"):
        check_state(ours, other, 0.0)
    with pytest.raises(AssertionError, match="apart"):
        check_state(ours, other, 1e-9)
