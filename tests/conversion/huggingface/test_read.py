"""Models saved by transformers are the same network when read as `Weights`: equal logits in float64, to 1e-9."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalite.checkpoint.safetensors_header import Record
from megalite.conversion.huggingface.quantized import BlockFp8, Mxfp4
from megalite.conversion.huggingface.weights import HuggingFaceWeights
from megalite.conversion.weights import ConversionError, parameter_shapes
from tests.conversion.huggingface.models import (
    CASES,
    edit_config,
    our_logits,
    our_stage,
    rename,
    saved,
    saved_in_four_bits,
    their_logits,
)
from tests.models.test_families import VOCAB, error


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    them = saved(name, tmp_path)
    weights = HuggingFaceWeights(tmp_path)
    assert weights.format == "huggingface" and weights.path == tmp_path
    assert weights.seq_length == weights.model.max_position_embeddings == them.config.max_position_embeddings
    assert error(our_logits(our_stage(weights)), their_logits(them)) < 1e-9


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    saved("llama3", tmp_path)
    weights = HuggingFaceWeights(tmp_path)
    assert weights.model.vocab_size == VOCAB and weights.model.padded_vocab_size == 128
    for name in ("embedding.word.weight", "head.weight"):
        rows = weights.read(name)
        assert rows.shape[0] == 128 and not rows[VOCAB:].any() and rows[:VOCAB].any()


def old_keys(name: str) -> dict[str, Any]:
    """Write RoPE's keys as transformers 4 does."""
    values = dict(CASES[name].theirs["rope_parameters"])
    theta = values.pop("rope_theta")
    scaling = values if values["rope_type"] != "default" else None
    return {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": scaling}


@pytest.mark.parametrize("name", ["llama3", "llama3.1", "llama-linear", "mixtral"])
def test_old_keys_of_rope_are_read(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    new = HuggingFaceWeights(tmp_path).model
    edit_config(tmp_path, **old_keys(name))
    assert HuggingFaceWeights(tmp_path).model == new
    if name == "llama-linear":  # before 4.43
        edit_config(tmp_path, rope_scaling={"type": "linear", "factor": 3.0})
        assert HuggingFaceWeights(tmp_path).model == new


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def with_masks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, 1, 12, 12, dtype=torch.uint8)
    return without_prefix(tensors) | {"h.0.attn.bias": mask, "h.1.attn.masked_bias": torch.tensor(-1e4)}


def with_frequencies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}


def with_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def head_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}


