"""Which checkpoints a run may take, and where it may save."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megalite.checkpoint.load import Checkpoint
from megalite.config.describe import replace as settings
from megalite.config.errors import CheckpointError
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.training.resume import check_same_model
from megalite.training.save_folder import resumes_own


def saved(model: ModelConfig) -> Checkpoint:
    manifest = SimpleNamespace(config={"model": asdict(model)})
    return cast(Checkpoint, SimpleNamespace(path="step-1", manifest=manifest))


LEARNED = ModelConfig(vocab_size=64, max_position_embeddings=16)
ROPE = replace(LEARNED, position_embedding_type="rope")


def test_the_limit_of_positions_counts_only_where_it_is_a_shape() -> None:
    check_same_model(saved(ROPE), replace(ROPE, max_position_embeddings=32))
    with pytest.raises(CheckpointError, match="max_position_embeddings 16 there, 32 here"):
        check_same_model(saved(LEARNED), replace(LEARNED, max_position_embeddings=32))


def test_only_finetuning_may_change_the_rotary_base() -> None:
    longer = replace(ROPE, rotary_base=500000.0)
    check_same_model(saved(ROPE), longer, finetune=True)
    with pytest.raises(CheckpointError, match=r"rotary_base 10000.0 there, 500000.0 here"):
        check_same_model(saved(ROPE), longer)


def test_only_finetuning_may_stretch_the_positions() -> None:
    longer = replace(ROPE, rope_scaling="llama3", rope_scaling_factor=4.0, sliding_window=32)
    check_same_model(saved(ROPE), longer, finetune=True)
    with pytest.raises(CheckpointError, match=r"rope_scaling none there, llama3 here"):
        check_same_model(saved(ROPE), longer)


def test_a_setting_that_an_older_checkpoint_does_not_know_had_its_default() -> None:
    older = saved(ROPE)
    for name in ("qk_norm", "sliding_window", "moe_layer_freq"):
        del older.manifest.config["model"][name]
    check_same_model(older, ROPE)
    with pytest.raises(CheckpointError, match=r"qk_norm False there, True here"):
        check_same_model(older, replace(ROPE, qk_norm=True))


def test_one_folder_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    cases = {("a", str(tmp_path / "a")): True, ("a/", "link"): True, ("a", "b"): False, (None, None): False}
    for (load, save), same in cases.items():
        assert resumes_own(settings(RunConfig(), load=load, save=save)) == same
    assert not resumes_own(settings(RunConfig(), load="a", save="a", finetune=True))
