"""Megatron-LM's flags for settings with another name here, so that launch scripts port.

The tables list flags that set a fixed value, by a word or computed from their value; values with another name here or
none; and flags that depend on other settings. `megatron_flags.py` lists those that set nothing. Both include common
flags of earlier versions and of forks such as Megatron-DeepSpeed and Pai-Megatron-Patch."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalite.config.data import DATA_FILES, PATH_SETTINGS
from megalite.config.errors import ConfigError, nearest, shortened
from megalite.config.megatron_flags import FP8
from megalite.config.numbers import as_number, whole_number
from megalite.config.strategies import ALIASES

SHORTHANDS: Mapping[str, Mapping[str, Any]] = {
    "--bf16": {"precision": "bf16"},
    "--fp16": {"precision": "fp16"},
    "--fp32": {"precision": "fp32"},
    "--fp64": {"precision": "fp64"},
    "--swiglu": {"activation": "swiglu"},
    "--quick-geglu": {"activation": "quick_geglu"},
    "--squared-relu": {"activation": "squared_relu"},
    "--openai-gelu": {"activation": "gelu_tanh"},
    "--disable-bias-linear": {"add_bias_linear": False},
    "--untie-embeddings-and-output-weights": {"tie_embeddings": False},
    "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
    "--no-pad-vocab-size": {"make_vocab_size_divisible_by": 1},
    "--disable-pad-vocab-size": {"make_vocab_size_divisible_by": 1},
    "--use-torch-fsdp2": {"dp_strategy": "fully-sharded"},
    "--grad-reduce-in-bf16": {"wire_dtype": "bf16"},
    "--use-tp-pp-dp-mapping": {"rank_order": "tp-cp-ep-pp-dp"},
    "--recompute-activations": {"recompute_granularity": "selective"},
    "--checkpoint-activations": {"recompute_granularity": "full"},
    "--disable-fp8-wgrad": {"fp8_wgrad": False},
    "--exit-on-missing-checkpoint": {"fresh_if_missing": False},
    "--no-load-optim": {"load_optimizer": False},
    "--muon-no-split-qkv": {"muon_split_qkv": False},
    "--use-checkpoint-opt-param-scheduler": {"require_same_schedule": True},
}
"""Flag without a value -> the settings that it sets."""

_ZERO_STAGES = [ALIASES[name] for name in ("ddp", "zero1", "zero2", "zero3")]
WORDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "--data-parallel-sharding-strategy": dict(
        zip(("no_shard", "optim", "optim_grads", "optim_grads_params"), _ZERO_STAGES, strict=True)
    ),
    "--megatron-fsdp-grad-comm-dtype": {"auto": {}, "fp32": {}, "bf16": {"wire_dtype": "bf16"}},
    "--fp8-format": {"hybrid": {"fp8": True}, "e4m3": {"fp8": True, "fp8_recipe": "blockwise"}},
    "--activations-checkpoint-method": {
        name: {"recompute_granularity": "full", "recompute_method": name} for name in ("uniform", "block")
    },
    "--zero-stage": {str(stage): given for stage, given in enumerate(_ZERO_STAGES)},
}
"""Flag with a word -> the word -> the settings that it sets."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "recompute_modules": {"moe_act": "mlp_act"},
    "offload_modules": {"moe_act": "mlp_act"},
    "attention_backend": {"fused": "cudnn", "unfused": "math", "local": "math"},
    "cp_comm_type": {"all_gather": "allgather"},
    "fp8_recipe": {"delayed": "tensorwise"},
    "timing_log_level": {"2": "1"},
    "eval_iters": {"-1": "0"},
    "normalization": {"rmsnorm": "RMSNorm"},
    "tokenizer_type": {
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "Llama2Tokenizer": "SentencePieceTokenizer",
        "PretrainedFromHF": "HuggingFaceTokenizer",
    },
}
"""Setting -> Megatron's name of a value on the command line -> ours."""

SEVERAL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "optimizer": {"dist_muon": {"optimizer": "muon", "dp_strategy": "distributed-optimizer"}},
    "dataset": {"MMAP": {}, "LLama-Pretrain-Idxmap": {}},
}
"""Setting -> Megatron's name of a value -> the settings that it sets here; empty for the only kind of token file."""

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "position_embedding_type": {"yarn": "use --position-embedding-type rope --rope-scaling yarn"}
}
"""Setting -> Megatron's name of an unsupported value -> what to use."""

