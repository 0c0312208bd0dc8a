"""gpt-oss: what its config.json says beside what Llama's does, and its experts, in bf16 or in four bits (MXFP4)."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.checkpoint.safetensors_header import Record
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.block_fp8 import ReadElements
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.weights import Piece, View

if TYPE_CHECKING:
    import torch

_ALPHA = 1.702
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@dataclass(frozen=True, kw_only=True)
class GptOss(LlamaLike):
    """Every second layer has the window, from the first on; RoPE is stretched even where the file does not say so."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        if file.number("swiglu_alpha", _ALPHA) != _ALPHA:
            raise file.fault(f"swiglu_alpha is {file.values['swiglu_alpha']}; only {_ALPHA} can be expressed")
        if file.values.get("rope_parameters") is None and file.values.get("rope_scaling") is None:
            file = ModelFile({**file.values, "rope_scaling": _YARN}, file.where)
        settings = super()._settings(file, positions)
        return settings | {"activation_func_clamp_value": file.number("swiglu_limit", 7.0)}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        if values["rope_scaling"] is None:
            values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        windows = [model.has_window(index) for index in range(model.num_layers)]
        return values | {
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            "attention_bias": model.add_bias_linear,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": model.activation_func_clamp_value or 7.0,
        }

    def _windows(self, file: ModelFile, layers: int) -> list[bool]:
        return [index % 2 == 0 for index in range(layers)]

    def _read_biases(self, file: ModelFile) -> bool:
        return file.flag("attention_bias", True)


@dataclass(frozen=True, kw_only=True)
class GptOssExperts(ExpertKeys):
    """Matrices are the other way round, and a channel's gate and up projection stand beside each other."""

    def pieces(self, model: ModelConfig, layer: str, here: str, present: Collection[str] | None) -> Iterator[Piece]:
        h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
        assert experts is not None
        yield Piece(f"{layer}.mlp.router.weight", f"{here}.router.weight", (experts, h))
        yield Piece(f"{layer}.mlp.router.bias", f"{here}.router.linear_bias", (experts,))
        there = f"{layer}.mlp.experts"
        # Packed ones have the rows of ours: [2·f, h] with gates in even rows, and [h, f].
        ups: dict[bool, View] = {True: lambda up: up.transpose(1, 2), False: lambda up: up.permute(0, 3, 2, 1)}
        downs: dict[bool, View] = {True: lambda down: down, False: lambda down: down.transpose(1, 2)}
        sizes = (("gate_up_proj", "up", ups, h, 2 * f), ("down_proj", "down", downs, f, h))
        for theirs, ours, views, width, rows in sizes:
            packed = present is not None and f"{there}.{theirs}{BLOCKS}" in present
            name = f"{there}.{theirs}{BLOCKS}" if packed else f"{there}.{theirs}"
            shape = packed_shape(experts, rows, width) if packed else (experts, width, rows)
            yield Piece(name, f"{here}.experts.{ours}.weight", shape, views[packed])
        yield Piece(
            f"{there}.gate_up_proj_bias", f"{here}.experts.up.bias", (experts, 2 * f), lambda bias: bias.transpose(1, 2)
        )
        yield Piece(f"{there}.down_proj_bias", f"{here}.experts.down.bias", (experts, h))


BLOCKS, SCALES = "_blocks", "_scales"
DTYPE = "U8"
_GROUP = 32  # numbers that share a scale: a power of two, of which the byte is the exponent + 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # of four bits; the lower ones of a byte come first


def packed_shape(experts: int, rows: int, width: int) -> tuple[int, ...]:
    """Of the bytes of matrices [experts, rows, width], in groups along the width."""
    return experts, rows, -(-width // _GROUP), _GROUP // 2


def scales_of(name: str) -> str:
    """The name of a packed tensor's scales."""
    return name.removesuffix(BLOCKS) + SCALES


def packed_fault(record: Record, scales: Record | None) -> str | None:
    """What is wrong with packed matrices; None: nothing."""
    if not record.key.endswith(BLOCKS):
        return f"is {record.dtype}; weights must be BF16, F16, F32 or F64"
    if scales is None:
        return f"has no {scales_of(record.key)}"
    if scales.shape != record.shape[:-1] or scales.dtype != DTYPE:
        return f"has scales {scales.dtype} {list(scales.shape)}; they must be {DTYPE} {list(record.shape[:-1])}"
    return None


def read_packed(read: ReadElements, record: Record, start: int, count: int) -> "torch.Tensor":
    """`count` numbers of packed matrices from the `start`-th on, flat, in bf16, which has all of them."""
    first, last = start // _GROUP, -(-(start + count) // _GROUP)
    packed = read(record.key, first * _GROUP // 2, (last - first) * _GROUP // 2)
    exponents = read(scales_of(record.key), first, last - first).int() - 127
    codes = packed.repeat_interleave(2)
    codes[1::2] >>= 4
    values = exponents.float().new_tensor(_VALUES)[(codes & 15).long()]
    scaled = values.view(-1, _GROUP).ldexp(exponents.unsqueeze(1)).bfloat16()
    return scaled.flatten()[start - first * _GROUP :][:count]
