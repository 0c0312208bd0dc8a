"""Read the `args` of a Megatron-LM checkpoint, accepting only plain values, and derive the model config."""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from megalite.config.errors import ConfigError
from megalite.config.megatron import expert_layers
from megalite.config.model import LATENT_SIZES, LAYER_LISTS, ModelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.config.validate import validate
from megalite.conversion.weights import ConversionError

STRUCTURE = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels group_query_attention
max_position_embeddings seq_length position_embedding_type rotary_base normalization swiglu add_bias_linear add_qkv_bias
untie_embeddings_and_output_weights padded_vocab_size num_experts moe_ffn_hidden_size moe_layer_freq qk_layernorm
norm_epsilon tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size softmax_type
virtual_pipeline_model_parallel_size expert_tensor_parallel_size layernorm_epsilon bias_gelu_fusion quick_geglu
multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
""".split()  # noqa: SIM905
"""Arguments that must be equal in all files of a checkpoint."""

_LARGEST_WHOLE, _LARGEST_NUMBER, _BITS = 2**31 - 1, 1e30, 63


class Arguments:
    """Checked access to the `args` of a checkpoint. Defaults are the behaviour of versions that lack an argument."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self.path = path

    @classmethod
    def of(cls, content: Any, path: Path) -> "Arguments":
        """Return the args in the content of a file."""
        if not isinstance(content, dict) or not isinstance(content.get("args"), Namespace):
            raise ConversionError(f"{path} has no args, which define the model")
        return cls(vars(content["args"]), path)

    def without(self, name: str) -> "Arguments":
        return Arguments({key: value for key, value in self._values.items() if key != name}, self.path)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a plain value: None, bool, number, string or a sequence of these."""
        value = self._values.get(name)
        if value is None:
            return default
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int) and item.bit_length() > _BITS:
                raise ConversionError(f"{self.path}: args.{name} has {item.bit_length()} bits, more than {_BITS}")
        if isinstance(value, list | tuple):
            if all(isinstance(item, bool | int | float | str | None) for item in value):
                return value
        elif isinstance(value, bool | int | float | str | torch.dtype):
            return value
        raise ConversionError(f"{self.path}: args.{name} is a {type(value).__name__}, not a plain value")

    def _needed(
        self, name: str, default: Any, kinds: type | UnionType, allowed: Callable[[Any], bool], what: str
    ) -> Any:
        value = self.get(name, default)
        if isinstance(value, kinds) and isinstance(value, bool) == (kinds is bool) and allowed(value):
            return value
        raise ConversionError(f"{self.path}: args.{name} is {value!r}; {what}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number below 2^31."""
        what = f"a whole number above 0 and up to {_LARGEST_WHOLE} is needed"
        return int(self._needed(name, default, int, lambda value: 0 < value <= _LARGEST_WHOLE, what))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._needed(name, default, bool, lambda value: True, "True or False is needed"))

    def integer_or_none(self, name: str) -> int | None:
        """Return a positive whole number, or None if the argument is 0 or missing."""
        return self.integer(name) if self.get(name) else None

    def number(self, name: str, default: float) -> float:
        """Return a finite number of magnitude at most 1e30."""
        what = f"a number is needed, of at most {_LARGEST_NUMBER:g}"
        return float(self._needed(name, default, int | float, lambda value: abs(value) <= _LARGEST_NUMBER, what))

    def differences(self, other: "Arguments") -> list[str]:
        """Return the `STRUCTURE` arguments that differ in another file, with both values."""
        return [
            f"{name} {self.get(name)!r} and {other.get(name)!r}"
            for name in STRUCTURE
            if self.get(name) != other.get(name)
        ]


_OFF = ["apply_residual_connection_post_layernorm", "is_hybrid_model", "qk_l2_norm", "use_mup", "retro_add_retriever"]
_OFF += ["attention_output_gate", "moe_apply_probs_on_input", "geglu"]
_UNSET = ["heterogeneous_layers_config_path", "hybrid_layer_pattern", "hybrid_override_pattern", "moe_input_jitter_eps"]
_UNSET += ["linear_attention_freq", "experimental_attention_variant"]
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF, (None, False)),
    **dict.fromkeys(_UNSET, (None,)),
    **dict.fromkeys(("mtp_num_layers", "moe_latent_size"), (None, 0)),
    "moe_router_score_function": (None, "softmax", "sigmoid"),
    "rope_type": (None, "rope", "yarn"),
    "softmax_type": (None, "vanilla", "off-by-one", "learnable"),
    "moe_token_drop_policy": (None, "probs", "position"),
    "position_embedding_type": (None, "learned_absolute", "rope", "yarn", "none"),
    "normalization": (None, "LayerNorm", "RMSNorm"),
}
"""Argument -> supported values; None: the version lacks the argument."""


