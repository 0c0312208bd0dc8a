"""When a run saves, what it keeps, and how it handles failed saves."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite.checkpoint.files as files
import megalite.checkpoint.folders as commit
import megalite.checkpoint.save as saving
from megalite.checkpoint.load import find_checkpoint
from megalite.config.errors import CheckpointError, ConfigError
from megalite.optimizers.schedules import Progress
from megalite.training.save_folder import refuse_foreign_checkpoints
from megalite.training.saving import HostCopies, SaveError, Saver
from tests.checkpoint.inspecting import flip_last_bit
from tests.faults.compare import steps_in
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

ZERO2: dict[str, Any] = {"dp": 2, "dp_strategy": "distributed-optimizer", "precision": "bf16"}


def make_saver(context: RankContext, world: int, **settings: Any) -> tuple[Runner, Saver, list[str]]:
    runner = Runner(build(context, tiny_config(world, **settings)))
    Path(settings["save"]).mkdir(exist_ok=True)
    lines: list[str] = []
    return runner, Saver(runner.replica, tokenizer=None, log=lines.append), lines


def verified(context: RankContext, folder: Path, step: int) -> dict[str, torch.Tensor]:
    group = context.topology_of(tiny_config()).world
    cpu = torch.device("cpu")
    checkpoint = find_checkpoint(folder, step=step, world=group, log=pytest.fail)
    return {key: checkpoint.read(key, device=cpu) for key in checkpoint.manifest.tensors}


class Gate:
    """Delays every write of a checkpoint until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        real = files.write_all

        def write_all(descriptor: int, data: memoryview) -> None:
            assert self._open.wait(60)
            real(descriptor, data)

        patch.setattr(files, "write_all", write_all)

    def open(self) -> None:
        self._open.set()


def one_in_flight(context: RankContext, folder: str) -> tuple[list[int], list[str]]:
    runner, saver, lines = make_saver(context, 2, save=folder, async_save=True, **ZERO2)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        runner.step()
        saver.begin(runner.progress)
        runner.step()
        saver.poll()
        assert lines == [] and steps_in(Path(folder)) == []
        opener = threading.Timer(0.3, gate.open)
        opener.start()
        saver.begin(runner.progress)  # waits for the first save, to reuse its snapshot's memory
        seen = steps_in(Path(folder))
        saver.finish(runner.progress)  # the same step: only wait for it
        opener.join()
    return seen, lines


def test_one_background_save_at_a_time_and_the_end_waits(tmp_path: Path) -> None:
    seen, lines = run_ranks(2, one_in_flight, str(tmp_path / "s"))[0]
    assert 1 in seen
    assert [line.split(" in ")[0] for line in lines] == [
        f"saved {tmp_path / 's' / f'step-000000{step}'}" for step in (1, 2)
    ]
    assert steps_in(tmp_path / "s") == [1, 2]


def full_disk(patch: pytest.MonkeyPatch) -> None:
    def write_all(descriptor: int, data: memoryview) -> None:
        raise OSError(28, os.strerror(28))

    patch.setattr(files, "write_all", write_all)


def failing_save(context: RankContext, folder: str, **settings: Any) -> tuple[list[str], str, list[int]]:
    """Save at steps 1 to 4, with a full disk on rank 1 at step 2. Returns the lines, the error and its step."""
    runner, saver, lines = make_saver(context, 2, save=folder, **settings, **ZERO2)
    error, at = "", []
    try:
        for _ in range(4):
            runner.step()
            saver.poll()
            with pytest.MonkeyPatch.context() as patch:
                if runner.progress.step == 2 and context.rank == 1:
                    full_disk(patch)
                saver.begin(runner.progress)
                if settings.get("async_save") and saver._under_way:
                    saver._under_way[2].exception()  # wait for it
    except SaveError as found:
        error, at = str(found), [runner.progress.step]
    else:
        saver.finish(runner.progress)
    return lines, error, at


@pytest.mark.parametrize("background", [False, True])
def test_failed_save_stops_the_run(tmp_path: Path, background: bool) -> None:
    for lines, error, at in run_ranks(2, failing_save, str(tmp_path / "s"), async_save=background):
        assert "No space left on device" in error and "(rank 1 of 2)" in error
        assert f"cannot save a checkpoint in {tmp_path / 's'}" in error and "bytes, free there: " in error
        assert at == [3 if background else 2]  # at the next step, not later
        assert len(lines) == 1
    assert steps_in(tmp_path / "s") == [1]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["latest", "step-0000001"]