def merged(name_of_experts: str) -> Any:
    """Store Mixtral's experts as transformers 5 does."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in tensors.items() if "block_sparse_moe" not in name}
        for i in range(3):
            there = f"model.layers.{i}.block_sparse_moe"
            here = f"model.layers.{i}.{name_of_experts}"
            w1, w2, w3 = (
                torch.stack([tensors[f"{there}.experts.{e}.{w}.weight"] for e in range(5)]) for w in ("w1", "w2", "w3")
            )
            found[f"{here}.gate.weight"] = tensors[f"{there}.gate.weight"]
            found[f"{here}.experts.gate_up_proj"] = torch.cat((w1, w3), dim=1)
            found[f"{here}.experts.down_proj"] = w2
        return found

    return change


def split_of_5(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "name, change",
    [
        ("gpt2", without_prefix),
        ("gpt2-untied", with_masks),
        ("llama3", with_frequencies),
        ("llama-tied", with_head),
        ("qwen2-window", head_alone),
        ("mixtral", merged("mlp")),
        ("mixtral", merged("block_sparse_moe")),
        ("mixtral", split_of_5),
    ],
)
def test_other_tensor_names_are_read(name: str, change: Any, tmp_path: Path) -> None:
    saved(name, tmp_path)
    before = HuggingFaceWeights(tmp_path)
    names = list(our_stage(before).state_dict())
    expected = {name: before.read(name) for name in before._pieces}
    rename(tmp_path, change)
    after = HuggingFaceWeights(tmp_path)
    assert names and all(torch.equal(after.read(name), value) for name, value in expected.items())


def test_tied_head_with_other_values_is_refused(tmp_path: Path) -> None:
    saved("llama-tied", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = with_head(tensors)
        tensors["lm_head.weight"][-1, -1] += 1e-6
        return tensors

    rename(tmp_path, change)
    with pytest.raises(ConversionError, match=r"must be false: lm_head\.weight is not model\.embed_tokens"):
        HuggingFaceWeights(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    head = HuggingFaceWeights(tmp_path).read("head.weight")
    assert torch.equal(head[:VOCAB], load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_mixed_dtypes_give_the_widest(tmp_path: Path) -> None:
    """Query in bfloat16, key in float32, value in float16: read as float32."""
    saved("llama3", tmp_path)
    types = {"q_proj": torch.bfloat16, "k_proj": torch.float32, "v_proj": torch.float16}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kinds = {name: types.get(name.split(".")[-2], torch.bfloat16) for name in tensors}
        return {name: tensor.to(kinds[name]) for name, tensor in tensors.items()}

    rename(tmp_path, change)
    weights = HuggingFaceWeights(tmp_path)
    assert weights.dtype("layers.0.attention.qkv.weight") == torch.float32
    assert weights.read("layers.0.attention.qkv.weight").dtype == torch.float32
    assert weights.dtype("layers.0.mlp.up.weight") == torch.bfloat16
    theirs = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    ours = weights.read("layers.0.attention.qkv.weight").unflatten(0, (2, 4, 4))[:, 2]
    assert torch.equal(ours.flatten(0, 1), theirs)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_read_as_the_represented_numbers(tmp_path: Path, scale_type: torch.dtype) -> None:
    """The network equals that of a folder with the products, also with smaller blocks at the end, several stored tensors
    per tensor, and reads of a part."""
    rows, columns = 3, 5
    saved("qwen3", tmp_path / "fp8"), saved("qwen3", tmp_path / "plain")
    generator = torch.Generator().manual_seed(4)
    stored: dict[str, torch.Tensor] = {}
    products: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = products[name] = tensor
            continue
        blocks = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
        scales = (0.01 + torch.rand(blocks, generator=generator)).to(scale_type)
        eight = (tensor * 16).to(torch.float8_e4m3fn)
        stored |= {name: eight, f"{name}_scale_inv": scales}
        products[name] = eight.float()
        for i in range(tensor.shape[0]):
            for j in range(tensor.shape[1]):
                products[name][i, j] *= scales[i // rows, j // columns].float()
    rename(tmp_path / "fp8", lambda _: stored)
    rename(tmp_path / "plain", lambda _: products)
    edit_config(
        tmp_path / "fp8",
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]},
    )
    fp8, plain = HuggingFaceWeights(tmp_path / "fp8"), HuggingFaceWeights(tmp_path / "plain")
    assert fp8.model == plain.model and fp8.dtype("layers.0.attention.qkv.weight") == torch.float32
    for name in parameter_shapes(fp8.model):
        whole = plain.read(name)
        assert whole.dtype == fp8.dtype(name) and torch.equal(fp8.read(name), whole), name
        part = tuple((size // 3, size - size // 4) for size in whole.shape)
        assert torch.equal(fp8.read(name, part), plain.read(name, part)), name


@pytest.mark.parametrize(("start", "count"), [(0, 77), (0, 1), (10, 1), (11, 22), (13, 40), (43, 34), (76, 1)])
def test_any_range_of_an_fp8_matrix_is_read(start: int, count: int) -> None:
    matrix = torch.arange(77).remainder(9).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 10.0)
    stored = {"w": matrix, "w_scale_inv": scales}
    record = Record("w", "F8_E4M3", (7, 11))
    found = BlockFp8((3, 4)).read(lambda name, at, n: stored[name][at : at + n], record, start, count)
    expected = [float(matrix[i]) * float(scales[i // 11 // 3 * 3 + i % 11 // 4]) for i in range(start, start + count)]
    assert found.tolist() == expected


def test_mxfp4_experts_are_read_as_the_represented_numbers(tmp_path: Path) -> None:
    """The network equals that of a folder with the numbers in bf16, also with reads of a part."""
    plain = saved_in_four_bits(tmp_path / "packed")
    shutil.copytree(tmp_path / "packed", tmp_path / "plain")
    rename(tmp_path / "plain", lambda _: plain)
    edit_config(tmp_path / "plain", quantization_config=...)
    four, whole = HuggingFaceWeights(tmp_path / "packed"), HuggingFaceWeights(tmp_path / "plain")
    assert four.quantization == "those in MXFP4 are read as bf16" and whole.quantization is None
    assert four.dtype("layers.0.moe.experts.up.weight") == torch.bfloat16
    for name in parameter_shapes(four.model):
        assert torch.equal(four.read(name), whole.read(name)), name
        part = tuple((size // 3, size - size // 4) for size in whole.read(name).shape)
        assert torch.equal(four.read(name, part), whole.read(name, part)), name
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rename(tmp_path / "packed", lambda tensors: tensors | {name: tensors[name][:, :5]})
    with pytest.raises(ConversionError, match=r"down_proj_blocks has scales U8 \[6, 5, 2\]; they must be U8"):
        HuggingFaceWeights(tmp_path / "packed")


@pytest.mark.parametrize(("start", "count"), [(0, 96), (0, 1), (31, 2), (33, 40), (95, 1)])
def test_any_range_of_packed_matrices_is_read(start: int, count: int) -> None:
    blocks, scales = torch.arange(48).mul(37).remainder(256).to(torch.uint8), torch.tensor([127, 0, 130]).byte()
    stored = {"w_blocks": blocks, "w_scales": scales}
    found = Mxfp4().read(
        lambda name, at, n: stored[name][at : at + n], Record("w_blocks", "U8", (1, 1, 3, 16)), start, count
    )
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = []
    for i in range(start, start + count):
        code = int(blocks[i // 2]) >> 4 * (i % 2) & 15
        expected.append(values[code % 8] * (-1) ** (code // 8) * 2.0 ** (int(scales[i // 32]) - 127))
    assert found.double().tolist() == expected


def test_mtp_layers_are_read(tmp_path: Path) -> None:
    """They are read whenever they are stored, whatever config.json says; an unknown layer is refused."""
    saved("glm4-moe", tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert HuggingFaceWeights(tmp_path).model.mtp_num_layers == 0
    edit_config(tmp_path, num_nextn_predict_layers=0)
    rename(tmp_path, lambda tensors: tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 3)})
    with pytest.raises(ConversionError, match="glm4_moe has no model"):
        HuggingFaceWeights(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(ConversionError, match=r"model.layers.3.enorm.weight is missing"):
        HuggingFaceWeights(tmp_path)
