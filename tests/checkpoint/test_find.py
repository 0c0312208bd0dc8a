"""Which checkpoint is found, and the message if there is none."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint.files import lock_folder
from megalite.checkpoint.folders import step_of
from megalite.checkpoint.load import find_checkpoint
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group
from tests.checkpoint.inspecting import flip_last_bit
from tests.checkpoint.samples import SOLO, assert_holds, find, on_threads, save_as


def missing(folder: Path, step: int | None = None) -> str:
    with pytest.raises(CheckpointMissing) as caught:
        find(folder, step)
    return str(caught.value)


def slip(folder: Path, step: int | None = None) -> str:
    """Return the message of an error after which a run must not start from scratch."""
    with pytest.raises(CheckpointError) as caught:
        find(folder, step)
    assert not isinstance(caught.value, CheckpointMissing)
    return str(caught.value)


def test_names_of_step_folders() -> None:
    assert step_of("step-0000100") == 100
    assert step_of("step-12345678") == 12345678
    assert step_of("step-0000100.replaced") == 100
    for name in ("step-100", "step-00000100", "step--000001", ".tmp-step-100", "step-0000100.bak", "step-٠٠٠٠١٠٠", "x"):
        assert step_of(name) is None


def test_newest_or_requested_step_is_found(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save_as(tmp_path, SOLO, step=step, seed=step)
    assert (tmp_path / "latest").read_text() == "step-0000020\n"
    assert find(tmp_path).manifest.step == 100
    assert_holds(find(tmp_path, 20), seed=20)
    assert "has no checkpoint of step 21; it has steps 9, 20, 100" in slip(tmp_path, 21)


def test_damaged_checkpoints_are_skipped_with_a_log_line(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_as(tmp_path, SOLO, step=step, seed=step)
    flip_last_bit(tmp_path / "step-0000003" / "optimizer-00000.safetensors")
    (tmp_path / "step-0000002" / "manifest.json").unlink()
    lines: list[str] = []
    assert_holds(find(tmp_path, log=lines.append), seed=1)
    assert len(lines) == 2
    assert "step-0000003" in lines[0] and "optimizer-00000.safetensors: sha256 is" in lines[0]
    assert "step-0000002" in lines[1] and "manifest.json: No such file" in lines[1]
    # A requested step is not replaced by another.
    lines.clear()
    with pytest.raises(CheckpointError, match=r"step 3 is damaged: .*optimizer-00000"):
        find(tmp_path, 3, log=lines.append)
    assert lines == []
    # A run must not start from scratch if all its checkpoints are damaged.
    flip_last_bit(tmp_path / "step-0000001" / "weights-00000.safetensors")
    message = slip(tmp_path)
    assert "no checkpoint verifies" in message
    assert all(f"step-000000{step}" in message for step in (1, 2, 3))


def test_message_if_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert "does not exist" in missing(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert "the folder is empty" in missing(tmp_path / "run")
    assert f"there is {tmp_path / 'run'}" in missing(tmp_path / "runs")
    (tmp_path / "run" / ".tmp-step-10").mkdir()
    assert "only unfinished saves (.tmp-step-10)" in missing(tmp_path / "run", 10)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.pt").write_text("")
    assert "1 other entries (model.pt)" in missing(tmp_path / "other")


def test_message_if_the_path_is_one_level_off(tmp_path: Path) -> None:
    save_as(tmp_path / "run" / "checkpoints", SOLO, step=5)
    assert f"but in {tmp_path / 'run' / 'checkpoints'}" in slip(tmp_path / "run")
    inside = slip(tmp_path / "run" / "checkpoints" / "step-0000005")
    assert "is itself a checkpoint" in inside and f"--load {tmp_path / 'run' / 'checkpoints'} --ckpt-step 5" in inside
    (tmp_path / "file").write_text("x")
    assert "file is a file; give the folder that contains" in slip(tmp_path / "file")


@pytest.mark.parametrize("ranks", [2, 5])
def test_all_ranks_open_the_same_checkpoint(tmp_path: Path, ranks: int) -> None:
    """On any rank that hashes the damaged file."""
    on_threads(3, lambda group: save_as(tmp_path, group, step=1, seed=1))
    on_threads(3, lambda group: save_as(tmp_path, group, step=2, seed=2))

    def look(group: Group) -> tuple[int, list[str]]:
        lines: list[str] = []
        found = find_checkpoint(tmp_path, step=None, world=group, log=lines.append)
        return found.manifest.step, lines

    assert on_threads(ranks, look) == [(2, [])] * ranks
    for path in sorted((tmp_path / "step-0000002").iterdir()):
        sound = path.read_bytes()
        flip_last_bit(path)
        results = on_threads(ranks, look)
        assert len({str(result) for result in results}) == 1
        step, lines = results[0]
        assert step == 1 and len(lines) == 1 and path.name in lines[0]
        path.write_bytes(sound)
    assert on_threads(ranks, look) == [(2, [])] * ranks


def test_unshared_folders_are_one_error_on_all_ranks(tmp_path: Path) -> None:
    """Folders on local disks are an error on every rank, in saving and in loading."""
    for rank in (0, 1):
        save_as(tmp_path / str(rank), SOLO, step=1, seed=rank)

    def everywhere(fn: Callable[[Group], object]) -> str:
        results = on_threads(2, fn)
        assert all(isinstance(result, CheckpointError) for result in results), results
        messages = {str(result).replace(str(tmp_path / "1"), str(tmp_path / "0")) for result in results}
        assert len(messages) == 1
        return messages.pop()

    def load(group: Group) -> object:
        return find_checkpoint(tmp_path / str(group.rank), step=1, world=group, log=print)

    assert "shared file system" in everywhere(load)
    save_as(tmp_path / "0", SOLO, step=2)
    assert "No such file" in everywhere(
        lambda group: find_checkpoint(tmp_path / str(group.rank), step=2, world=group, log=print)
    )
    assert "No such file" in everywhere(lambda group: save_as(tmp_path / str(group.rank), group, step=3))


def test_message_for_folders_of_other_programs(tmp_path: Path) -> None:
    for folder, names, kind in (
        ("hf", ("config.json", "model.safetensors"), "a Hugging Face folder"),
        ("meg", ("latest_checkpointed_iteration.txt", "iter_0000010"), "a folder of Megatron-LM's checkpoints"),
    ):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
        message = slip(tmp_path / folder)
        assert message.startswith(f"{tmp_path / folder} is {kind}; ")
        assert f"megalite convert {tmp_path / folder} imported --to native" in message


def test_folder_has_one_lock_at_a_time(tmp_path: Path) -> None:
    first = lock_folder(tmp_path)
    if first is None:
        pytest.skip("a file system without locks")
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path)
    os.close(first)
    second = lock_folder(tmp_path)
    assert second is not None
    os.close(second)
