"""Writing Megatron-LM's `torch` format: each file equals one saved by a Megatron-LM rank."""

import errno
import os
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.megatron.write import write_megatron, written_bytes
from megalite.conversion.open import open_megatron
from megalite.conversion.weights import ConversionError
from tests.conversion.megatron.builder import assert_same, fuse, padded, stage
from tests.conversion.samples import EXPERTS, GPT, LATENT, LLAMA, SINKS, MadeUp, contents

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"activation": "gelu_tanh"},
    "llama": LLAMA,
    "qwen": LLAMA | {"add_qkv_bias": True, "qk_norm": True, "tie_embeddings": True},
    "latent": LATENT,
    "experts": EXPERTS | {"moe_shared_expert_intermediate_size": 24, "moe_first_dense_layers": 1},
    "gpt-oss": SINKS,
}


def load(path: Path) -> Any:
    """Load with torch only, as Megatron-LM does."""
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


def write(weights: MadeUp, tp: int = 1, pp: int = 1, **options: Any) -> Path:
    return write_megatron(weights, weights.path / "out", tp=tp, pp=pp, **options)


@pytest.mark.parametrize(("kind", "tp", "pp"), [*((kind, 2, 2) for kind in MODELS), ("llama", 1, 1), ("gpt", 4, 1)])
def test_files_and_round_trip(tmp_path: Path, kind: str, tp: int, pp: int) -> None:
    weights = MadeUp(tmp_path, MODELS[kind])
    written: list[int] = []
    folder = write(weights, tp, pp, advance=written.append)
    assert sum(written) == written_bytes(weights, dtype=None, tp=tp, pp=pp)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"

    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.pt"))
    suffixes = [f"_{stage:03d}" if pp > 1 else "" for stage in range(pp)]
    assert files == sorted(
        f"release/mp_rank_{rank:02d}{suffix}/model_optim_rng.pt" for rank in range(tp) for suffix in suffixes
    )
    layers = weights.model.num_layers // pp
    for index, suffix in enumerate(suffixes):
        for rank in range(tp):
            path = folder / f"release/mp_rank_{rank:02d}{suffix}/model_optim_rng.pt"
            found = load(path)
            held = range(index * layers, (index + 1) * layers)
            expected = fuse(stage(weights, held, tp, rank, first=index == 0, last=index == pp - 1))
            assert found["model"].keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found["model"][name], tensor), name
            assert zipfile.ZipFile(path).testzip() is None  # the checksums are correct
    opened = open_megatron(folder)
    assert_same(opened, weights)
    assert opened.seq_length == weights.seq_length


def test_each_tensor_is_read_once_per_stage(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, GPT)  # tied: the last stage also has the word embedding
    write(weights, 2, 2)
    assert weights.reads.pop("embedding.word.weight") == 2
    assert set(weights.reads.values()) == {1}


def test_args_are_those_of_use_checkpoint_args(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, MODELS["llama"] | {"sliding_window": 9, "rope_scaling": "llama3"})
    args = load(write(weights, 2) / "release/mp_rank_00/model_optim_rng.pt")["args"]
    expected = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "seq_length": 24,
        "max_position_embeddings": 24,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "use_rope_scaling": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "padded_vocab_size": padded(weights.model, 2),
        "make_vocab_size_divisible_by": 8,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "window_size": (8, 0),
        "params_dtype": torch.float32,
        "iteration": 0,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert open_megatron(tmp_path / "out").model.sliding_window == 9
    assert open_megatron(tmp_path / "out").model.rope_scaling == "llama3"


def test_settings_round_trip(tmp_path: Path) -> None:
    """All settings that affect the model's results are restored."""
    changes = {"norm_zero_centered": True, "norm_epsilon": 1e-6, "rotary_base": 5e5, "kv_channels": 16}
    changes |= {"rope_scaling": "linear", "rope_scaling_factor": 4.0, "num_experts": 4, "moe_router_topk": 1}
    changes |= {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5}
    changes |= {"rotary_percent": 0.5, "rotary_interleaved": True, "sliding_window": 9}
    changes |= {"window_attn_skip_freq": [0, 1], "no_rope_freq": [2]}
    weights = MadeUp(tmp_path, LLAMA | changes)
    model = open_megatron(write(weights)).model
    for name, value in changes.items():
        assert getattr(model, name) == value, name
    squared = MadeUp(tmp_path / "squared", LLAMA | {"activation": "squared_relu"})
    assert open_megatron(write(squared)).model.activation == "squared_relu"