def test_failed_save_can_be_ignored(tmp_path: Path) -> None:
    results = run_ranks(2, failing_save, str(tmp_path / "s"), async_save=True, on_save_error="continue", keep_latest=2)
    for lines, error, _ in results:
        assert not error
        assert lines[1].startswith("warning: cannot save") and "continuing without it" in lines[1]
        assert [line.split()[0] for line in lines] == ["saved", "warning:", "saved", "saved"]
    assert steps_in(tmp_path / "s") == [3, 4]


def broken_folder(context: RankContext, folder: str, how: str) -> str:
    runner, saver, _ = make_saver(context, 2, save=folder, **ZERO2)
    runner.step()
    saver.begin(runner.progress)
    runner.step()
    context.topology_of(runner.replica.config).world.raise_on_all_ranks(None)
    with pytest.MonkeyPatch.context() as patch:
        if how == "removed" and context.rank == 0:
            shutil.rmtree(folder)
        elif how == "read-only":
            real = os.open

            def refuse(path: Any, flags: int, *mode: Any, **more: Any) -> int:
                if flags & os.O_CREAT and str(path).startswith(folder):
                    raise OSError(30, os.strerror(30), str(path))
                return real(path, flags, *mode, **more)

            patch.setattr(os, "open", refuse)
        elif how == "full":
            patch.setattr(saving, "free_bytes", lambda folder: 1000)
        with pytest.raises(SaveError) as caught:
            saver.begin(runner.progress)
    return str(caught.value)


@pytest.mark.parametrize(
    "how, reason",
    [
        ("removed", "the folder does not exist any more; it existed when the run started"),
        ("read-only", "Read-only file system"),
        ("full", "No space left on device; the checkpoint needs "),
    ],
)
def test_folder_removed_or_unwritable_during_the_run(tmp_path: Path, how: str, reason: str) -> None:
    folder = tmp_path / "s"
    errors = run_ranks(2, broken_folder, str(folder), how)
    for error in errors:
        assert str(folder) in error and reason in error
    if how == "removed":
        assert not folder.exists(), "a new folder would hide that the old checkpoints are gone"
    else:
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-0000001"]


