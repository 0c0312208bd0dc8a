"""megalite continues a run of Megatron-LM: checkpoint, token files and script give Megatron-LM's next 20 losses.

`recorded/` was made by Megatron-LM (migration.py). If it is installed, one test makes it again."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.manifest import Manifest
from megalite.cli.main import main
from megalite.config.files import load
from megalite.conversion.megatron import run as megatron_run
from megalite.conversion.open import open_weights
from megalite.conversion.weights import ConversionError
from tests.conversion import samples
from tests.conversion.megatron import builder, dist_builder
from tests.conversion.megatron.migration import (
    HERE,
    SAVED,
    SCRIPTS,
    Steps,
    batches,
    continued,
    inputs,
    ported,
    train_theirs,
    unpacked,
)
from tests.conversion.samples import EXPERTS, GPT, LLAMA, MadeUp
from tests.e2e.commands import commands_in
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY

ONE = (1, 1, 1)  # ranks, tp, pp
LAYOUTS = {"train_llama": (2, 2, 1), "train_gpt": ONE}
"""The page's commands continue train_gpt on four ranks, tp 2 x pp 2."""
TOLERANCE = 1e-5  # absolute, for losses of about 5


def move(script: str, saved: Path, folder: Path) -> tuple[Path, Path]:
    """Convert to megalite's (config, checkpoint)."""
    data, tokenizer = inputs(folder)
    imported = folder / "imported"
    assert samples.run(saved, imported, "--to", "native", "--with-optimizer", "--step", str(SAVED)) == 0
    return ported(script, data, tokenizer, folder), imported


def assert_continues(theirs: Steps, ours: Steps) -> None:
    assert [line["step"] for line in ours] == list(range(SAVED + 1, SAVED + 1 + len(theirs)))
    assert [line["lr"] for line in ours] == [step["lr"] for step in theirs]
    for name in ("loss", "grad_norm"):
        worst = max(abs(a[name] - b[name]) for a, b in zip(theirs, ours, strict=True))
        assert worst <= TOLERANCE, (name, worst)


@pytest.fixture(scope="module", params=SCRIPTS)
def moved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Steps, Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    saved, theirs = unpacked(request.param, folder / "theirs")
    assert len(theirs) == 20
    return request.param, theirs, *move(request.param, saved, folder)


def test_next_20_losses_equal_megatron_lm(moved: Any, tmp_path: Path) -> None:
    script, theirs, config, imported = moved
    assert batches(load(config), vocab_size=257)[SAVED:] == [step["tokens"] for step in theirs]
    assert_continues(theirs, continued(config, imported, tmp_path, *LAYOUTS[script]))
    manifest = Manifest.from_json((imported / f"step-{SAVED:07d}/manifest.json").read_text(), source="")
    assert manifest.counters == {"step": 10, "consumed_samples": 80, "optimizer_updates": 10, "loss_scaler": {}}
    # The padding of 257 ids to a multiple of 4 * tp is part of their softmax.
    assert manifest.config["model"]["vocab_size"] == {"train_llama": 260, "train_gpt": 264}[script]
    assert manifest.config["optimizer"]["lr"] == 5e-3
    assert manifest.config["training"]["seed"] == {"train_llama": 1234, "train_gpt": 77}[script]
    weights = [key for key in manifest.tensors if key.startswith("weight:")]
    assert len(manifest.tensors) == 3 * len(weights)


FACTORS = {"exp_avg": 2.0, "exp_avg_sq": 4.0}
"""Value of each state for a weight of 1."""


