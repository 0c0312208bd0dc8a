"""Settings that may change between a checkpoint and the resumed run, and those that may not."""

import dataclasses
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megalite.checkpoint.manifest import Manifest
from megalite.config.describe import replace
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.data.token_files import encode_side_file
from megalite.optimizers.schedules import Progress
from megalite.training.resume import changed_data, changed_numbers, check_fits, load
from megalite.training.save_folder import resumes_own
from megalite.training.saving import save
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import silent
from tests.support.tiny import Z1, Runner, assemble, build, local_parts, tiny_config

BEFORE, AFTER = 2, 3
"""Steps before the checkpoint and after it."""

STATES = ("weight", "main_param", "exp_avg", "exp_avg_sq")


def state(runner: Runner) -> dict[str, Any]:
    return {kind: local_parts(runner.replica, kind) for kind in STATES}


def steps(runner: Runner, count: int) -> list[tuple[float, float, float, bool]]:
    """Return (loss, gradient norm, loss scale, skipped) of each step."""
    results = [runner.step() for _ in range(count)]
    return [(result.loss, result.grad_norm, result.loss_scale, result.skipped) for result in results]


def uninterrupted(context: RankContext, world: int, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(world, **settings)))
    steps(runner, BEFORE)
    saved = state(runner)
    save(runner.replica, Path(folder), runner.progress, tokenizer="a" * 64)
    return {"saved": saved, "after": steps(runner, AFTER)}


