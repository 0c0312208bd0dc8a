"""Failures while saving: one error on all ranks, every rank's stream consumed, old checkpoints unchanged."""

import dataclasses
import errno
import os
import re
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite.checkpoint.folders as commit
import megalite.checkpoint.safetensors_file as safetensors_file
from megalite.checkpoint.load import find_checkpoint
from megalite.checkpoint.safetensors_file import SafetensorsWriter
from megalite.checkpoint.safetensors_header import Record
from megalite.checkpoint.save import SavedTensor, git_revision, preamble, save_checkpoint, steps_to_remove
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec
from megalite.watchdog.heartbeat import Heartbeat
from tests.checkpoint.inspecting import flip_last_bit
from tests.checkpoint.samples import CPU, SOLO, assert_holds, find, on_threads, save_as

Plan = Sequence[SavedTensor]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same_error(results: list[Any]) -> str:
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert len({str(result) for result in results}) == 1, results
    return str(results[0])


def save_plan(
    folder: Path,
    group: Group,
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    tokenizer: str | None = None,
    counters: Any = None,
    log: Callable[[str], None] = pytest.fail,
) -> Path:
    kernels = {"rmsnorm": "torch"}
    about = preamble(2, counters=counters or {}, config={}, layout={}, tokenizer=tokenizer, kernels=kernels)
    return save_checkpoint(folder, about, plan=plan, tensors=tensors, world=group, log=log)


def weight(name: str, shape: tuple[int, ...], rows: tuple[int, int], dtype: torch.dtype = torch.float32) -> SavedTensor:
    bounds = (rows, *((0, size) for size in shape[1:]))
    return SavedTensor(key_group="weight", spec=ShardSpec(name=name, global_shape=shape, slice=bounds), dtype=dtype)