def read_model(args: Arguments, *, padded_vocabulary: int, tp: int) -> ModelConfig:
    """Return the model config that args describe. `padded_vocabulary`: rows of the embedding over all `tp` ranks."""
    wrong = [f"{name} = {args.get(name)!r}" for name, allowed in _MUST_BE.items() if args.get(name) not in allowed]
    if wrong:
        raise ConversionError(f"{args.path} has a model that megalite does not support: args.{', args.'.join(wrong)}")
    h, heads = args.integer("hidden_size"), args.integer("num_attention_heads")
    biases = args.flag("add_bias_linear", not args.flag("disable_bias_linear", False))
    groups = args.integer("num_query_groups", heads) if args.flag("group_query_attention", False) else heads
    vocabulary, multiple = _vocabulary(args, padded_vocabulary, tp)
    settings: dict[str, Any] = {
        "num_layers": args.integer("num_layers"),
        "hidden_size": h,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": args.integer("kv_channels", h // heads),
        "ffn_hidden_size": args.integer("ffn_hidden_size", 4 * h),
        "vocab_size": vocabulary,
        "make_vocab_size_divisible_by": multiple,
        "max_position_embeddings": args.integer("max_position_embeddings"),
        "sliding_window": _window(args),
        **{name: _layers(args, name) for name in LAYER_LISTS},
        "normalization": args.get("normalization", "LayerNorm"),
        "norm_zero_centered": args.flag("apply_layernorm_1p", False),
        "norm_epsilon": args.number("norm_epsilon", args.number("layernorm_epsilon", 1e-5)),
        "qk_norm": args.flag("qk_layernorm", False),
        "activation": _activation(args, biases),
        "activation_func_clamp_value": (
            None if args.get("activation_func_clamp_value") is None else args.number("activation_func_clamp_value", 0.0)
        ),
        "glu_linear_offset": args.number("glu_linear_offset", 0.0),
        "softmax_type": args.get("softmax_type") or "vanilla",
        "add_bias_linear": biases,
        # Megatron-LM also sets it if all linear layers have biases.
        "add_qkv_bias": args.flag("add_qkv_bias", False) and not biases,
        "tie_embeddings": not args.flag("untie_embeddings_and_output_weights", False),
        "hidden_dropout": args.number("hidden_dropout", 0.0),
        "attention_dropout": args.number("attention_dropout", 0.0),
        "init_method_std": args.number("init_method_std", 0.02),
    }
    positions = _positions(args)
    if args.flag("multi_latent_attention", False):
        settings |= _latent_attention(args)
        positions |= _latent_rope(args)
    elif args.get("rope_type") == "yarn":
        raise ConversionError(
            f"{args.path}: args.rope_type is yarn without multi_latent_attention; only that supports it"
        )
    model = ModelConfig(**settings, **positions, **_experts(args, biases))
    length = args.integer("seq_length", args.integer("max_position_embeddings"))
    try:
        validate(RunConfig(model=model, training=TrainingConfig(seq_length=length)), 1)
    except ConfigError as error:
        raise ConversionError(f"{args.path}: megalite cannot train the model of its args: {error}") from None
    return model


def _window(args: Arguments) -> int | None:
    """Theirs is (keys before the query, keys after it), with -1 for no limit; ours includes the query's own key."""
    window = args.get("window_size")
    if window is None:
        return None
    if (
        not isinstance(window, list | tuple)
        or len(window) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n < 2**31 for n in window)
    ):
        raise ConversionError(f"{args.path}: args.window_size is {window!r}; it must be two whole numbers")
    if window[1] not in (0, -1):
        raise ConversionError(f"{args.path}: args.window_size is {window!r}; megalite supports (left, 0)")
    return None if window[0] < 0 else window[0] + 1


def _layers(args: Arguments, name: str) -> list[int] | None:
    """Read a list of layers: a number n for every n-th layer, or a 0 or 1 for each layer; 0: none."""
    value = args.get(name)
    if value is None or (type(value) is int and value == 0):
        return None
    layers = [value] if type(value) is int else value
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < 10_000 for layer in layers):
        raise ConversionError(
            f"{args.path}: args.{name} is {str(value)[:60]}; it must be a number or a list of 0 and 1"
        )
    return layers


