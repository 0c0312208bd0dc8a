"""The `args` of a checkpoint, of which only plain values are believed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.conversion.weights import ConversionError

STRUCTURE = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
    ),
    *(
        "group_query_attention",
        "max_position_embeddings",
        "seq_length",
        "position_embedding_type",
        "rotary_base",
    ),
    *("normalization", "swiglu", "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights"),
    *(
        "padded_vocab_size",
        "num_experts",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "qk_layernorm",
        "norm_epsilon",
    ),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *(
        "virtual_pipeline_model_parallel_size",
        "expert_tensor_parallel_size",
        "layernorm_epsilon",
        "bias_gelu_fusion",
    ),
)
"""Arguments that all files of a checkpoint must agree on."""

_LARGEST_WHOLE, _LARGEST_NUMBER, _BITS = 2**31 - 1, 1e30, 63


class Arguments:
    """The `args` of a checkpoint, with the values that older versions had where they lack a name."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self.path = path

    def get(self, name: str, default: Any = None) -> Any:
        """A plain value: None, bool, number, string or a sequence of these.

        Raises:
            ConversionError: it is something else, or a whole number of more than 63 bits.
        """
        value = self._values.get(name)
        if value is None:
            return default
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int) and item.bit_length() > _BITS:
                raise ConversionError(
                    f"{self.path}: args.{name} has {item.bit_length()} bits; no setting has more than {_BITS}"
                )
        if isinstance(value, list | tuple):
            if all(isinstance(item, bool | int | float | str | None) for item in value):
                return value
        elif isinstance(value, bool | int | float | str | torch.dtype):
            return value
        raise ConversionError(f"{self.path}: args.{name} is a {type(value).__name__}, not a plain value")

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive whole number below 2^31.

        Raises:
            ConversionError: there is none and no default, or it is something else.
        """
        value = self.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_WHOLE:
            return value
        raise ConversionError(
            f"{self.path}: args.{name} is {value!r}; a whole number above 0 and up to {_LARGEST_WHOLE} is needed"
        )

    def flag(self, name: str, default: bool) -> bool:
        """True or False.

        Raises:
            ConversionError: it is something else.
        """
        value = self.get(name, default)
        if isinstance(value, bool):
            return value
        raise ConversionError(f"{self.path}: args.{name} is {value!r}; True or False is needed")

    def number(self, name: str, default: float) -> float:
        """A finite number, at most 1e30 in size.

        Raises:
            ConversionError: it is something else.
        """
        value = self.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and abs(number) <= _LARGEST_NUMBER:
                return number
        raise ConversionError(
            f"{self.path}: args.{name} is {value!r}; a number is needed, of at most {_LARGEST_NUMBER:g}"
        )

    def differences(self, other: "Arguments") -> list[str]:
        """Arguments of the network and the layout that another file has otherwise."""
        return [
            f"{name} {self.get(name)!r} and {other.get(name)!r}"
            for name in STRUCTURE
            if self.get(name) != other.get(name)
        ]