def resumed(context: RankContext, world: int, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    replica = build(context, tiny_config(world, load=folder, **settings))
    runner = Runner(replica, load(replica, Path(folder), tokenizer="a" * 64, log=silent))
    loaded = state(runner)
    result = {"progress": runner.progress, "updates": replica.optimizer.updates, "loaded": loaded}
    return result | {"after": steps(runner, AFTER)}


def whole(ranks: list[dict[str, Any]], moment: str) -> dict[str, dict[str, np.ndarray]]:
    return {kind: assemble([rank[moment][kind] for rank in ranks]) for kind in STATES}


def resumed_run(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(2, resumed, 2, settings, str(folder))


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("fp32")
    return folder, run_ranks(2, uninterrupted, 2, {"tp": 2, "precision": "fp32"}, str(folder))


ZERO = {"dp": 2, **Z1}


def test_bf16_resumes_an_fp32_run(in_fp32: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, run = in_fp32
    ours = resumed_run(folder, {**ZERO, "precision": "bf16"})
    loaded, saved = whole(ours, "loaded"), whole(run, "saved")
    for name, values in saved["weight"].items():
        np.testing.assert_array_equal(loaded["main_param"][name], values, err_msg=name)
        rounded = torch.from_numpy(values).to(torch.bfloat16).double().numpy()
        np.testing.assert_array_equal(loaded["weight"][name], rounded, err_msg=name)
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, values in saved[kind].items():
            np.testing.assert_array_equal(loaded[kind][name], values, err_msg=name)
    np.testing.assert_allclose([step[0] for step in ours[0]["after"]], [step[0] for step in run[0]["after"]], rtol=1e-2)


def test_fp32_resumes_a_bf16_run_in_full_precision(tmp_path: Path) -> None:
    run = run_ranks(2, uninterrupted, 2, {**ZERO, "precision": "bf16"}, str(tmp_path))
    ours = resumed_run(tmp_path, {"tp": 2, "precision": "fp32"})
    loaded, saved = whole(ours, "loaded"), whole(run, "saved")
    for name, values in saved["main_param"].items():
        np.testing.assert_array_equal(loaded["weight"][name], values, err_msg=name)
    some = saved["main_param"]["layers.0.mlp.up.weight"]
    assert np.any(some != saved["weight"]["layers.0.mlp.up.weight"]), "main parameters have more digits"
    np.testing.assert_allclose([step[0] for step in ours[0]["after"]], [step[0] for step in run[0]["after"]], rtol=1e-2)


def test_token_files_must_match_the_tokenizer_of_the_checkpoint(
    in_fp32: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    made_with = {"kind": "NullTokenizer", "sha256": "b" * 64}
    (tmp_path / "d.json").write_bytes(
        encode_side_file({"documents": 1, "tokens": 9, "dtype": "uint16", "tokenizer": made_with})
    )
    data = {"data_path": [str(tmp_path / "d")], "eod_mask_loss": False}
    found = run_ranks(2, refused, str(in_fp32[0]), data, "")
    assert found[0] == found[1]
    assert (
        "d.bin was made with another tokenizer: NullTokenizer (sha256 bbbbbbbbbbbb...), and the model has its own"
        in found[0]
    )
    (tmp_path / "d.json").unlink()
    assert run_ranks(2, refused, str(in_fp32[0]), data, "") == ["nothing was raised"] * 2


def test_fp16_starts_with_the_initial_scale_after_an_fp32_run(in_fp32: tuple[Path, list[dict[str, Any]]]) -> None:
    ours = resumed_run(in_fp32[0], {**ZERO, "precision": "fp16", "initial_loss_scale": 2.0**10})
    assert [step[2:] for step in ours[0]["after"]] == [(2.0**10, False)] * 3


def refused(context: RankContext, folder: str, changes: dict[str, Any], fingerprint: str) -> str:
    replica = build(context, tiny_config(2, dp=2, load=folder, **{"precision": "fp32", **changes}))
    try:
        load(replica, Path(folder), tokenizer=fingerprint, log=silent)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    "changes, tokenizer, message",
    [
        (
            {"num_layers": 3, "tie_embeddings": False},
            "a",
            "num_layers 4 there, 3 here; tie_embeddings True there, False",
        ),
        # The same tensors, but another network.
        ({"num_attention_heads": 2}, "a", "num_attention_heads 4 there, 2 here"),
        ({}, "b", "another tokenizer"),
        ({"hidden_dropout": 0.1}, "a", "nothing was raised"),
    ],
)
def test_checkpoint_of_another_network_is_refused(
    in_fp32: tuple[Path, list[dict[str, Any]]], changes: dict[str, Any], tokenizer: str, message: str
) -> None:
    found = run_ranks(2, refused, str(in_fp32[0]), changes, tokenizer * 64)
    assert found[0] == found[1]
    assert message in found[0]


@pytest.mark.parametrize(
    ("settings", "progress"),
    [
        ({"finetune": True, "precision": "bf16"}, Progress(0, 0)),
        ({"load_optimizer": False, "precision": "fp32"}, Progress(BEFORE, BEFORE * 8)),
    ],
)
def test_optimizer_states_can_be_skipped(
    in_fp32: tuple[Path, list[dict[str, Any]]], settings: dict[str, Any], progress: Progress
) -> None:
    folder, run = in_fp32
    ours = resumed_run(folder, {**ZERO, **settings})
    loaded, saved = whole(ours, "loaded"), whole(run, "saved")
    assert (ours[0]["progress"], ours[0]["updates"]) == (progress, 0)
    for name, values in saved["weight"].items():
        np.testing.assert_array_equal(loaded["main_param"][name], values, err_msg=name)
        assert not loaded["exp_avg"][name].any() and not loaded["exp_avg_sq"][name].any()


def test_same_schedule_can_be_required(in_fp32: tuple[Path, list[dict[str, Any]]]) -> None:
    required = {"require_same_schedule": True}
    assert run_ranks(2, refused, str(in_fp32[0]), required, "a" * 64) == ["nothing was raised"] * 2
    found = run_ranks(2, refused, str(in_fp32[0]), {**required, "lr": 0.5, "lr_warmup_iters": 3}, "a" * 64)
    assert found[0] == found[1]
    assert "has other schedules: lr 0.01 there, 0.5 here; lr_warmup_iters 2 there, 3 here. Give" in found[0]
    # The learning rate decays until the end of the run.
    found = run_ranks(2, refused, str(in_fp32[0]), {**required, "train_iters": 9}, "a" * 64)
    assert re.search(r"has other schedules: train_iters \d+ there, 9 here\. Give", found[0])


def saved(model: ModelConfig) -> Manifest:
    return cast(Manifest, SimpleNamespace(config={"model": asdict(model)}))


def check(manifest: Manifest, model: ModelConfig, **settings: Any) -> None:
    check_fits("step-1", manifest, replace(RunConfig(model=model), load_optimizer=False, **settings))


LEARNED = ModelConfig(vocab_size=64, max_position_embeddings=16)
ROPE = dataclasses.replace(LEARNED, position_embedding_type="rope")


def test_max_positions_must_match_only_if_learned() -> None:
    check(saved(ROPE), dataclasses.replace(ROPE, max_position_embeddings=32))
    with pytest.raises(CheckpointError, match="max_position_embeddings 16 there, 32 here"):
        check(saved(LEARNED), dataclasses.replace(LEARNED, max_position_embeddings=32))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rotary_base": 500000.0}, "rotary_base 10000.0 there, 500000.0 here"),
        (
            {"rope_scaling": "llama3", "rope_scaling_factor": 4.0, "sliding_window": 32},
            "rope_scaling none there, llama3",
        ),
    ],
)
def test_only_finetuning_may_change_rope(changes: dict[str, Any], said: str) -> None:
    longer = dataclasses.replace(ROPE, **changes)
    check(saved(ROPE), longer, finetune=True)
    with pytest.raises(CheckpointError, match=said):
        check(saved(ROPE), longer)


def test_missing_setting_of_an_old_checkpoint_had_its_default() -> None:
    older = saved(ROPE)
    for name in ("qk_norm", "sliding_window", "moe_layer_freq"):
        del older.config["model"][name]
    check(older, ROPE)
    with pytest.raises(CheckpointError, match=r"qk_norm False there, True here"):
        check(older, dataclasses.replace(ROPE, qk_norm=True))


def test_same_folder_by_different_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    cases = {("a", str(tmp_path / "a")): True, ("a/", "link"): True, ("a", "b"): False, (None, None): False}
    for (source, target), same in cases.items():
        assert resumes_own(replace(RunConfig(), load=source, save=target)) == same
    assert not resumes_own(replace(RunConfig(), load="a", save="a", finetune=True))


BASE: dict[str, Any] = {"data_path": ["0.5", "a", "0.5", "b"], "eod_mask_loss": False}
MEGATRON = {**BASE, "data_order": "megatron", "train_iters": 20}


def in_manifest(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(asdict(tiny_config(1, **{**BASE, **changes}))))
    return config


def changed(config: RunConfig, **changes: Any) -> list[str]:
    return changed_data(in_manifest(), replace(config, **changes), dp=1, here=1)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"seed": 99}, "seed 1234 -> 99"),
        ({"seq_length": 32}, "seq_length 16 -> 32"),
        ({"split": "8,1,1"}, "split 969,30,1 -> 8,1,1"),
        ({"packing": "best-fit"}, "packing stream -> best-fit"),
        ({"data_order": "megatron"}, "data_order megalite -> megatron"),
        ({"data_path": ["0.7", "a", "0.3", "b"]}, "data_path 0.5 a 0.5 b -> 0.7 a 0.3 b"),
        ({"mock_data": True}, "mock_data False -> True"),
        ({"dataset": "mine"}, "dataset None -> mine"),
        ({"data_path": [], "train_data_path": ["c"]}, "train_data_path (none) -> c"),
    ],
)
def test_changed_data_settings_are_logged(changes: dict[str, Any], said: str) -> None:
    lines = changed(tiny_config(1, **BASE), **changes)
    assert [line for line in lines if line.endswith(f": {said}")] == lines[-1:]
    assert all("from here on" in line for line in lines)