DIFFERENCES: Mapping[str, str] = {
    "--fp8-format": FP8,
    "--no-load-optim": "learning rate and weight decay continue from the loaded step; Megatron-LM restarts them",
}
"""Flag in the tables above -> the difference, which is reported each time."""

CONFLICTS: Mapping[str, str] = {"fp8_recipe": "use --fp8-format hybrid: only blockwise has e4m3 gradients"}
"""Setting that two flags set to different values -> what to use."""

SINKHORN_SCORES = ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor")
"""Settings that Megatron-LM does not read with Sinkhorn routing: the number of experts per token decides."""

_SCALING = ("rope_scaling", "rope_scaling_factor")
_HYBRID = (
    "num_layers",
    "experimental_attention_variant",
    "linear_attention_freq",
    "no_mlp_freq",
    "pipeline_layers",
    "vpp",
)
DERIVED: Mapping[str, tuple[type | None, tuple[str, ...]]] = {
    "--num-layers-per-virtual-pipeline-stage": (int, ("vpp",)),
    "--decoder-first-pipeline-num-layers": (int, ("pipeline_layers",)),
    "--decoder-last-pipeline-num-layers": (int, ("pipeline_layers",)),
    **dict.fromkeys(("--hybrid-layer-pattern", "--hybrid-override-pattern"), (str, _HYBRID)),
    "--group-query-attention": (None, ()),
    "--no-position-embedding": (None, ()),
    "--use-distributed-optimizer": (None, ("dp_strategy",)),
    "--account-for-embedding-in-pipeline-split": (None, ("pipeline_layers",)),
    "--account-for-loss-in-pipeline-split": (None, ("pipeline_layers",)),
    "--eval-global-batch-size": (int, ()),
    "--moe-layer-freq": (str, ("moe_first_dense_layers", "moe_layer_freq")),
    "--moe-router-load-balancing-type": (
        str,
        ("moe_aux_loss_coeff", "moe_aux_loss_sequences", "moe_router_sinkhorn", *SINKHORN_SCORES),
    ),
    "--rope-type": (str, ()),
    "--use-rope-scaling": (None, ("rope_scaling",)),
    "--rotary-scaling-factor": (str, (*_SCALING, "rope_original_max_positions")),
}
"""Flag that depends on other settings (see merge.py) -> the type of its value, if any, and the settings that it
sets."""


def _kept_checkpoints(text: str, where: str) -> dict[str, Any]:
    """Parse `--save-retain-interval N`: Megatron keeps the newest checkpoint and those at multiples of N steps."""
    return {"keep_latest": 1, "keep_every": whole_number(text, where)}


def _window(text: str, where: str) -> dict[str, Any]:
    """Parse `--window-size LEFT,RIGHT`: the keys beside the query's own."""
    numbers = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", text)
    if numbers is None:
        raise ConfigError(f"{where} takes two numbers such as 127,0, got {text}")
    left, right = int(numbers[1]), int(numbers[2])
    if right > 0 or (left, right) == (0, 0) or left < -1:
        raise ConfigError(f"{where} cannot be {text}: attention is causal; use e.g. 127,0, or -1,0 for no window")
    return {} if left == -1 else {"sliding_window": left + 1}


def _interpolated(text: str, where: str) -> dict[str, Any]:
    """Parse `--rotary-seq-len-interpolation-factor N`: all positions are divided by N."""
    factor = whole_number(text, where)
    return {} if factor == 1 else {"rope_scaling": "linear", "rope_scaling_factor": float(factor)}


def _padded(text: str, where: str) -> dict[str, Any]:
    """Parse `--padded-vocab-size N`: the embedding has exactly N rows."""
    return {"vocab_size": whole_number(text, where), "make_vocab_size_divisible_by": 1}


def stretched(text: str, where: str) -> dict[str, Any]:
    """Parse `--rotary-scaling-factor N`: Megatron's YaRN of multi-latent attention beyond 4096 positions; 1: off."""
    factor = as_number(text)
    if not factor >= 1.0:
        raise ConfigError(f"{where} takes a number of at least 1, such as 40, got {text[:60]}")
    if factor == 1.0:
        return {}
    return {"rope_scaling": "yarn", "rope_scaling_factor": factor, "rope_original_max_positions": 4096}


