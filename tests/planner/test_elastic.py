"""An elastic start: rank 0 plans and all ranks use its layout; damaged checkpoints are handled."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest
from megalite.config.describe import replace, value_of
from megalite.config.errors import CheckpointError
from megalite.config.run import RunConfig
from megalite.planner.elastic import LAYOUT, _saved, newest_layout, take_layout
from megalite.training.replica import build_replica
from megalite.training.saving import save
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import TINY, Runner, tiny_config


def saved(context: RankContext, world: int, layout: dict[str, Any], folder: str) -> None:
    """Train two steps on some ranks, and save."""
    config = tiny_config(world, **layout)
    # dp follows from the ranks, and the checkpoint's config leaves it open
    asked = replace(config, dp=None)
    runner = Runner(build_replica(config, context.topology_of(config), asked=asked))
    runner.step()
    runner.step()
    save(runner.replica, Path(folder), runner.progress, tokenizer=None)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tp 2 x pp 2."""
    folder = tmp_path_factory.mktemp("four") / "checkpoints"
    run_ranks(4, saved, 4, {"tp": 2, "pp": 2}, str(folder))
    return folder


def elastic(folder: str, **changes: Any) -> RunConfig:
    """The settings of an elastic run that continues from `folder`."""
    more = {"elastic": True, "load": folder, "save": folder, "save_interval": 2, "mock_data": True}
    return replace(RunConfig(), **{**TINY, "eod_mask_loss": False, **more, **changes})


def taken(context: RankContext, world: int, folder: str, files: dict[str, Any], flags: dict[str, Any]) -> Any:
    """(layout or error, log) of one rank."""
    group = context.topology(dp=world).world
    config, lines = elastic(folder, **files, **flags), list[str]()
    try:
        found, explicit = take_layout(
            config, explicit=frozenset(files | flags), fixed=frozenset(flags), world=group, log=lines.append
        )
    except ValueError as error:
        return f"{type(error).__name__}: {error}", lines
    assert "elastic" in explicit
    return {name: value_of(found, name) for name in LAYOUT}, lines


def test_all_ranks_use_the_layout_of_rank_0(of_four: Path) -> None:
    (first, said), (second, silence) = run_ranks(2, taken, 2, str(of_four), {"tp": 2, "pp": 2}, {})
    assert first == second
    assert first["tp"] * first["pp"] * first["dp"] == 2
    assert silence == []
    (line,) = said
    assert line.startswith("elastic: 2 ranks; the checkpoint of step 2 has 4 ranks as tp 2 x cp 1 x dp 1 x pp 2, ")
    assert (
        f"; continuing as tp {first['tp']} x cp 1 x dp {first['dp']} x pp {first['pp']}" in line and "(planned" in line
    )


def test_layout_is_kept_on_the_same_ranks(of_four: Path) -> None:
    found = run_ranks(4, taken, 4, str(of_four), {}, {})
    assert all((layout["tp"], layout["pp"], layout["dp"]) == (2, 2, 1) for layout, _ in found)
    (line,) = found[0][1]
    assert line.startswith("elastic: 4 ranks; continuing as tp 2 x cp 1 x dp 1 x pp 2, ")
    assert line.endswith("(the layout of the checkpoint of step 2)")


def test_error_is_the_same_on_all_ranks(of_four: Path) -> None:
    for world, flags, words in (
        (3, {"tp": 2}, ("elastic: no layout of 3 ranks is legal with tp 2", "Start 2 or 4 ranks")),
        (2, {"elastic_cluster": "dgx-h10"}, ("dgx-h100",)),
    ):
        found = run_ranks(world, taken, world, str(of_four), {}, flags)
        (message,) = {message for message, _ in found}
        assert all(word in message for word in words)


def test_newest_readable_layout_is_used(of_four: Path, tmp_path: Path) -> None:
    assert newest_layout(tmp_path) is newest_layout(tmp_path / "none") is None
    folder = tmp_path / "checkpoints"
    shutil.copytree(of_four, folder)
    later = folder / "step-0000009" / MANIFEST_NAME
    shutil.copytree(folder / "step-0000002", later.parent)
    later.write_text(later.read_text().replace('"tp":2', '"tp":4', 1))
    found = newest_layout(folder)
    assert found is not None and (found.step, found.world_size) == (2, 4)


def test_settings_of_a_checkpoint_are_validated(of_four: Path) -> None:
    manifest = Manifest.from_json((of_four / "step-0000002" / MANIFEST_NAME).read_text())
    parallel = manifest.config["parallel"]
    assert _saved(manifest.config, "tp") == 2
    assert _saved({}, "tp") == 1, "a newer setting"
    for value in ("2", 2.0, True, [2], None, 0, {"a": 1}):
        with pytest.raises(CheckpointError):
            _saved({"parallel": json.loads(json.dumps({**parallel, "tp": value}))}, "tp")
