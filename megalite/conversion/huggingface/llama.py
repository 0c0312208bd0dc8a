"""What Llama, Mistral, Qwen2, Qwen3 and Mixtral say in their config.json."""

from dataclasses import dataclass
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.model_config import MAX_LAYERS, ModelFile, read_rope, write_rope

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
_WRITTEN = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """One family: its features, and what its configuration class of transformers takes for a key that is missing.

    Args:
        max_positions, norm_epsilon, rotary_base: defaults.
        key_value_heads: default; None: as many as there are query heads.
        head_size: default; None: hidden_size / num_attention_heads.
        linear_biases: attention_bias and mlp_bias exist; other families have the first or neither.
        attention_bias: attention_bias exists.
        qkv_bias: query, key and value have a bias, always.
        qk_norm: queries and keys are normalised, always.
        window: the default of sliding_window, or `switched` (use_sliding_window must be on and the layer reach
            max_window_layers), or `none`.
        experts: the MLP is a mixture of experts, always.
    """

    max_positions: int
    norm_epsilon: float = 1e-6
    rotary_base: float = 1e4
    key_value_heads: int | None = None
    head_size: int | None = None
    linear_biases: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | str | None = "none"
    experts: bool = False

    def read(self, file: ModelFile) -> tuple[ModelConfig, int]:
        """The network of a config.json, and the longest sequence that it was made for.

        Raises:
            ConversionError: it has a feature that our network has not.
        """
        heads = file.integer("num_attention_heads")
        positions = file.integer("max_position_embeddings", self.max_positions)
        settings: dict[str, Any] = {
            "num_layers": file.integer("num_hidden_layers", limit=MAX_LAYERS),
            "hidden_size": file.integer("hidden_size"),
            "num_attention_heads": heads,
            "num_query_groups": file.optional_integer("num_key_value_heads", self.key_value_heads) or heads,
            "kv_channels": file.optional_integer("head_dim", self.head_size),
            "ffn_hidden_size": file.integer("intermediate_size"),
            "vocab_size": file.integer("vocab_size"),
            "max_position_embeddings": positions,
            "normalization": "RMSNorm",
            "norm_epsilon": file.epsilon("rms_norm_eps", self.norm_epsilon),
            "activation": file.activation("hidden_act", "silu", _ACTIVATIONS),
            "add_bias_linear": self._read_biases(file),
            "add_qkv_bias": self.qkv_bias,
            "qk_norm": self.qk_norm,
            "sliding_window": self._read_window(file),
            "tie_embeddings": file.flag("tie_word_embeddings", False),
            "attention_dropout": file.number("attention_dropout", 0.0),
            "init_method_std": file.number("initializer_range", 0.02),
        }
        settings |= read_rope(file, self.rotary_base, positions)
        if self.experts:
            settings |= {
                "num_experts": file.integer("num_local_experts", 8),
                "moe_router_topk": file.integer("num_experts_per_tok", 2),
            }
        return file.model(seq_length=positions, **settings), positions

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        """What a config.json of the family says of the network, as far as it can."""
        values: dict[str, Any] = {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.query_groups,
            "head_dim": model.head_size,
            "intermediate_size": model.expert_ffn_size if self.experts else model.ffn_size,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.max_position_embeddings or seq_length,
            "rms_norm_eps": model.norm_epsilon,
            "hidden_act": _WRITTEN.get(model.activation, "silu"),
            "tie_word_embeddings": model.tie_embeddings,
            "attention_dropout": model.attention_dropout,
            "initializer_range": model.init_method_std,
            **write_rope(model),
        }
        if self.attention_bias or self.linear_biases:
            values["attention_bias"] = self.linear_biases and model.add_bias_linear
        if self.linear_biases:
            values["mlp_bias"] = model.add_bias_linear
        if self.window == "switched":
            values |= {"use_sliding_window": model.sliding_window is not None, "max_window_layers": 0}
        if self.window != "none":
            values["sliding_window"] = model.sliding_window
        if self.experts:
            values |= {
                "num_local_experts": model.num_experts or 1,
                "num_experts_per_tok": model.moe_router_topk if model.num_experts else 1,
                "output_router_logits": False,
            }
        return values

    def _read_biases(self, file: ModelFile) -> bool:
        """Ours are in every linear layer or in none (or in query, key and value alone: Qwen2)."""
        attention = (self.linear_biases or self.attention_bias) and file.flag("attention_bias", False)
        mlp = self.linear_biases and file.flag("mlp_bias", False)
        if attention != mlp:
            both = f" and mlp_bias {str(mlp).lower()}" if self.linear_biases else ""
            raise file.fault(
                f"attention_bias is {str(attention).lower()}{both}; biases can be expressed in all linear layers or in "
                "none of them"
            )
        return attention

    def _read_window(self, file: ModelFile) -> int | None:
        if self.window == "none":
            return None
        if self.window != "switched":
            assert self.window is None or isinstance(self.window, int)
            window = file.optional_integer("sliding_window", self.window)
        else:
            window = self._read_switched_window(file)
        kinds = file.values.get("layer_types")
        if kinds is not None:
            wanted = "full_attention" if window is None else "sliding_attention"
            if not isinstance(kinds, list) or any(kind != wanted for kind in kinds):
                raise file.fault(
                    f"layer_types does not say {wanted} for every layer, as the other keys do; layers of different "
                    "kinds cannot be expressed"
                )
        return window

    def _read_switched_window(self, file: ModelFile) -> int | None:
        """Qwen's window: on, and from layer max_window_layers on."""
        if not file.flag("use_sliding_window", False):
            return None
        window = file.optional_integer("sliding_window", 4096)
        first = file.values.get("max_window_layers", 28)
        layers = file.integer("num_hidden_layers", limit=MAX_LAYERS)
        if type(first) is not int or first < 0:
            raise file.fault(f"max_window_layers is {str(first)[:60]!r}; it must be a whole number from 0 on")
        if window is None or first >= layers:
            return None
        if first > 0:
            raise file.fault(
                f"max_window_layers is {first} of {layers} layers: those below see all tokens, the others a window of "
                f"{window}; a window can only be expressed for all layers (0) or none ({layers})"
            )
        return window