def test_padding_rows_round_trip(tmp_path: Path) -> None:
    """A vocabulary padded to 2 x 128 for two ranks is written with the same rows."""
    weights = MadeUp(tmp_path, GPT | {"make_vocab_size_divisible_by": 256})
    args = load(write(weights, 2) / "release/mp_rank_00/model_optim_rng.pt")["args"]
    assert (args.make_vocab_size_divisible_by, args.padded_vocab_size) == (128, 512)
    assert open_megatron(tmp_path / "out").model.make_vocab_size_divisible_by == 256


@pytest.mark.parametrize(
    "changes, sizes, message",
    [
        ({"activation": "geglu", "add_bias_linear": False}, {}, "activation geglu"),
        ({"activation": "gelu_tanh", "add_bias_linear": False}, {}, "gelu_tanh without add_bias_linear"),
        ({"scale_embeddings": True}, {}, "scale_embeddings"),
        ({"post_norms": True, "softmax_scale": 0.5}, {}, "post_norms; softmax_scale 0.5"),
        ({"embedding_multiplier": 12.0, "logits_scaling": 8.0}, {}, "embedding_multiplier 12; logits_scaling 8"),
        ({"residual_multiplier": 0.22}, {}, "residual_multiplier 0.22"),
        (
            {"experimental_attention_variant": "mamba2", "linear_attention_freq": [1, 0]},
            {},
            "it has linear_attention_freq",
        ),
        (
            {"num_experts": 4, "add_bias_linear": False, "moe_router_enable_expert_bias": True},
            {},
            "moe_router_enable_expert_bias with moe_router_score_function softmax",
        ),
        ({"post_norms": True, "pre_norms": False}, {}, "post_norms; pre_norms false"),
        ({"attn_logit_softcapping": 5.0}, {}, "attn_logit_softcapping"),
        ({"activation": "swiglu", "glu_linear_offset": 1.0}, {}, "glu_linear_offset with activation swiglu"),
        ({"num_experts": 4, "add_bias_linear": False, "moe_add_bias_linear": True}, {}, "moe_add_bias_linear"),
        (SINKS | {"moe_shared_expert_intermediate_size": 24}, {}, "shared_expert_intermediate_size with moe_add_bias"),
        (SINKS | {"rope_attention_factor": 2.0}, {}, "rope_attention_factor 2.0 .built in: None"),
        ({"rope_scaling": "llama3", "rope_low_freq_factor": 2.0}, {}, "rope_low_freq_factor 2.0 .built in: 1.0"),
        ({"rope_scaling": "linear", "rope_scaling_factor": 1.5}, {}, "rope_scaling_factor 1.5"),
        ({"num_experts": 4, "add_bias_linear": True}, {}, "add_bias_linear without moe_add_bias_linear"),
        ({}, {"tp": 8}, r"tp 8 does not divide num_attention_heads 4; use one of \[1, 2, 4\]"),
        ({}, {"pp": 3}, r"pp 3 does not divide num_layers 2; use one of \[1, 2\]"),
        ({}, {"tp": 0}, "tp 0 does not divide"),
        ({}, {"implementation": "apex"}, "'apex'; use transformer_engine, local"),
    ],
)
def test_inexpressible_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], sizes: dict[str, Any], message: str
) -> None:
    weights = MadeUp(tmp_path, LLAMA | changes)
    with pytest.raises(ConversionError, match=message):
        write(weights, **sizes)
    if "implementation" not in sizes:
        with pytest.raises(ConversionError, match=message):
            written_bytes(weights, dtype=None, **({"tp": 1, "pp": 1} | sizes))
    assert not weights.reads
    assert sorted(tmp_path.iterdir()) == []


def test_full_disk_is_an_error_and_the_next_run_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any write of the thread may fail, also after all data has been queued; files that are done are not made again."""
    weights, real, left = MadeUp(tmp_path / "source", LLAMA), os.write, [0]
    expected = contents(write_megatron(weights, tmp_path / "expected", tp=2, pp=2))

    def write_until(descriptor: int, data: memoryview) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    count, target = 0, tmp_path / "out"
    while not target.exists():
        count, left[0] = count + 7, count + 7
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_until)
            weights.reads.clear()
            try:
                write_megatron(weights, target, tp=2, pp=2)
            except OSError as error:
                assert "tmp-convert-out" in error.filename and error.errno == errno.ENOSPC
    assert count > 50 and contents(target) == expected
    assert weights.reads and not any(name.startswith("layers.0.") for name in weights.reads), "done by an earlier run"