def failing_write(fail_at: int, calls: list[int], partly: bool, code: int) -> Callable[[int, memoryview], int]:
    real, lock = os.write, threading.Lock()

    def write(descriptor: int, data: memoryview) -> int:
        with lock:
            calls[0] += 1
            number = calls[0]
        if number >= fail_at:
            if partly and number == fail_at and len(data) > 1:
                return real(descriptor, data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        return real(descriptor, data)

    return write


@pytest.mark.parametrize("partly", [False, True])
def test_disk_full_at_any_write_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partly: bool) -> None:
    """If any write fails, every rank gets the same error with the bytes needed and free and consumes its tensors, nothing
    of the save is left, and the earlier checkpoint still verifies."""
    folder = tmp_path / "run"
    save_as(folder, SOLO, step=1, seed=1)
    taken: list[int] = []
    needed: set[str] = set()

    def counted(data: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from data
        taken.append(len(data))  # reached only if the caller consumes the stream to its end

    fail_at = 0
    while True:
        fail_at += 1
        taken.clear()
        calls = [0]
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", failing_write(fail_at, calls, partly, errno.ENOSPC))
            results = on_threads(2, lambda group: save_as(folder, group, step=2, seed=2, stream=counted))
        assert len(taken) == 2
        if set(results) == {folder / "step-0000002"}:
            break  # no failure, or one after the commit, in writing `latest`
        message = same_error(results)
        assert "No space left on device" in message and str(folder) in message
        assert "free there: " in message and "of 2)" in message
        assert re.search(r"(-0000[01]\.safetensors|part-[01]\.json|manifest\.json): No space", message), message
        needed.add(message.partition("needs ")[2].partition(" bytes")[0])
        assert names(folder) == ["latest", "step-0000001"]
        assert_holds(find(folder, log=pytest.fail), seed=1)
    assert fail_at > 20, "a save makes many writes"
    assert calls[0] >= fail_at and (folder / "latest").read_text() == "step-0000001\n"
    written = (folder / "step-0000002").glob("*.safetensors")
    assert needed == {f"{sum(path.stat().st_size for path in written):,}"}
    assert names(folder) == ["latest", "step-0000001", "step-0000002"]
    assert_holds(find(folder), seed=2)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_other_system_errors_are_raised_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """fsync fails on one rank only; both raise."""
    real, lock, calls = os.fsync, threading.Lock(), [0]

    def fsync(descriptor: int) -> None:
        with lock:
            calls[0] += 1
            fail = calls[0] == 4
        if fail:
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    message = same_error(on_threads(2, lambda group: save_as(tmp_path / "run", group, step=2)))
    assert os.strerror(code) in message
    assert names(tmp_path / "run") == []


def test_error_of_the_stream_is_raised_unchanged(tmp_path: Path) -> None:
    def stream(data: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield data[0]
        raise KeyError("a bug in the trainer")

    with pytest.raises(KeyError, match="a bug in the trainer"):
        save_as(tmp_path, SOLO, step=2, stream=stream)
    save_as(tmp_path, SOLO, step=2)
    assert names(tmp_path) == ["latest", "step-0000002"]


def test_parts_that_do_not_tile_are_an_error(tmp_path: Path) -> None:
    for second, fault in (((3, 5), "leave a gap"), ((1, 5), "overlap"), ((0, 2), "overlap and leave a gap")):
        ranges = [(0, 2), second] if fault != "overlap and leave a gap" else [(0, 2), (0, 3)]

        def save(group: Group, ranges: list[tuple[int, int]] = ranges) -> Path:
            mine = weight("w", (5, 3), ranges[group.rank])
            return save_plan(tmp_path, group, [mine], [torch.ones(mine.spec.shape)])

        message = same_error(on_threads(2, save))
        assert f"weight:w: its 2 parts {fault} in shape (5, 3)" in message
        assert names(tmp_path) == []


def test_ranks_with_different_specs_of_a_tensor_are_an_error(tmp_path: Path) -> None:
    def save(group: Group) -> Path:
        dtype = torch.float32 if group.rank else torch.float16
        mine = weight("w", (4,), (2 * group.rank, 2 * group.rank + 2), dtype)
        return save_plan(tmp_path, group, [mine], [torch.ones(2, dtype=dtype)])

    assert "rank 1 wrote F32 of global shape [4], an earlier rank F16" in same_error(on_threads(2, save))


def test_stream_unlike_the_plan_is_an_error(tmp_path: Path) -> None:
    plan = [weight("a", (2, 3), (0, 2)), weight("b", (4,), (0, 4))]
    good = [torch.ones(2, 3), torch.ones(4)]
    for tensors, reason in (
        (good[:1], "planned 2 tensors and gave 1"),
        ([*good, good[0]], "planned 2 tensors and gave 3"),
        ([good[1], good[0]], r"a: the plan says F32 \[2, 3\]"),
        ([good[0].double(), good[1]], "the tensor given is torch.float64"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            save_plan(tmp_path, SOLO, plan, tensors)
        assert names(tmp_path) == []
    save_plan(tmp_path, SOLO, plan, good)


def test_invalid_plan_is_an_error(tmp_path: Path) -> None:
    a = weight("a", (2,), (0, 2))
    for plan, reason in (
        ([weight("../a", (2,), (0, 2))], "not a tensor key"),
        ([SavedTensor(key_group="optimizer", spec=a.spec, dtype=torch.float32)], "not a tensor key"),
        ([weight("a", (2,), (0, 2), torch.complex64)], "torch.complex64 cannot be saved"),
    ):
        for rank_with_it in (0, 1):

            def save(group: Group, plan: Plan = plan, rank_with_it: int = rank_with_it) -> Path:
                return save_plan(tmp_path, group, plan if group.rank == rank_with_it else [], [])

            assert reason in same_error(on_threads(2, save))
    for more in ({"counters": {"loss": float("nan")}}, {"counters": {"path": tmp_path}}, {"tokenizer": "gpt2"}):
        with pytest.raises(CheckpointError, match=r"plain JSON|tokenizer"):
            save_plan(tmp_path, SOLO, [a], [torch.ones(2)], **more)
    assert names(tmp_path) == []


def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = []

    def stream(data: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for tensor in data:
            most.append(sum(reference() is not None for reference in alive))
            fresh = tensor.clone()
            alive.append(weakref.ref(fresh))
            yield fresh
            del fresh

    save_as(tmp_path, SOLO, step=1, stream=stream)
    assert len(most) == 8 and max(most) == 0


def test_saving_the_same_step_replaces_it(tmp_path: Path) -> None:
    on_threads(3, lambda group: save_as(tmp_path, group, step=2, seed=1))
    save_as(tmp_path, SOLO, step=2, seed=2)
    assert names(tmp_path) == ["latest", "step-0000002"]
    assert_holds(find(tmp_path), seed=2)
    assert len(list((tmp_path / "step-0000002").iterdir())) == 3


def test_leftovers_of_crashes_are_removed_or_restored(tmp_path: Path) -> None:
    save_as(tmp_path, SOLO, step=1, seed=1)
    save_as(tmp_path, SOLO, step=2, seed=2)
    (tmp_path / ".tmp-step-9").mkdir()
    (tmp_path / ".tmp-step-9" / "weights-00000.safetensors").write_bytes(b"x" * 100)
    (tmp_path / ".latest.new").write_text("half")
    (tmp_path / "step-0000001").rename(tmp_path / "step-0000001.replaced")  # killed before the new one was in place
    save_as(tmp_path, SOLO, step=3, seed=3)
    assert names(tmp_path) == ["latest", "step-0000001", "step-0000002", "step-0000003"]
    for step in (1, 2, 3):
        assert_holds(find(tmp_path, step), seed=step)


def test_replaced_checkpoint_is_restored_if_its_successor_is_damaged(tmp_path: Path) -> None:
    """The replaced one may be the only valid one: it is renamed back before anything is removed."""
    save_as(tmp_path, SOLO, step=2, seed=2).rename(tmp_path / "step-0000002.replaced")
    broken = save_as(tmp_path, SOLO, step=2, seed=5) / "weights-00000.safetensors"
    assert names(tmp_path) == ["latest", "step-0000002"], "a valid checkpoint is in place"
    (tmp_path / "step-0000002").rename(tmp_path / "other")
    save_as(tmp_path, SOLO, step=2, seed=2).rename(tmp_path / "step-0000002.replaced")
    (tmp_path / "other").rename(tmp_path / "step-0000002")
    flip_last_bit(broken)
    assert_holds(find(tmp_path, log=lambda line: None), seed=2)
    save_as(tmp_path, SOLO, step=3, seed=3)
    assert names(tmp_path) == ["latest", "step-0000002", "step-0000003"]
    assert_holds(find(tmp_path, 2), seed=2)


def test_leftover_that_cannot_be_removed_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".tmp-step-step-0000001").mkdir()

    def refuse(path: Path) -> None:
        if path.name == ".tmp-step-step-0000001":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        real(path)

    real = commit.remove_tree
    monkeypatch.setattr(commit, "remove_tree", refuse)
    save_as(tmp_path, SOLO, step=3, seed=3)
    assert_holds(find(tmp_path), seed=3)


def test_protected_checkpoint_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_as(tmp_path, SOLO, step=3, seed=3)
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(PermissionError):
        commit.discard(path)
    assert_holds(find(tmp_path), seed=3)


def test_failure_after_the_commit_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(commit, "replace_durably", refuse)
    lines: list[str] = []
    path = save_plan(tmp_path, SOLO, [weight("a", (2,), (0, 2))], [torch.ones(2)], log=lines.append)
    assert lines == [f"warning: {path} is saved, but {tmp_path / 'latest'}: No space left on device"]
    monkeypatch.undo()
    commit.correct_latest(tmp_path, find(tmp_path).manifest.step)
    assert (tmp_path / "latest").read_text() == f"{path.name}\n"


def test_load_with_a_limit_of_open_files(tmp_path: Path) -> None:
    ranks, rows = 70, 2

    def save(group: Group) -> Path:
        mine = weight("w", (ranks * rows,), (group.rank * rows, (group.rank + 1) * rows))
        return save_plan(tmp_path, group, [mine], [torch.full((rows,), float(group.rank))])

    on_threads(ranks, save)
    checkpoint = find(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.checkpoint.load.MAX_OPEN", 5)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0  # noqa: PTH208
        with ThreadPoolExecutor(4) as pool:  # threads close files from which others read
            for values in pool.map(lambda _: checkpoint.read("weight:w", device=CPU), range(8)):
                assert torch.equal(values, torch.arange(ranks).repeat_interleave(rows).float())
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before + 5  # noqa: PTH208


class Counting(Heartbeat):
    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1


def test_heartbeat_during_a_large_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the watchdog would report ranks with a slow disk as hanging."""
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), sync(descriptor))[1])
    monkeypatch.setattr(safetensors_file, "CHUNK", 1 << 10)
    monkeypatch.setattr(safetensors_file, "_SYNC_BYTES", 4 << 10)
    heartbeat = Counting()
    tensor = torch.zeros(8 << 10, dtype=torch.float16)
    writer = SafetensorsWriter(tmp_path / "a", [Record("w", "F16", (8 << 10,))], progress=heartbeat.beat)
    writer.write(tensor)
    writer.finish()
    assert heartbeat.beats >= 16 and len(synced) == 5
    group = dataclasses.replace(SOLO, heartbeat=heartbeat)
    before = heartbeat.beats
    save_plan(tmp_path / "b", group, [weight("w", (4096,), (0, 4096))], [torch.zeros(4096)])
    assert heartbeat.beats >= before + 16
    before = heartbeat.beats
    find_checkpoint(tmp_path / "b", step=None, world=group, log=pytest.fail)
    assert heartbeat.beats > before


@pytest.mark.parametrize(
    "latest, every, steps, newest, gone",
    [
        (1, None, [1, 2, 3], 3, [1, 2]),
        (2, None, [1, 2, 3], 3, [1]),
        (3, None, [1, 2, 3], 3, []),
        (9, None, [1, 2, 3], 3, []),
        (1, 2, [1, 2, 3, 4, 5], 5, [1, 3]),
        (2, 4, [2, 4, 6, 8, 10], 10, [2, 6]),
        (1, None, [5], 5, []),
        # 8 and 9 are damaged leftovers: the run resumed from 6 and has reached 7.
        (1, None, [6, 7, 8, 9], 7, [6]),
        (2, None, [6, 7, 8, 9], 7, []),
        # `step-N` and `step-N.replaced` are one step.
        (2, None, [3, 3, 4], 4, []),
    ],
)
def test_steps_to_remove(latest: int, every: int | None, steps: list[int], newest: int, gone: list[int]) -> None:
    assert steps_to_remove(steps, newest, keep_latest=latest, keep_every=every) == gone
    free = steps_to_remove(steps, newest, keep_latest=latest, keep_every=every, held={1, 6})
    assert free == [step for step in gone if step not in (1, 6)]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.com")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_revision(tmp_path: Path) -> None:
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
