"""Formats of checkpoints, by the names that users give them. Without torch: the command line reads them before it."""

from typing import Literal

Format = Literal["native", "huggingface", "megatron"]
FORMATS: tuple[Format, ...] = ("native", "huggingface", "megatron")

TRANSFORMER_IMPLEMENTATIONS = ("transformer_engine", "local")
"""Megatron-LM's `--transformer-impl`: with the first a norm has the name of the linear layer after it."""