def flight_check(context: RankContext, folder: str, free: int, **settings: Any) -> list[str]:
    _, saver, lines = make_saver(context, 1, save=folder, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.training.saving.free_bytes", lambda folder: free)
        try:
            saver.preflight([2, 4, 6, 8, 10])
        except CheckpointError as error:
            return ["error", str(error)]
    return lines


def test_free_space_is_checked_before_the_first_step(tmp_path: Path) -> None:
    folder = str(tmp_path / "s")

    def said(free: int, **settings: Any) -> str:
        return "|".join(run_ranks(1, flight_check, folder, free, **settings)[0])

    size, _, room = said(10**12).removeprefix("a checkpoint takes ").partition(", ")
    assert size.endswith(" MiB") and room == f"931.32 GiB are free in {folder}"
    nothing = said(1000)
    assert nothing.startswith(f"error|a checkpoint takes {size}, 1000 B are free") and "make room" in nothing
    assert said(1000, on_save_error="continue").startswith("warning: ")
    one = int(float(size.split()[0]) * 2**20 * 1.5)
    assert "not enough for the 5 of this run; --keep-latest 2" in said(one)
    assert said(4 * one, keep_latest=3).startswith("a checkpoint"), "four at a time fit"
    assert "not enough for the 4 of" in said(one, keep_latest=3)
    assert "not enough for the 4 of" in said(2 * one, keep_latest=1, keep_every=4), "plus 4 and 8"


def kept_checkpoints(context: RankContext, folder: str, breaks: int | None, **settings: Any) -> list[list[int]]:
    """Save ten steps; return the checkpoints after each. The disk damages one byte of step `breaks`."""
    _, saver, _ = make_saver(context, 2, save=folder, **settings, **ZERO2)
    seen = []
    for step in range(1, 11):
        with pytest.MonkeyPatch.context() as patch:
            if step == breaks:
                _spoil(patch)
            try:
                saver.begin(Progress(step, 8 * step))
            except SaveError as error:
                assert "does not verify when it is read back" in str(error), error
                assert "the older checkpoints are kept" in str(error)
                seen.append(steps_in(Path(folder)))
                return seen
        seen.append(steps_in(Path(folder)))
    return seen


def _spoil(patch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Path] = commit.publish

    def publish(staging: Path, *arguments: Any) -> Path:
        path = real(staging, *arguments)
        victim = sorted(path.glob("optimizer-*"))[0]
        flip_last_bit(victim)
        return path

    patch.setattr(saving, "publish", publish)


def test_keep_latest_and_keep_every(tmp_path: Path) -> None:
    seen = run_ranks(2, kept_checkpoints, str(tmp_path / "a"), None, keep_latest=2, keep_every=4)[0]
    assert seen[:3] == [[1], [1, 2], [2, 3]] and seen[4] == [4, 5] and seen[6] == [4, 6, 7]
    assert seen[9] == [4, 8, 9, 10]


def test_only_valid_checkpoint_is_not_removed(tmp_path: Path) -> None:
    """Step 5 is damaged on disk; this is detected before step 4 would be removed."""
    folder = tmp_path / "s"
    seen = run_ranks(2, kept_checkpoints, str(folder), 5, keep_latest=1)[0]
    assert seen[-1] == [4, 5]
    assert len(run_ranks(1, verified, folder, 4)[0]) > 20


def test_checkpoint_that_cannot_be_removed_stays(tmp_path: Path) -> None:
    lines = run_ranks(1, unremovable_checkpoint, str(tmp_path / "s"))[0]
    assert any("cannot remove the old checkpoint" in line and "step-0000001: Permission" in line for line in lines)
    assert steps_in(tmp_path / "s") == [1, 2]


def unremovable_checkpoint(context: RankContext, folder: str) -> list[str]:
    _, saver, lines = make_saver(context, 1, save=folder, keep_latest=1)
    saver.begin(Progress(1, 8))

    def discard(path: Path) -> None:
        raise PermissionError(13, os.strerror(13), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "discard", discard)
        saver.begin(Progress(2, 16))
    return lines


def unlistable_folder(context: RankContext, folder: str, **settings: Any) -> tuple[str, list[str]]:
    """Rank 0 cannot list the folder when it looks for old checkpoints."""
    _, saver, lines = make_saver(context, 2, save=folder, keep_latest=1, **settings, **ZERO2)

    def candidates(folder: Path) -> None:
        raise CheckpointError("cannot look")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "candidates", candidates)
        try:
            saver.begin(Progress(1, 8))
            saver.wait()
        except SaveError as error:
            return str(error), lines
    saver.finish(Progress(2, 16))
    return "", lines


def test_unlistable_folder_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for error, _ in run_ranks(2, unlistable_folder, str(tmp_path / "a")):
        assert "was written but cannot be found again: cannot look" in error
    for error, lines in run_ranks(2, unlistable_folder, str(tmp_path / "b"), async_save=True, on_save_error="continue"):
        assert not error and lines[0].startswith("warning: ") and lines[1].startswith("saved ")


def no_memory(context: RankContext, folder: str) -> str:
    _, saver, _ = make_saver(context, 2, save=folder, async_save=True, **ZERO2)

    def reserve(self: HostCopies, tensors: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 99 bytes")

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:
            patch.setattr(HostCopies, "reserve", reserve)
        with pytest.raises(CheckpointError) as caught:
            saver.preflight([1])
    return str(caught.value)


def test_memory_of_async_save_is_checked_before_the_first_step(tmp_path: Path) -> None:
    for error in run_ranks(2, no_memory, str(tmp_path / "s")):
        assert error.startswith("async_save needs ") and "not enough memory" in error and "leave it out" in error


def test_checkpoints_of_another_run_are_not_removed(tmp_path: Path) -> None:
    assert run_ranks(1, unremovable_checkpoint, str(tmp_path / "s"))
    config = tiny_config(save=str(tmp_path / "s"), keep_latest=1)
    with pytest.raises(ConfigError, match="holds checkpoints up to step 2 of another run, and keep_latest 1"):
        refuse_foreign_checkpoints(config, Progress(200, 1600))
    refuse_foreign_checkpoints(tiny_config(save=str(tmp_path / "s")), Progress(200, 1600))
    own = {"save": str(tmp_path / "s"), "load": str(tmp_path / "s"), "keep_latest": 1}
    refuse_foreign_checkpoints(tiny_config(**own), Progress(2, 16))
    refuse_foreign_checkpoints(tiny_config(ckpt_step=2, **own), Progress(2, 16))
    with pytest.raises(ConfigError, match="up to step 2 but this run starts at step 1"):
        refuse_foreign_checkpoints(tiny_config(ckpt_step=1, **own), Progress(1, 8))