def test_settings_without_effect_on_the_order_are_not_logged() -> None:
    config = tiny_config(1, **BASE)
    assert changed(config) == []
    assert changed(config, split="969,30,1", global_batch_size=16, train_iters=40, lr=1.0, eval_iters=3) == []


def test_changed_training_settings_are_logged() -> None:
    """Also the global batch size that follows from another layout."""
    config = tiny_config(1, **BASE)
    longer = replace(config, train_iters=40, clip_grad=0.25)
    constant = replace(longer, lr_decay_style="constant")
    open_batch, mine = in_manifest(micro_batch_size=2), in_manifest()
    open_batch["training"]["global_batch_size"] = None
    mine["training"]["loss"] = "mine"
    plugged = in_manifest()
    plugged["parallel"]["dp_strategy"] = "mine"
    for saved, now, dp, said in (
        (in_manifest(), config, 1, ""),
        (in_manifest(), longer, 1, "train_iters 20 -> 40, clip_grad 0.5 -> 0.25"),
        (in_manifest(), replace(config, sgd_momentum=0.5), 1, "sgd_momentum 0.9 -> 0.5"),
        (in_manifest(), replace(config, dp_strategy="fully-sharded", wire_dtype="bf16"), 1, "wire_dtype fp32 -> bf16"),
        (mine, config, 1, "loss mine -> cross-entropy"),
        (plugged, config, 1, "dp_strategy mine -> all-reduce"),
        (in_manifest(), replace(config, dp_strategy="diloco"), 1, "dp_strategy all-reduce -> diloco"),
        (in_manifest(), replace(config, eod_mask_loss=True), 1, "eod_mask_loss False -> True"),
        (in_manifest(), replace(config, iterations_to_skip=[3]), 1, "iterations_to_skip (none) -> 3"),
        (in_manifest(), replace(config, tf32=True), 1, "tf32 False -> True"),
        (in_manifest(), replace(config, moe_aux_loss_sequences=2), 1, "moe_aux_loss_sequences 1 -> 2"),
        (in_manifest(), replace(config, seq_length_warmup=[4, 3]), 1, "seq_length_warmup None -> 4 3"),
        (in_manifest(), replace(config, fp8=True, reduction_order="rank"), 1, "fp8 False -> True"),
        (in_manifest(), replace(config, moe_expert_capacity_factor=2.0), 1, "moe_expert_capacity_factor None -> 2.0"),
        (in_manifest(lr_decay_style="constant"), constant, 1, "clip_grad 0.5 -> 0.25"),
        (open_batch, config, 2, "global_batch_size 4 -> 8"),
        (open_batch, config, 4, ""),
        (open_batch, replace(config, global_batch_size=None), 4, "global_batch_size 8 -> 1"),
    ):
        lines = [f"other settings than the checkpoint's run had: {said}"] if said else []
        assert changed_numbers(saved, now, dp=dp, here=1) == lines


def test_missing_data_settings_had_their_defaults() -> None:
    old = in_manifest()
    del old["data"]["packing"], old["data"]["data_order"]
    assert changed_data(old, tiny_config(1, **BASE), dp=1, here=1) == []


def test_megatron_order_depends_on_the_length() -> None:
    config = tiny_config(1, **MEGATRON)
    (line,) = changed_data(in_manifest(**MEGATRON), replace(config, train_iters=40), dp=1, here=1)
    assert line == "the order of samples changes from here on: train_iters 20 -> 40"
    assert changed_data(in_manifest(**MEGATRON), config, dp=1, here=1) == []
    open_batch = in_manifest(**MEGATRON, micro_batch_size=2)
    open_batch["training"]["global_batch_size"] = None
    assert changed_data(open_batch, config, dp=4, here=1) == []
    (line,) = changed_data(open_batch, config, dp=2, here=1)
    assert line.endswith("global_batch_size 4 -> 8")
