"""Weights of Hugging Face's models under our names and in our layouts.

What differs besides the names: query, key and value are one matrix whose rows are grouped by key/value head; gate and
up projection are stacked on a dimension of their own; the vocabulary's rows are padded; GPT-2 keeps its matrices the
other way round.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megalite.config.model import ModelConfig

Weights = dict[str, Tensor]  # full tensors by name


def from_gpt2(theirs: Mapping[str, Tensor], model: ModelConfig) -> Weights:
    """GPT2LMHeadModel: LayerNorms and biases everywhere, [in, out] matrices, c_attn = (all queries, keys, values)."""
    ours = {
        "embedding.word.weight": pad_vocabulary(theirs["transformer.wte.weight"], model),
        "embedding.position.weight": theirs["transformer.wpe.weight"],
    }
    for i in range(model.num_layers):
        there, here = f"transformer.h.{i}", f"layers.{i}"
        for kind in ("weight", "bias"):
            ours[f"{here}.attention_norm.{kind}"] = theirs[f"{there}.ln_1.{kind}"]
            ours[f"{here}.mlp_norm.{kind}"] = theirs[f"{there}.ln_2.{kind}"]
            q, k, v = theirs[f"{there}.attn.c_attn.{kind}"].t().chunk(3)
            ours[f"{here}.attention.qkv.{kind}"] = group_qkv(q, k, v, model)
            ours[f"{here}.attention.out.{kind}"] = theirs[f"{there}.attn.c_proj.{kind}"].t()
            ours[f"{here}.mlp.up.{kind}"] = theirs[f"{there}.mlp.c_fc.{kind}"].t()
            ours[f"{here}.mlp.down.{kind}"] = theirs[f"{there}.mlp.c_proj.{kind}"].t()
    for kind in ("weight", "bias"):
        ours[f"final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
    return ours


def from_llama(theirs: Mapping[str, Tensor], model: ModelConfig) -> Weights:
    """Llama and all that share its names: Mistral, Qwen2, Qwen3, Gemma 1 to 3, OLMo 2, Mixtral."""
    ours = {
        "embedding.word.weight": pad_vocabulary(theirs["model.embed_tokens.weight"], model),
        "final_norm.weight": theirs["model.norm.weight"],
    }
    if not model.tie_embeddings:
        ours["head.weight"] = pad_vocabulary(theirs["lm_head.weight"], model)
    for i in range(model.num_layers):
        there, here = f"model.layers.{i}", f"layers.{i}"
        names = {"attention_norm": "input", "mlp_norm": "post_attention"}
        if model.post_norms:
            names = {"attention_post_norm": "post_attention", "mlp_post_norm": "post_feedforward"}
            names |= {"attention_norm": "input", "mlp_norm": "pre_feedforward"} if model.pre_norms else {}
        for name, their_name in names.items():
            ours[f"{here}.{name}.weight"] = theirs[f"{there}.{their_name}_layernorm.weight"]
        ours |= _llama_attention(theirs, f"{there}.self_attn", f"{here}.attention", model)
        if model.moe_add_bias_linear:
            ours |= _gpt_oss(theirs, there, here)
        elif model.is_moe_layer(i):
            ours |= _mixtral_experts(theirs, f"{there}.mlp", f"{here}.moe")
        else:
            gate, up = (theirs[f"{there}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
            ours[f"{here}.mlp.up.weight"] = torch.stack((gate, up))
            ours[f"{here}.mlp.down.weight"] = theirs[f"{there}.mlp.down_proj.weight"]
    return ours


def _llama_attention(theirs: Mapping[str, Tensor], there: str, here: str, model: ModelConfig) -> Weights:
    ours = {f"{here}.out.weight": theirs[f"{there}.o_proj.weight"]}
    for kind in ("weight", "bias") if model.add_qkv_bias or model.add_bias_linear else ("weight",):
        q, k, v = (theirs[f"{there}.{name}_proj.{kind}"] for name in "qkv")
        ours[f"{here}.qkv.{kind}"] = group_qkv(q, k, v, model)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            ours[f"{here}.{name}.weight"] = theirs[f"{there}.{name}.weight"]
    return ours


def _mixtral_experts(theirs: Mapping[str, Tensor], there: str, here: str) -> Weights:
    """gate_up_proj [E, 2·f, h] has the gates first."""
    return {
        f"{here}.router.weight": theirs[f"{there}.gate.weight"],
        f"{here}.experts.up.weight": theirs[f"{there}.experts.gate_up_proj"].unflatten(1, (2, -1)),
        f"{here}.experts.down.weight": theirs[f"{there}.experts.down_proj"],
    }


def _gpt_oss(theirs: Mapping[str, Tensor], there: str, here: str) -> Weights:
    """Sinks, biases, and of each expert [h, 2·f] with gates in even columns and [f, h]."""
    experts = f"{there}.mlp.experts"
    up, bias = theirs[f"{experts}.gate_up_proj"].mT, theirs[f"{experts}.gate_up_proj_bias"]
    return {
        f"{here}.attention.sinks": theirs[f"{there}.self_attn.sinks"],
        f"{here}.attention.out.bias": theirs[f"{there}.self_attn.o_proj.bias"],
        f"{here}.moe.router.weight": theirs[f"{there}.mlp.router.weight"],
        f"{here}.moe.router.linear_bias": theirs[f"{there}.mlp.router.bias"],
        f"{here}.moe.experts.up.weight": torch.stack((up[:, ::2], up[:, 1::2]), dim=1),
        f"{here}.moe.experts.up.bias": torch.stack((bias[:, ::2], bias[:, 1::2]), dim=1),
        f"{here}.moe.experts.down.weight": theirs[f"{experts}.down_proj"].mT,
        f"{here}.moe.experts.down.bias": theirs[f"{experts}.down_proj_bias"],
    }


def group_qkv(q: Tensor, k: Tensor, v: Tensor, model: ModelConfig) -> Tensor:
    """Rows [heads·d, ...], [groups·d, ...] twice -> [(heads + 2·groups)·d, ...]: each group's queries, key, value."""
    by_group = [rows.unflatten(0, (model.query_groups, -1)) for rows in (q, k, v)]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def pad_vocabulary(rows: Tensor, model: ModelConfig) -> Tensor:
    """[vocab_size, h] -> [padded_vocab_size, h], zeros below."""
    padding = rows.new_zeros(model.padded_vocab_size - rows.shape[0], rows.shape[1])
    return torch.cat((rows, padding))