def layer_list(text: str, where: str) -> list[int]:
    """Parse Megatron's list with an entry per layer, such as `([1]*3+[0]*1)*2`."""

    def found(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.List(elts=elements):
                return [found(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return found(left) + found(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                parts = found(left), found(right)
                size = max(len(part) if isinstance(part, list) else part for part in parts)
                if size * min(len(part) if isinstance(part, list) else part for part in parts) < 100_000:
                    return parts[0] * parts[1]
        raise TypeError

    try:
        layers = found(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        layers = None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ConfigError(
            f"{where} takes a number, or 0 or 1 for each layer such as 1,1,0 or ([1]*2+[0])*4, got {text[:60]}"
        )
    return layers


def hybrid_layers(pattern: str, where: str) -> dict[str, Any]:
    """Return the settings of a layer pattern such as `M-M*-`, which names mixers (M: Mamba-2, G: Gated DeltaNet, *: attention)
    and MLPs (-: dense, E: experts) as separate layers. A mixer and the MLP that may follow it are one layer here."""
    layers = re.findall(r"([MG*])([-E]?)", pattern)
    if "".join(map("".join, layers)) != pattern or not layers:
        raise ConfigError(
            f"{where} {shortened(pattern)} must consist of M, G and *, each followed by at most one of - and E, such as M-M*-"
        )
    if {"M", "G"} <= set(pattern):
        raise ConfigError(f"{where} {shortened(pattern)} has M and G; use one kind of linear attention")
    if re.search("E.*-", pattern):
        raise ConfigError(f"{where} {shortened(pattern)} has - after E; use dense MLPs only before experts")
    mixers, mlps = zip(*layers, strict=True)
    linear, without = [int(mixer != "*") for mixer in mixers], [int(not mlp) for mlp in mlps]
    found: dict[str, Any] = {"num_layers": len(layers)}
    if any(linear):
        found["experimental_attention_variant"] = "mamba2" if "M" in pattern else "gated_delta_net"
        found["linear_attention_freq"] = linear
    if any(without):
        found["no_mlp_freq"] = without
    return found | ({"moe_first_dense_layers": mlps.index("E")} if "E" in mlps else {})


def expert_layers(pattern: Sequence[Any]) -> tuple[int, int] | None:
    """Return (moe_first_dense_layers, moe_layer_freq) of a list with 1 for each expert layer; None: no such form."""
    if 1 not in pattern:
        return None
    first = list(pattern).index(1)
    every = next((n for n in range(1, len(pattern) - first) if pattern[first + n] == 1), len(pattern))
    found = [int(index >= first and (index - first) % every == 0) for index in range(len(pattern))]
    return (first, every) if found == list(pattern) else None


FROM_VALUE: Mapping[str, tuple[Callable[[str, str], dict[str, Any]], tuple[str, ...]]] = {
    **{flag: (read, PATH_SETTINGS) for flag, read in DATA_FILES.items()},
    "--save-retain-interval": (_kept_checkpoints, ("keep_latest", "keep_every")),
    "--window-size": (_window, ("sliding_window",)),
    "--rotary-seq-len-interpolation-factor": (_interpolated, _SCALING),
    "--padded-vocab-size": (_padded, ("vocab_size", "make_vocab_size_divisible_by")),
    "--pad-vocab-size-to": (_padded, ("vocab_size", "make_vocab_size_divisible_by")),
}
"""Flag -> (parser of its value and the flag, names of the settings that it sets)."""

STANDS_FOR: Mapping[str, tuple[str, ...]] = {
    **{flag: tuple(fixed) for flag, fixed in SHORTHANDS.items()},
    **{flag: tuple({name for fixed in words.values() for name in fixed}) for flag, words in WORDS.items()},
    **{flag: names for flag, (_, names) in (*DERIVED.items(), *FROM_VALUE.items())},
}
"""Flag that is not a setting -> the settings that it sets."""


def settings_of_word(flag: str, word: str, where: str) -> Mapping[str, Any]:
    """Return the settings of a word after a flag of `WORDS`. Raises ConfigError: the word is unknown; the message
    starts with `where`."""
    words = WORDS[flag]
    if word not in words:
        raise ConfigError(f"{where} cannot be {word}{nearest(word, words)} (one of {', '.join(words)})")
    return words[word]
