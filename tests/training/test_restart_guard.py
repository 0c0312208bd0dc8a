"""A run that fails repeatedly in one step is refused, unless it makes progress or changes."""

import json
from pathlib import Path

import pytest

from megalite.config.describe import replace
from megalite.config.errors import NO_PROGRESS
from megalite.config.run import RunConfig
from megalite.training.save_folder import FILE_NAME, RestartGuard, RestartLoopError, require_progress, settings_digest
from tests.support.ranks import RankContext, run_ranks

ERROR = RuntimeError("rank 3 has lost its way")


def guard(folder: Path, settings: str = "a", most: int = 3) -> RestartGuard:
    return RestartGuard(folder, most=most, settings=settings)


def fails(folder: Path, start: int, step: int, *, settings: str = "a", silently: bool = False) -> None:
    """Make a start that ends with an error, or without a record."""
    one = guard(folder, settings)
    one.begin(start, str(folder))
    if silently:
        record = {"kind": "train", "step": step - 1, "loss": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    else:
        one.failed(step, ERROR)


@pytest.mark.parametrize("silently", [False, True])
def test_run_is_refused_after_three_failures_in_one_step(tmp_path: Path, silently: bool) -> None:
    for _ in range(3):
        fails(tmp_path, 100, 107, silently=silently)
    for _ in range(2):  # refused, again and again
        with pytest.raises(RestartLoopError) as caught:
            fails(tmp_path, 100, 107)
        said = str(caught.value)
        assert said.startswith("step 107 has failed in the last 3 starts, and this one would continue from step 100:")
        assert ("no error: killed" if silently else "RuntimeError: rank 3 has lost its way") in said
        assert str(tmp_path / FILE_NAME) in said and "--ckpt-step" in said
    assert RestartLoopError.exit_code == NO_PROGRESS
    (tmp_path / FILE_NAME).unlink()
    fails(tmp_path, 100, 107)


def test_progress_or_changed_settings_reset_the_count(tmp_path: Path) -> None:
    for step in (107, 107, 105, 107, 107):  # never three in a row
        fails(tmp_path, 100, step)
    for _ in range(2):  # a checkpoint was written meanwhile
        fails(tmp_path, 110, 113)
    for _ in range(2):
        fails(tmp_path, 110, 113, settings="b")
    fails(tmp_path, 110, 113, settings="a")


def test_normal_end_resets_the_count(tmp_path: Path) -> None:
    for _ in range(2):
        fails(tmp_path, 0, 3)
    for _ in range(5):  # a stop request is no failure
        one = guard(tmp_path)
        one.begin(0, None)
        one.left()
    one.ended()
    assert not (tmp_path / FILE_NAME).exists()
    for start in (0, 1, 2):  # checkpoints before the failing step are no progress
        fails(tmp_path, start, 3)
    with pytest.raises(RestartLoopError):
        fails(tmp_path, 2, 3)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"settings": "a"}', '{"settings": "a", "failed": [1]}'])
def test_damaged_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    fails(tmp_path, 0, 3)
    assert len(json.loads((tmp_path / FILE_NAME).read_text())["failed"]) == 1


def test_unwritable_folder_is_ignored(tmp_path: Path) -> None:
    one = guard(tmp_path / "nothing")
    one.begin(0, None)
    one.failed(1, ERROR)
    one.ended()


def test_which_runs_have_a_guard() -> None:
    assert RestartGuard.of(RunConfig()) is None
    assert RestartGuard.of(replace(RunConfig(), save="s", max_failures_at_step=0)) is None
    assert RestartGuard.of(replace(RunConfig(), save="s")) is not None
    one, other = (settings_digest(replace(RunConfig(), lr=lr)) for lr in (1e-3, 2e-3))
    assert one != other
    assert one == settings_digest(replace(RunConfig(), lr=1e-3, log_interval=7))


def refused(context: RankContext, folder: str) -> str:
    here = guard(Path(folder)) if context.rank == 0 else None
    with pytest.raises(RestartLoopError) as caught:
        world = context.topology(dp=2).world
        require_progress(here, 0, None, world=world)
    return str(caught.value)


def test_all_ranks_get_the_same_error(tmp_path: Path) -> None:
    for _ in range(3):
        fails(tmp_path, 0, 3)
    one, other = run_ranks(2, refused, str(tmp_path))
    assert one == other
