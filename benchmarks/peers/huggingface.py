"""Hugging Face's GPT-2 as a contender of peers.run: one rank, torch's fused attention."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.peers.case import Case, adamw, plain_weights
from benchmarks.peers.plain_gpt import Size
from benchmarks.peers.pytorch import Loop

LAYER = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj"}
LAYER |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}  # module of a block in plain_gpt -> in GPT-2
ENDS = {"word": "wte", "position": "wpe", "norm": "ln_f"}


def weights_of(case: Case) -> dict[str, torch.Tensor]:
    """The common weights by Hugging Face's names: projections transposed; queries, keys and values concatenated."""
    size, found = case.size, {}
    for name, value in plain_weights(case).items():
        module, _, part = name.rpartition(".")
        if not module.startswith("blocks."):
            found[f"transformer.{ENDS[module]}.{part}"] = value
            continue
        _, layer, kind = module.split(".")
        if kind == "qkv":
            value = value.view(size.heads, 3, size.head, -1).transpose(0, 1).reshape(value.shape)
        found[f"transformer.h.{layer}.{LAYER[kind]}.{part}"] = value.t().contiguous() if value.dim() == 2 else value
    return {**found, "lm_head.weight": found["transformer.wte.weight"]}


def settings_of(size: Size, *, activation: str) -> GPT2Config:
    """GPT-2 settings of a model: no dropout, no cache, torch's fused attention."""
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    values = (size.vocab, size.seq, size.hidden, size.layers, size.heads)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    rest = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa"}
    return GPT2Config(activation_function=activation, **dict(zip(names, values)), **dropout, **rest)


def build(case: Case, context: Any) -> Loop:
    model = GPT2LMHeadModel(settings_of(case.size, activation="gelu"))
    model.load_state_dict(weights_of(case))
    model.train()
    parameters = list(model.parameters())

    def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            logits = model(input_ids=tokens).logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Loop(case, parameters, adamw(parameters), forward)