def test_states_of_experts_and_bf16_weights(tmp_path: Path) -> None:
    """Each tensor of the model has states, and fp32 main parameters in place of bf16 weights."""
    for name, settings in (("experts", EXPERTS), ("llama", LLAMA)):
        main, low = MadeUp(tmp_path, settings), MadeUp(tmp_path, settings, dtype=torch.bfloat16)
        averages = {state: MadeUp(tmp_path, settings, factor=factor) for state, factor in FACTORS.items()}
        states = {"fp32_param": main, **averages}
        folder = save_run(tmp_path / name, low, states, bf16=True)
        found = open_weights(folder, with_optimizer=True)
        training = found.training  # type: ignore[attr-defined]
        assert (training.step, training.counters["optimizer_updates"]) == (7, 5)
        assert training.counters["loss_scaler"] == {
            "skipped_steps": 2,
            "skipped_samples": 16,
            "scale": 1024.0,
            "good_steps": 3,
            "overflows_left": 2,
        }
        assert training.config["training"]["precision"] == "bf16"
        rows = main.model.vocab_size
        for key in found.shapes:  # type: ignore[attr-defined]
            expected = main.read(key)[:rows]
            assert torch.equal(found.read(key)[: len(expected)], expected)
            for state, factor in FACTORS.items():
                assert torch.equal(training.states[state](key)[: len(expected)], factor * expected)


NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
LINEAR = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
PROJ, QKV, FC1, FC2 = (f"{name}.weight" for name in LINEAR)
ORDER = {
    "local": (NORMS[0], PROJ, QKV, NORMS[1], FC1, FC2),
    "transformer_engine": (PROJ, NORMS[0], QKV, NORMS[1], FC1, FC2),
}
"""Names of a layer's parameters in the two kinds of layers."""


@pytest.mark.parametrize("implementation", ORDER)
def test_bucket_halves_of_two_data_parallel_ranks(tmp_path: Path, implementation: str) -> None:
    """Each rank has half of the bucket, even if that splits a parameter."""
    weights = MadeUp(tmp_path, LLAMA)
    held = builder.stage(weights, range(2), 1, 0, first=True, last=True)
    layers = [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in ORDER[implementation]]
    ends = ("decoder.final_layernorm.weight", "output_layer.weight")
    names = ["embedding.word_embeddings.weight", *layers, *ends]
    assert set(names) == set(held)
    flat: list[torch.Tensor] = []
    for name in reversed(names):
        size = sum(part.numel() for part in flat)
        flat += [torch.full((-size % 64,), torch.nan), held[name].reshape(-1)]
    bucket = torch.cat(flat)
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    more = {}
    for state, factor in {"param": 1.0, **FACTORS}.items():
        parts = (factor * bucket).split([5000, len(bucket) - 5000])
        more[f"{key}.{state}"] = (tuple(bucket.shape), [((0,), parts[0].clone()), ((5000,), parts[1].clone())])
    found = open_weights(
        save_run(tmp_path / "saved", weights, {}, more, transformer_impl=implementation), with_optimizer=True
    )
    for name in found.shapes:  # type: ignore[attr-defined]
        expected = weights.read(name)[: weights.model.vocab_size]
        assert torch.equal(found.read(name)[: len(expected)], expected), name
        for state, factor in FACTORS.items():
            read = found.training.states[state]  # type: ignore[attr-defined]
            assert torch.equal(read(name)[: len(expected)], factor * expected), (state, name)


def save_run(
    folder: Path, weights: MadeUp, states: dict[str, MadeUp], more: dict[str, Any] | None = None, **args: Any
) -> Path:
    """Save an fp16 run with two skipped of seven steps."""
    dist_builder.save(folder, weights, **args)
    step = folder / "iter_0000007"
    tensors = dist_builder.model_blocks(weights, 1, stacked=True) | (more or {})
    for name, values in states.items():
        for key, blocks in dist_builder.model_blocks(values, 1, stacked=True).items():
            tensors[f"optimizer.state.{name}.{key}"] = blocks
    for file in step.glob("*.distcp"):
        file.unlink()
    (step / ".metadata").write_bytes(dist_builder.pickle.dumps(dist_builder.metadata(step, tensors)))
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    content = {
        "args": builder.arguments(weights, 1, 1, consumed_train_samples=56, **args),
        "iteration": 7,
        "optimizer": {"optimizer": {"state": {"common_step": torch.tensor(5.0)}}, "grad_scaler": scaler},
        "opt_param_scheduler": {"num_steps": 40},
    }
    torch.save(content, step / "common.pt")
    return folder


