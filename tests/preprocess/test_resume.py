"""Interrupted runs, and how the next run resumes their work."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.checkpoint.files import lock_folder
from megalite.config.errors import ConfigError
from megalite.preprocess import run
from megalite.preprocess.job import Progress
from megalite.preprocess.output import State
from megalite.preprocess.run import preprocess
from tests.preprocess.jobs import Stop, documents, number_job, output_bytes, run_numbers, stop_after, write_numbers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[bytes]:
    """Output of 200 documents in one run."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    run_numbers(folder, write_numbers(tmp_path / "a.jsonl", 200), append_eod=True)
    return output_bytes(folder)


def leave_unfinished(folder: Path, *, after: int = 100, **settings: object) -> Path:
    """Run on a.jsonl and stop after so many documents."""
    job = number_job(folder, folder / "a.jsonl", **({"append_eod": True, "piece_bytes": 100} | settings))
    with pytest.raises(Stop) as stopped:
        preprocess(job, stop_after(after))
    kept = int(stopped.value.__notes__[0].split()[0])
    assert 0 <= kept - after < 10
    assert stopped.value.__notes__ == [
        f"{kept} documents are kept in {folder}/out.unfinished: the same command resumes there, --restart drops them"
    ]
    return folder / "out.unfinished"


@pytest.mark.parametrize("stops", [[199], [3, 4, 120, 121]])
def test_stopped_run_resumes(tmp_path: Path, undisturbed: list[bytes], stops: list[int]) -> None:
    for after in stops:
        leave_unfinished(tmp_path, after=after)
    seen: list[int] = []
    result = preprocess(
        number_job(tmp_path, tmp_path / "a.jsonl", append_eod=True), lambda progress: seen.append(progress.documents)
    )
    assert result.kept_documents == seen[0] >= stops[-1]
    assert result.notice == f"resuming after {seen[0]} documents of an earlier run"
    assert output_bytes(tmp_path) == undisturbed
    assert not (tmp_path / "out.unfinished").exists()


