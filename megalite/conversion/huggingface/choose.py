"""Choose the family that expresses a model."""

from dataclasses import asdict
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.model import TRAINING_FIELDS, ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, resolved
from megalite.conversion.huggingface.families import FAMILIES
from megalite.conversion.huggingface.llama import Family
from megalite.conversion.weights import ConversionError

_KINDS = {"", "num_experts", "position_embedding_type", "normalization"}


def family_named(name: str) -> Family:
    if name not in FAMILIES:
        raise ConversionError(f"{name[:60] or repr(name)} is not a supported family; use {', '.join(FAMILIES)}")
    return FAMILIES[name]


def choose_family(model: ModelConfig, seq_length: int, name: str | None) -> Family:
    """Return the family `name` or, without a name, the first that expresses the model."""
    candidates = list(FAMILIES.values()) if name is None else [family_named(name)]
    found = [(differences(family, model, seq_length), family) for family in candidates]
    # A different kind of network is a larger difference than any number of settings.
    differing, family = min(found, key=lambda item: (len(_KINDS & item[0].keys()), len(item[0])))
    if not differing:
        return family
    others = FAMILIES.values() if name is not None else ()
    fitting = [other.name for other in others if not differences(other, model, seq_length)]
    who = f"no Hugging Face family is this model; the nearest, {family.name}," if name is None else family.name
    remedy = f"--family {fitting[0]} is the same model" if fitting else "megalite's own format keeps it"
    raise ConversionError(f"{who} differs: {'; '.join(differing.values())}; {remedy}")


def _normal_form(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with several equivalent forms in a normal form."""
    model = ModelConfig(**values)
    windows, ropes = ([int(has(i)) for i in range(model.num_layers)] for has in (model.has_window, model.has_rope))
    found: dict[str, Any] = {"softmax_scale": model.softmax_scale or model.head_size**-0.5}
    found["window_attn_skip_freq"] = windows if len(set(windows)) > 1 else None
    found["no_rope_freq"] = None if all(ropes) else [1 - one for one in ropes]
    linear = [int(model.is_linear_layer(index)) for index in range(model.num_layers)]
    found["linear_attention_freq"] = linear if any(linear) else None
    without = [int(not model.has_mlp(index)) for index in range(model.num_layers)]
    found["no_mlp_freq"] = without if any(without) else None
    if model.is_sparse:
        found["dsa_indexer_k_norm_epsilon"] = model.dsa_indexer_k_norm_epsilon or model.norm_epsilon
    if not any(windows):
        found |= {"sliding_window": None, "rotary_base_local": None}
    if model.rope_scaling == "none" and model.rotary_base_local == model.rotary_base:
        found["rotary_base_local"] = None
    return found


def differences(family: Family, model: ModelConfig, seq_length: int) -> dict[str, str]:
    """Return the settings that would change if the model were written as this family and read again. Maps each field to
    a text with both values; empty if the family expresses the model."""
    written = family.write(model, seq_length)
    try:
        theirs = asdict(family.read(ModelFile(written, f"a {family.name} config.json"))[0])
        ours = asdict(resolved(model, seq_length))
        for values in (theirs, ours):
            values |= _normal_form(values)
    except ConfigError as error:
        return {"": str(error)}
    # The padding of the vocabulary does not change the tokens' logits.
    ignored = {*TRAINING_FIELDS, "make_vocab_size_divisible_by"}
    # If one side lacks a component, its settings need not be compared.
    if theirs["num_experts"] is None or ours["num_experts"] is None:
        ignored |= {field for field in ours if field.startswith("moe_")}
    if theirs["position_embedding_type"] != ours["position_embedding_type"]:
        ignored |= {"max_position_embeddings"} | {name for name in ours if name.startswith(("rope_", "rotary_"))}
    if ours["rope_scaling"] == "dynamic":
        ignored.add("max_position_embeddings")
    if theirs["num_experts"] is not None and ours["num_experts"] is not None:
        # An unset expert width means the dense MLP's width, which has no other effect if no layer is dense.
        theirs["moe_ffn_hidden_size"] = theirs["moe_ffn_hidden_size"] or theirs["ffn_hidden_size"]
        ours["moe_ffn_hidden_size"] = model.expert_ffn_size
        if all(model.is_moe_layer(index) for index in range(model.num_layers)):
            ignored.add("ffn_hidden_size")
    found = {
        field: f"{field} is {ours[field]}, {family.name} has {theirs[field]}"
        for field in ours
        if field not in ignored and ours[field] != theirs[field]
    }
    if family.whole_heads and model.hidden_size % model.num_attention_heads:
        found["hidden_size"] = (
            f"hidden_size is {model.hidden_size}, {family.name} needs a multiple of num_attention_heads "
            f"{model.num_attention_heads}"
        )
    return found