def test_runs_that_cannot_continue_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    without = save_run(tmp_path / "without", weights, {})
    half = dist_builder.save(tmp_path / "half", weights)
    (tmp_path / "old").mkdir()
    old = builder.save(tmp_path / "old" / "saved", weights)
    for words, said in (
        ((without, "--to", "native"), r"has no Adam states .* leave out --with-optimizer"),
        ((half, "--to", "native"), r"lacks embedding.word_embeddings.weight, .* \(in optimizer.state.exp_avg.\*\)"),
        ((old, "--to", "native"), "reads Megatron-LM's torch_dist format, and .* is in the torch format"),
        ((without, "--to", "native", "--dtype", "bf16"), "keeps main parameters in fp32; leave out --dtype bf16"),
        ((without, "--to", "megatron"), "--with-optimizer has no effect with --to megatron"),
    ):
        assert samples.run(words[0], tmp_path / "out", "--with-optimizer", *words[1:]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_buckets_unlike_the_args_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, _ = unpacked("train_gpt", tmp_path)
    monkeypatch.setattr(megatron_run, "_ALIGNED", 1)
    with pytest.raises(ConversionError, match=r"rank 0 have \[\d+.*\] elements, which do not match its args; save it"):
        open_weights(saved, with_optimizer=True)
    monkeypatch.undo()
    for path in (saved / "iter_0000010").glob("*_0.distcp"):
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConversionError, match=r"distcp .bytes \d+ to \d+. is not a whole file of torch.save"):
        found = open_weights(saved, with_optimizer=True)
        for name in found.shapes:  # type: ignore[attr-defined]
            found.training.states["exp_avg"](name)  # type: ignore[attr-defined]


def test_args_with_megatron_defaults(tmp_path: Path) -> None:
    """Megatron-LM sets add_qkv_bias if all linear layers have biases."""
    weights = MadeUp(tmp_path, GPT)
    found = open_weights(dist_builder.save(tmp_path / "saved", weights, add_qkv_bias=True))
    assert found.model == weights.model


def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of examples/from_megatron/README.md, unchanged."""
    page = (REPOSITORY / "examples" / "from_megatron" / "README.md").read_text(encoding="utf-8")
    convert, script, train = [command.words for command in commands_in(page, "README.md")]
    _, theirs = unpacked("train_gpt", tmp_path / "checkpoints-megatron")
    data, _ = inputs(tmp_path)
    for suffix in (".bin", ".idx", ".json"):
        data.with_suffix(suffix).rename(tmp_path / f"corpus_text_document{suffix}")
    shutil.copy(HERE / "train_gpt.sh", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert samples.run(*convert[2:]) == 0
    assert main(script[1:]) == 0
    train_forked(4, *train[train.index("pretrain_gpt.py") + 1 :], "--run-dir", "run", folder=tmp_path).require_success()
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert_continues(theirs, [line for line in lines if "loss" in line])
    assert Path("checkpoints/latest").read_text().strip() == "step-0000030"


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no copy of Megatron-LM's repository")
@pytest.mark.parametrize("script", SCRIPTS)
def test_recorded_files_equal_a_new_run_of_megatron_lm(script: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    theirs = train_theirs(script, tmp_path, Path(os.environ["MEGATRON_LM"]).resolve())[SAVED:]
    _, recorded = unpacked(script, tmp_path / "recorded")
    for now, then in zip(theirs, recorded, strict=True):
        assert (now["tokens"], now["lr"]) == (then["tokens"], then["lr"])
        assert abs(now["loss"] - then["loss"]) <= TOLERANCE
    shutil.move(tmp_path / "checkpoints", tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    config, imported = move(script, tmp_path / "theirs", tmp_path / "ours")
    assert_continues(theirs, continued(config, imported, tmp_path / "run", *ONE))
