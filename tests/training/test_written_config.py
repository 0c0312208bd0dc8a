"""The config that a run writes can be used elsewhere: values derived from its folder and ranks are not set."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.manifest import MANIFEST_NAME
from megalite.config import files
from megalite.config.describe import replace, value_of, values_of
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.training.trainer import Trainer
from tests.support.tiny import LLAMA, TINY
from tests.support.trainer import fit

ASKED: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("global_batch_size", "eod_mask_loss")},
    **LLAMA,
    "mock_data": True,
    "train_iters": 2,
    "save_interval": 1,
    "num_query_groups": None,
    "lr_warmup_iters": 1,
}
OPEN = ("save", "dp", "global_batch_size", "num_query_groups", "kv_channels", "max_position_embeddings")


def by_flags(*words: str | Path) -> None:
    invocation = parse_arguments([str(word) for word in words])
    Trainer(invocation.config, explicit=invocation.explicit, log=lambda line: None).fit()


def manifest(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"step-{step:07}" / MANIFEST_NAME).read_text())
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_run_with_another_run_s_config_saves_in_its_own_folder(tmp_path: Path) -> None:
    fit(**ASKED, run_dir=str(tmp_path / "a"))
    before = content(tmp_path / "a")
    load = ("--load", tmp_path / "a" / "checkpoints")
    more = ("--train-iters", "4", "--keep-latest", "1")
    by_flags("--config", tmp_path / "a" / "config.yaml", "--run-dir", tmp_path / "b", *load, *more)
    assert content(tmp_path / "a") == before
    assert sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir()) == ["latest", "step-0000004"]


def test_written_config_has_given_but_no_derived_values(tmp_path: Path) -> None:
    fit(**ASKED, run_dir=str(tmp_path / "a"))
    config = files.load(tmp_path / "a" / "config.yaml")
    assert {name: value_of(config, name) for name in OPEN} == dict.fromkeys(OPEN)
    assert config == replace(RunConfig(), **ASKED, run_dir=str(tmp_path / "a"))
    saved = manifest(tmp_path / "a" / "checkpoints", 2)["config"]
    assert (saved["checkpoint"]["save"], saved["parallel"]["dp"]) == (None, None)
    assert saved["training"]["global_batch_size"] is None
    # shapes of tensors do not depend on the folder or the ranks
    assert (saved["model"]["num_query_groups"], saved["model"]["max_position_embeddings"]) == (8, 16)

    given = {"save": str(tmp_path / "b" / "checkpoints"), "dp": 1, "global_batch_size": 1, "kv_channels": 4}
    fit(**{**ASKED, **given}, run_dir=str(tmp_path / "b"))
    values = values_of(files.load(tmp_path / "b" / "config.yaml"))
    assert {name: values[name] for name in given} == given
    assert manifest(tmp_path / "b" / "checkpoints", 2)["config"]["checkpoint"]["save"] == given["save"]


@pytest.mark.parametrize(
    "text, flags, save",
    [
        ("{save: runs/a/checkpoints, save_interval: 5, run_dir: runs/a}", "", "runs/a/checkpoints"),
        ("{save: runs/a/checkpoints, save_interval: 5, run_dir: runs/a}", "--run-dir runs/b", None),
        ("{save: runs/a/checkpoints, save_interval: 5, run_dir: runs/a}", "--run-dir runs/b --save c", "c"),
        ("{save: elsewhere, save_interval: 5, run_dir: runs/a}", "--run-dir runs/b", "elsewhere"),
        # It saves at the end; without the folder nothing would be saved.
        ("{save: runs/a/checkpoints, run_dir: runs/a}", "--run-dir runs/b", "runs/a/checkpoints"),
        ("{save: runs/a/checkpoints, save_interval: 5}", "--run-dir runs/b", "runs/a/checkpoints"),
    ],
)
def test_folder_of_an_older_version_follows_run_dir(tmp_path: Path, text: str, flags: str, save: str | None) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert parse_arguments(["--config", str(file), *flags.split()]).config.checkpoint.save == save