def _activation(args: Arguments, biases: bool) -> str:
    """Megatron-LM's fused bias and GELU uses the tanh approximation. Without biases, nothing is fused (exact GELU)."""
    if args.flag("swiglu", False):
        return "swiglu"
    for name in ("squared_relu", "quick_geglu"):
        if args.flag(name, False):
            return name
    if args.flag("openai_gelu", False):
        return "gelu_tanh"
    fused = args.flag("bias_gelu_fusion", True) and biases and not args.flag("onnx_safe", False)
    return "gelu_tanh" if fused else "gelu"


def _vocabulary(args: Arguments, padded: int, tp: int) -> tuple[int, int]:
    """Return vocabulary size and padding multiple, with which our padded size equals theirs. If the true size is
    unknown, the padded size is returned as the size."""
    stated = args.integer("padded_vocab_size", padded)
    if stated != padded:
        raise ConversionError(f"{args.path}: args.padded_vocab_size is {stated}, the embedding has {padded} rows")
    multiple = args.integer("make_vocab_size_divisible_by", 128) * tp
    size = None if args.get("vocab_size") is None else args.integer("vocab_size")
    # Some versions include the end-of-document token in the NullTokenizer's vocab_size, others do not.
    if size is not None and args.get("tokenizer_type") != "NullTokenizer" and -(-size // multiple) * multiple == padded:
        return size, multiple
    return padded, multiple if padded % multiple == 0 else 1


def _positions(args: Arguments) -> dict[str, Any]:
    kind = args.get("position_embedding_type", "learned_absolute")
    stretched: dict[str, Any] = {}
    if args.flag("use_rotary_position_embeddings", False):
        kind = "rope"
    elif kind == "yarn":
        kind, stretched = "rope", _yarn(args)
    settings: dict[str, Any] = {"position_embedding_type": kind, "rotary_base": args.number("rotary_base", 10000)}
    if kind == "rope":
        settings["rotary_percent"] = args.number("rotary_percent", 1.0)
        settings["rotary_interleaved"] = args.flag("rotary_interleaved", False)
    factor = args.number("rotary_seq_len_interpolation_factor", 1)
    if kind == "rope" and args.flag("use_rope_scaling", False):
        if factor != 1:
            raise ConversionError(
                f"{args.path}: args.use_rope_scaling with interpolation factor {factor} is not supported"
            )
        settings |= {"rope_scaling": "llama3", "rope_scaling_factor": args.number("rope_scaling_factor", 8.0)}
    elif kind == "rope" and factor != 1:
        settings |= {"rope_scaling": "linear", "rope_scaling_factor": factor}
    return settings | stretched


def _yarn(args: Arguments) -> dict[str, Any]:
    """Read YaRN's settings of normal attention; multi-latent attention has other arguments."""
    growth = args.number("mscale", 1.0), args.number("mscale_all_dim", 0.0)
    if growth != (1.0, 0.0):
        raise ConversionError(f"{args.path}: args.mscale and mscale_all_dim are {growth}; only (1.0, 0.0) is supported")
    return {
        "rope_scaling": "yarn",
        "rope_scaling_factor": args.number("rotary_scaling_factor", 1.0),
        "rope_original_max_positions": int(args.number("yarn_original_max_position_embeddings", 4096)),
        "rope_beta_fast": args.number("yarn_beta_fast", 32.0),
        "rope_beta_slow": args.number("yarn_beta_slow", 1.0),
        "rope_truncate": args.flag("yarn_correction_range_round_to_int", True),
    }


def _latent_attention(args: Arguments) -> dict[str, Any]:
    q_rank = None if args.get("q_lora_rank") is None else args.integer("q_lora_rank")
    sizes = {name: args.integer(name) for name in LATENT_SIZES if name != "q_lora_rank"}
    unused = {"kv_channels": None, "num_query_groups": None, "add_qkv_bias": False}
    return {"multi_latent_attention": True, "q_lora_rank": q_rank, **sizes, **unused}


def _latent_rope(args: Arguments) -> dict[str, Any]:
    """Read the RoPE of multi-latent attention: YaRN unless its factor is 1. It always rotates pairs of adjacent channels, so
    rotary_percent and rotary_interleaved have no effect and keep their defaults."""
    found: dict[str, Any] = {"rotary_percent": 1.0, "rotary_interleaved": False}
    factor = args.number("rotary_scaling_factor", 1.0)
    if factor == 1.0:
        return found
    if args.get("rope_type") == "rope":
        raise ConversionError(
            f"{args.path}: args.rope_type is rope with rotary_scaling_factor {factor:g}; that requires yarn"
        )
    found |= {"rope_scaling": "yarn", "rope_scaling_factor": factor, "rope_original_max_positions": 4096}
    scale, all_dim = args.number("mscale", 1.0), args.number("mscale_all_dim", 0.0)
    if all_dim:
        return found | {"rope_mscale": scale, "rope_mscale_all_dim": all_dim}
    return found if scale == 1.0 else found | {"rope_attention_factor": 0.1 * scale * math.log(factor) + 1.0}


def _experts(args: Arguments, biases: bool) -> dict[str, Any]:
    experts = args.get("num_experts")
    if isinstance(experts, list | tuple):  # versions of 2023 have a number for each group of layers
        experts = None if list(experts) in ([], [1]) else experts[0] if len(experts) == 1 else experts
    if experts is None:
        return {}
    if not isinstance(experts, int) or isinstance(experts, bool):
        raise ConversionError(f"{args.path}: args.num_experts is {experts!r}; one number for all layers is needed")
    if biases and args.get("moe_shared_expert_intermediate_size"):
        raise ConversionError(
            f"{args.path}: args.add_bias_linear is not supported with shared experts, which have no biases"
        )
    etp = args.get("expert_tensor_parallel_size")
    if etp not in (None, args.get("tensor_model_parallel_size", 1)):
        raise ConversionError(
            f"{args.path}: args.expert_tensor_parallel_size is {etp}; only the tensor_model_parallel_size "
            f"{args.get('tensor_model_parallel_size', 1)} can be read. Save the checkpoint again with that value"
        )
    first, every = _expert_layers(args)
    capacity = args.number("moe_expert_capacity_factor", -1.0)
    topk, sigmoid = args.integer("moe_router_topk", 2), args.get("moe_router_score_function") == "sigmoid"
    sinkhorn = args.get("moe_router_load_balancing_type") == "sinkhorn"
    if sinkhorn:  # theirs reads no other setting of the scores
        sigmoid = topk == 1
    return {
        "num_experts": experts,
        "moe_add_bias_linear": biases,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": args.integer("moe_ffn_hidden_size", args.integer("ffn_hidden_size")),
        "moe_shared_expert_intermediate_size": args.integer_or_none("moe_shared_expert_intermediate_size"),
        "moe_first_dense_layers": first,
        "moe_layer_freq": every,
        "moe_router_pre_softmax": (sinkhorn or args.flag("moe_router_pre_softmax", False)) and not sigmoid,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_sinkhorn": sinkhorn,
        "moe_router_enable_expert_bias": args.flag("moe_router_enable_expert_bias", False),
        "moe_router_bias_update_rate": args.number("moe_router_bias_update_rate", 1e-3),
        "moe_router_num_groups": args.integer_or_none("moe_router_num_groups"),
        "moe_router_group_topk": args.integer_or_none("moe_router_group_topk"),
        "moe_shared_expert_gate": args.flag("moe_shared_expert_gate", False),
        "moe_router_topk_scaling_factor": 1.0
        if sinkhorn
        else args.number("moe_router_topk_scaling_factor", 1.0) or 1.0,
        "moe_expert_capacity_factor": None if capacity < 0 else capacity,
        "moe_token_drop_policy": args.get("moe_token_drop_policy", "probs"),
        "moe_pad_expert_input_to_capacity": capacity >= 0 and args.flag("moe_pad_expert_input_to_capacity", False),
        "moe_aux_loss_coeff": _coefficient(args, "moe_aux_loss_coeff"),
        "moe_z_loss_coeff": _coefficient(args, "moe_z_loss_coeff"),
    }


def _coefficient(args: Arguments, name: str) -> float:
    """Return the coefficient of a loss. A list, for several losses, is not supported and gives 0."""
    return 0.0 if isinstance(args.get(name), list | tuple) else args.number(name, 0.0)


def _expert_layers(args: Arguments) -> tuple[int, int]:
    """Return the number of dense layers at the start, and n if every n-th layer after them has experts."""
    pattern, layers = args.get("moe_layer_freq", 1), args.integer("num_layers")
    if isinstance(pattern, int):
        return 0, args.integer("moe_layer_freq", 1)
    if isinstance(pattern, list | tuple) and len(pattern) == layers and (found := expert_layers(pattern)) is not None:
        return found
    raise ConversionError(f"{args.path}: args.moe_layer_freq is {pattern!r}; only every n-th layer after dense ones")
