"""Reading Megatron-LM's `torch_dist` format from files with torch's own classes."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from megalite.conversion.megatron.dist import MegatronDistWeights
from megalite.conversion.open import open_megatron
from megalite.conversion.weights import ConversionError
from tests.conversion.megatron import dist_builder
from tests.conversion.megatron.builder import assert_same
from tests.conversion.samples import EXPERTS, GPT, LLAMA, ROUTING, SINKS, MadeUp

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"activation": "gelu_tanh"},
    "llama": LLAMA,
    "qwen": LLAMA | {"add_qkv_bias": True, "qk_norm": True, "tie_embeddings": True},
    "experts": EXPERTS,
    "routing": EXPERTS | ROUTING,
    "some-experts": EXPERTS | {"moe_first_dense_layers": 1, "moe_shared_expert_intermediate_size": 24},
    "gpt-oss": SINKS,
}


# Unequal layers are never stacked.
@pytest.mark.parametrize(
    ("kind", "tp", "stacked"),
    [*((kind, 2, kind != "some-experts") for kind in MODELS), ("llama", 1, True), ("experts", 2, False)],
)
def test_read_torch_dist(tmp_path: Path, kind: str, tp: int, stacked: bool) -> None:
    weights = MadeUp(tmp_path, MODELS[kind])
    found = open_megatron(dist_builder.save(tmp_path / "saved", weights, tp=tp, stacked=stacked))
    assert isinstance(found, MegatronDistWeights)
    assert found.path == tmp_path / "saved" / "iter_0000007"
    assert_same(found, weights)


def test_missing_parts_are_errors(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    for name, args, message in (
        ("layers", {"num_layers": 3}, r"args.num_layers is 3, but .* is \[2, 32\]"),
        ("bias", {"add_qkv_bias": True}, "lacks decoder.layers.0.self_attention.linear_qkv.bias"),
        ("norm", {"qk_layernorm": True}, "lacks decoder.layers.0.self_attention.q_layernorm.weight"),
        ("width", {"ffn_hidden_size": 40}, r"is \[96, 32\]; its args require \[80, 32\]"),
        ("rope", {"rope_type": "yarn"}, "args.rope_type"),
    ):
        with pytest.raises(ConversionError, match=message):
            open_megatron(dist_builder.save(tmp_path / name, weights, **args))
    folder = dist_builder.save(tmp_path / "saved", weights)
    step, found = folder / "iter_0000007", open_megatron(folder)
    for path in step.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ConversionError, match=r"distcp .bytes \d+ to \d+. is not a whole file of torch.save"):
        found.read("final_norm.weight")
    (step / "__0_0.distcp").unlink()
    (step / "__1_0.distcp").unlink()
    with pytest.raises(ConversionError, match=r"distcp .* cannot be read: .*No such file"):
        found.read("final_norm.weight")
    os.mkfifo(step / "__0_0.distcp")  # opening it would block forever
    os.mkfifo(step / "__1_0.distcp")
    with pytest.raises(ConversionError, match="is a pipe, folder or device, not a file"):
        found.read("final_norm.weight")
    (step / "common.pt").unlink()
    with pytest.raises(ConversionError, match=r"common.pt is missing"):
        open_megatron(folder)


def test_declared_layers_without_files_are_refused(tmp_path: Path) -> None:
    """Refused before anything is allocated for each layer."""
    weights = MadeUp(tmp_path, LLAMA)
    folder = dist_builder.save(tmp_path / "apart", weights, stacked=False, num_layers=3 * 10**7)
    with pytest.raises(ConversionError, match=r"args.num_layers is 30000000, but the files have 2 layers"):
        open_megatron(folder)
    folder = dist_builder.save(tmp_path / "stacked", weights, num_layers=3 * 10**7)
    step = folder / "iter_0000007"
    blocks = {
        name: ((3 * 10**7, *shape[1:]) if ".layers." in name else shape, parts)
        for name, (shape, parts) in dist_builder.model_blocks(weights, 1, stacked=True).items()
    }
    (step / ".metadata").write_bytes(pickle.dumps(dist_builder.metadata(step, blocks)))
    with pytest.raises(ConversionError, match=r" takes \d+ bytes, but all files together have \d+"):
        open_megatron(folder)


def test_gap_between_blocks_is_an_error(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    folder = dist_builder.save(tmp_path / "saved", weights, tp=2)
    step = folder / "iter_0000007"
    blocks = dist_builder.model_blocks(weights, 2, stacked=True)
    shape, parts = blocks["output_layer.weight"]
    blocks["output_layer.weight"] = shape, parts[:1]
    (step / ".metadata").write_bytes(pickle.dumps(dist_builder.metadata(step, blocks)))
    with pytest.raises(ConversionError, match=r"output_layer.weight has 4864 of 9728 elements"):
        open_megatron(folder).read("head.weight")


def test_files_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    folder = dist_builder.save(tmp_path / "saved", weights)
    path = folder / "iter_0000007" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../o.distcp!"))
    with pytest.raises(ConversionError, match=r"'../o.distcp!' is no file of the folder"):
        open_megatron(folder)