def test_bad_lines_of_the_kept_part_are_counted(tmp_path: Path) -> None:
    lines = ["x", '{"text": "1"}', "", "y", '{"text": "2"}', '{"text": ""}', '{"text": "3"}', "z"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    whole = run_numbers(tmp_path, tmp_path / "a.jsonl")
    expected = output_bytes(tmp_path)
    for after in (1, 2):
        job = number_job(tmp_path, tmp_path / "a.jsonl", piece_bytes=1, restart=after == 1)
        with pytest.raises(Stop):
            preprocess(job, stop_after(after))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: invalid JSON.*stopped by --strict"):
        run_numbers(tmp_path, tmp_path / "a.jsonl", strict=True)
    again = run_numbers(tmp_path, tmp_path / "a.jsonl")
    assert (again.bad, again.faults) == (whole.bad, whole.faults)
    assert [fault.split(":")[1] for fault in again.faults] == ["1", "4", "6", "8"]
    assert output_bytes(tmp_path) == expected


@pytest.mark.parametrize("name", ["0.bin", "0.lengths", "1.bin", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "one byte"])
def test_damaged_work_is_repeated(tmp_path: Path, name: str, damage: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"q": str(i), "a": f"{i} 7"}) for i in range(100)))
    job = number_job(tmp_path, tmp_path / "a.jsonl", json_keys=("q", "a"), piece_bytes=64)
    with pytest.raises(Stop):
        preprocess(job, stop_after(80))
    path = tmp_path / "out.unfinished" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 3
    path.write_bytes(content[: {"flip": len(content), "cut": len(content) // 2 + 1, "one byte": 1}[damage]])
    result = preprocess(job)
    assert result.kept_documents == 0 and ("is damaged and is done again" in result.notice) == (name != "state.json")
    assert documents(tmp_path, "q") == [[i] for i in range(100)]
    assert documents(tmp_path, "a") == [[i, 7] for i in range(100)]


OTHER_JOBS = {
    "append_eod was True, now False": {"append_eod": False},
    "tokenizer's sha256 was [0-9a-f]{64}, now [0-9a-f]{64}": {"vocab_size": 1001},
    "json keys was .'text'., now .'body'.": {"json_keys": ("body",)},
    "text_documents was file, now line": {"text_documents": "line"},
    "max_document_bytes was 8388608, now 1000": {"max_document_bytes": 1000},
}


@pytest.mark.parametrize("message", OTHER_JOBS)
def test_unfinished_work_of_another_job_is_refused(tmp_path: Path, undisturbed: list[bytes], message: str) -> None:
    folder = leave_unfinished(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    settings = {"append_eod": True} | OTHER_JOBS[message]
    with pytest.raises(ConfigError, match=f"holds another job: ({message}); add --restart"):
        run_numbers(tmp_path, tmp_path / "a.jsonl", **settings)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    if "json_keys" not in settings:
        assert run_numbers(tmp_path, tmp_path / "a.jsonl", **settings, restart=True).kept_documents == 0
    assert run_numbers(tmp_path, tmp_path / "a.jsonl", append_eod=True, restart=True).documents == 200
    assert output_bytes(tmp_path) == undisturbed


def test_only_unread_inputs_may_change(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        write_numbers(tmp_path / f"{name}.jsonl", 100, first)
    job = number_job(tmp_path, tmp_path / "[a-z].jsonl", piece_bytes=100)
    with pytest.raises(Stop):
        preprocess(job, stop_after(130))
    write_numbers(tmp_path / "c.jsonl", 50, 300)
    write_numbers(tmp_path / "d.jsonl", 10, 400)
    with pytest.raises(Stop):
        preprocess(job, stop_after(140))
    content = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(content)
    os.utime(tmp_path / "b.jsonl", ns=(1, 1))
    with pytest.raises(
        ConfigError, match=r"holds work on .*/b\.jsonl \(\d+ bytes of 20.*now it is .* \(\d+ bytes of 1970"
    ):
        preprocess(job)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"holds work on .*/a\.jsonl .*now it is .*/b\.jsonl .*; add --restart"):
        preprocess(job)
    write_numbers(tmp_path / "a.jsonl", 100)
    assert run_numbers(tmp_path, tmp_path / "[a-z].jsonl", restart=True).documents == 260


@pytest.mark.parametrize("name", ["a", "b"])
def test_input_changed_while_read_is_an_error(tmp_path: Path, name: str) -> None:
    """The first of two is checked when the second begins, the second at the end."""
    for first, other in enumerate("ab"):
        write_numbers(tmp_path / f"{other}.jsonl", 100, 100 * first)
    seen = []

    def touch(progress: Progress) -> None:
        seen.append(progress.documents)
        os.utime(tmp_path / f"{name}.jsonl", ns=(1, 1))

    message = rf"{name}\.jsonl has changed while it was read; start again with --restart"
    with pytest.raises(ConfigError, match=message):
        preprocess(number_job(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl"), touch)
    assert seen[-1] == (100 if name == "a" else 200)
    assert not (tmp_path / "out_text_document.bin").exists()


def test_failed_run_keeps_earlier_output(tmp_path: Path) -> None:
    run_numbers(tmp_path, write_numbers(tmp_path / "a.jsonl", 3))
    before = output_bytes(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "4"}\n{"text"\n')
    inputs = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match=r"b\.jsonl:2") as error:
        run_numbers(tmp_path, *inputs, strict=True, restart=True)
    assert error.value.__notes__[0].startswith("3 documents are kept in")
    assert output_bytes(tmp_path) == before
    (tmp_path / "b.jsonl").write_text('{"text": "4"}\n')  # fixed: that line had not been accepted
    assert run_numbers(tmp_path, *inputs, strict=True).kept_documents == 3
    assert documents(tmp_path)[3:] == [[4]]
    (tmp_path / "b.jsonl").write_text("x\n")
    with pytest.raises(ConfigError, match="no document"):
        run_numbers(tmp_path, tmp_path / "b.jsonl", restart=True)
    assert not (tmp_path / "out.unfinished").exists() and len(documents(tmp_path)) == 4


def test_output_has_one_process_at_a_time(tmp_path: Path, undisturbed: list[bytes]) -> None:
    folder = leave_unfinished(tmp_path)
    lock = lock_folder(folder)
    assert lock is not None
    with pytest.raises(ConfigError, match=r"out\.unfinished is in use by another process"):
        run_numbers(tmp_path, tmp_path / "a.jsonl", append_eod=True)
    os.close(lock)
    run_numbers(tmp_path, tmp_path / "a.jsonl", append_eod=True)
    assert output_bytes(tmp_path) == undisturbed


def test_other_folder_with_that_name_is_refused(tmp_path: Path) -> None:
    path = write_numbers(tmp_path / "a.jsonl", 3)
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"out\.unfinished contains an unknown file 'thesis\.tex'"):
        run_numbers(tmp_path, path, restart=True)
    assert (tmp_path / "out.unfinished" / "thesis.tex").exists()
    (tmp_path / "out.unfinished" / "thesis.tex").unlink()
    (tmp_path / "out.unfinished").rmdir()
    (tmp_path / "out.unfinished").write_text("x")
    with pytest.raises(ConfigError, match=r"out\.unfinished is not a folder"):
        run_numbers(tmp_path, path)


def test_output_after_a_kill_at_every_call_is_the_same(tmp_path: Path) -> None:
    """A child is killed before each call that changes the disk; unsynced data is lost too."""
    command = [sys.executable, "-m", "tests.preprocess.kill_points", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["points"] > 30 and outcome["wrong"] == []
    assert outcome["kept"] > outcome["points"] // 2


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Replace standard input by a file."""
    with ExitStack() as files:
        yield lambda path: monkeypatch.setattr(sys, "stdin", files.enter_context(path.open()))
        monkeypatch.undo()


def stop_before(patch: pytest.MonkeyPatch, file: str) -> None:
    """End the run when it is about to rename this file."""
    replace = Path.replace

    def check(self: Path, target: str) -> Path:
        if self.name == file:
            raise Stop
        return replace(self, target)

    patch.setattr(Path, "replace", check)


def leave_finished(folder: Path, file: str, *inputs: Path | str, restart: bool = False) -> None:
    """A run killed before it renamed this file and the later ones."""
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, file)
        with pytest.raises(Stop) as stopped:
            run_numbers(folder, *inputs, restart=restart)
    assert "documents are kept in" in stopped.value.__notes__[0]


@pytest.mark.parametrize("renamed", [False, True])
def test_foreign_files_are_replaced_only_with_restart(tmp_path: Path, renamed: bool) -> None:
    """Existing files with the output's name are replaced only with --restart."""
    path = write_numbers(tmp_path / "a.jsonl", 30)
    leave_finished(tmp_path, "0.idx" if renamed else "0.bin", path)
    file = tmp_path / ("out_text_document.bin" if renamed else "out.unfinished/0.bin")
    content = file.read_bytes()[::-1]
    file.write_bytes(content)
    if renamed:
        with pytest.raises(ConfigError, match=r"document\.bin exists; use another"):
            run_numbers(tmp_path, path)
        assert file.read_bytes() == content
    result = run_numbers(tmp_path, path, restart=renamed)
    assert (result.documents, result.kept_documents) == (30, 0)
    assert documents(tmp_path)[7] == [0, 7, 14]


@pytest.mark.parametrize("file", ["0.bin", "0.idx"])
def test_added_input_is_read_and_removed_input_is_refused(tmp_path: Path, file: str) -> None:
    paths = [write_numbers(tmp_path / f"{name}.jsonl", 20, 20 * i) for i, name in enumerate("ab")]
    leave_finished(tmp_path, file, paths[0])
    result = run_numbers(tmp_path, *paths)
    assert (result.documents, result.kept_documents, len(documents(tmp_path))) == (40, 20, 40)
    leave_finished(tmp_path, file, *paths, restart=True)
    with pytest.raises(ConfigError, match=r"now it is missing; add --restart"):
        run_numbers(tmp_path, paths[0])
    assert run_numbers(tmp_path, paths[0], restart=True).documents == 20


def test_resume_reads_standard_input_again(tmp_path: Path, feed: Callable[[Path], None]) -> None:
    first, other = (write_numbers(tmp_path / f"{i}.jsonl", 20, i) for i in (0, 500))
    feed(first)
    leave_finished(tmp_path, "0.idx", "-")
    feed(other)
    with pytest.raises(ConfigError, match="input - has changed"):
        run_numbers(tmp_path, "-")
    feed(first)
    assert run_numbers(tmp_path, "-").documents == 20
    assert documents(tmp_path)[7] == [0, 7, 14]


def test_standard_input_before_other_inputs_is_refused(tmp_path: Path, feed: Callable[[Path], None]) -> None:
    first, other = (write_numbers(tmp_path / f"{i}.jsonl", 20, i) for i in (0, 500))
    feed(first)
    leave_finished(tmp_path, "0.bin", "-", other)
    feed(other)
    with pytest.raises(ConfigError, match="holds work on standard input, which cannot be compared; add --res"):
        run_numbers(tmp_path, "-", other)


def test_paths_may_be_written_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "a.jsonl", 30)
    leave_finished(tmp_path, "0.idx", path)
    monkeypatch.chdir(tmp_path)
    assert "resuming" in preprocess(number_job(tmp_path, f".{os.sep}a.jsonl")).notice


def test_slow_saves_are_rare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A piece takes a second and so does a save: a save follows 19 pieces, whatever checkpoint_seconds is."""
    clock, saved = [0.0], []
    write = State.write

    def tick(progress: Progress) -> None:
        clock[0] += 1.0

    def write_slowly(state: State, path: Path) -> None:
        clock[0] += 1.0
        saved.append(state.outputs[0].documents)
        write(state, path)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(State, "write", write_slowly)
    job = number_job(tmp_path, write_numbers(tmp_path / "a.jsonl", 60), piece_bytes=1, checkpoint_seconds=2.0)
    assert run.preprocess(job, tick).documents == 60
    assert saved == [1, 20, 39, 58, 60]
