"""The families that can be read and written: config.json and tensor names of each, and which one expresses a model."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.model import TRAINING_FIELDS, ModelConfig
from megalite.conversion.huggingface.gpt2 import gpt2_pieces, read_gpt2, write_gpt2
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.huggingface.llama_pieces import llama_pieces
from megalite.conversion.huggingface.model_config import ModelFile, resolved
from megalite.conversion.pieces import Piece
from megalite.conversion.weights import ConversionError

_KINDS = {"", "num_experts", "position_embedding_type", "normalization"}
_NO_BUFFERS = re.compile(r"(?!)")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of transformers.

    Args:
        name: config.json's model_type.
        architecture: its class there.
        read: from config.json to the network and its longest sequence; raises ConversionError for what we have not.
        write: from the network to config.json, as far as that can say it.
        pieces: its tensors; see `gpt2_pieces`.
        buffers: names of tensors in old files that hold no weights: masks, frequencies.
        whole_heads: the class takes no hidden_size that num_attention_heads does not divide, head_dim or not.
    """

    name: str
    architecture: str
    read: Callable[[ModelFile], tuple[ModelConfig, int]]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    pieces: Callable[[ModelConfig, Collection[str] | None], Iterator[Piece]]
    buffers: re.Pattern[str] = _NO_BUFFERS
    whole_heads: bool = False


def _llama_like(name: str, architecture: str, rules: LlamaLike, *, whole_heads: bool = False) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        read=rules.read,
        write=rules.write,
        pieces=llama_pieces,
        buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        whole_heads=whole_heads,
    )


_ALL = (
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        read=read_gpt2,
        write=write_gpt2,
        pieces=gpt2_pieces,
        buffers=re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    ),
    _llama_like(
        "llama",
        "LlamaForCausalLM",
        LlamaLike(max_positions=2048, linear_biases=True),
        whole_heads=True,
    ),
    _llama_like(
        "mistral", "MistralForCausalLM", LlamaLike(max_positions=131072, key_value_heads=8, window=4096)
    ),
    _llama_like(
        "qwen2",
        "Qwen2ForCausalLM",
        LlamaLike(max_positions=32768, key_value_heads=32, qkv_bias=True, window="switched"),
    ),
    _llama_like(
        "qwen3",
        "Qwen3ForCausalLM",
        LlamaLike(
            max_positions=32768,
            key_value_heads=32,
            head_size=128,
            attention_bias=True,
            qk_norm=True,
            window="switched",
        ),
    ),
    _llama_like(
        "mixtral",
        "MixtralForCausalLM",
        LlamaLike(
            max_positions=131072,
            norm_epsilon=1e-5,
            rotary_base=1e6,
            key_value_heads=8,
            window=None,
            experts=True,
        ),
    ),
)
FAMILIES = {family.name: family for family in _ALL}
"""By model_type. Where several express a model, the first is taken."""


def family_named(name: str) -> Family:
    """The family of that name.

    Raises:
        ConversionError: there is none.
    """
    if name not in FAMILIES:
        raise ConversionError(
            f"{name[:60] or repr(name)} is not a family that can be expressed; use {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def choose_family(model: ModelConfig, seq_length: int, name: str | None) -> Family:
    """The family `name`, or without a name the first, that expresses the network.

    Raises:
        ConversionError: it does not, or none does; the fields in which the nearest differs are named.
    """
    candidates = list(FAMILIES.values()) if name is None else [family_named(name)]
    found = [(differences(family, model, seq_length), family) for family in candidates]
    differing, family = min(found, key=lambda item: _distance(item[0]))
    if not differing:
        return family
    fitting = [] if name is None else _fitting(model, seq_length)
    who = (
        f"no Hugging Face family is this model; the nearest, {family.name}," if name is None else family.name
    )
    remedy = f"--family {fitting[0]} is the same model" if fitting else "megalite's own format keeps it"
    raise ConversionError(f"{who} differs: {'; '.join(differing.values())}; {remedy}")


def _distance(differing: Mapping[str, str]) -> tuple[int, int]:
    """How far a family is from a model: another kind of network is further away than any number of settings."""
    return len(_KINDS & differing.keys()), len(differing)


def _fitting(model: ModelConfig, seq_length: int) -> list[str]:
    return [name for name, family in FAMILIES.items() if not differences(family, model, seq_length)]


def differences(family: Family, model: ModelConfig, seq_length: int) -> dict[str, str]:
    """What a folder of the family would give back with other values: by field a text with both; empty if nothing."""
    written = family.write(model, seq_length)
    try:
        there = asdict(family.read(ModelFile(written, f"a {family.name} config.json"))[0])
        ours = asdict(resolved(model, seq_length))
    except ConfigError as error:
        return {"": str(error)}
    # How far the vocabulary is padded changes no token's logit.
    free = {*TRAINING_FIELDS, "make_vocab_size_divisible_by"}
    # Of a part that the other side has not, its settings say no more than that.
    if there["num_experts"] is None or ours["num_experts"] is None:
        free |= {field for field in ours if field.startswith("moe_")}
    if there["position_embedding_type"] != ours["position_embedding_type"]:
        free |= {"max_position_embeddings"} | {name for name in ours if name.startswith(("rope_", "rotary_"))}
    if there["num_experts"] is not None and ours["num_experts"] is not None:
        # A width of one expert that is not given is the dense MLP's; where no layer is dense that is all there is.
        there["moe_ffn_hidden_size"], ours["moe_ffn_hidden_size"] = (
            there["ffn_hidden_size"],
            model.expert_ffn_size,
        )
        if all(model.is_moe_layer(index) for index in range(model.num_layers)):
            free.add("ffn_hidden_size")
    found = {
        field: f"{field} is {ours[field]}, {family.name} has {there[field]}"
        for field in ours
        if field not in free and ours[field] != there[field]
    }
    if family.whole_heads and model.hidden_size % model.num_attention_heads:
        found["hidden_size"] = (
            f"hidden_size is {model.hidden_size}, {family.name} needs a multiple of num_attention_heads "
            f"{model.num_attention_heads}"
        )
    return found
