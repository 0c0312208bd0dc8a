"""Hugging Face's GPT-2 as a contender of step_vs_peers.py: one rank, torch's fused attention."""

from typing import Any

import torch
import torch.nn.functional as F
from peer_case import Case, adamw, plain_weights
from peer_torch import Loop
from transformers import GPT2Config, GPT2LMHeadModel

NAMES = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
"""plain_gpt's modules of a block, and theirs."""


def weights_of(case: Case) -> dict[str, torch.Tensor]:
    """The common weights by their names: projections transposed, queries, keys and values one after the other."""
    size = case.size
    found = {}
    for name, value in plain_weights(case).items():
        module, _, part = name.rpartition(".")
        if module.startswith("blocks."):
            _, layer, kind = module.split(".")
            if kind == "qkv":
                value = value.view(size.heads, 3, size.head, -1).transpose(0, 1).reshape(value.shape)
            if value.dim() == 2:
                value = value.t().contiguous()
            found[f"transformer.h.{layer}.{NAMES[kind]}.{part}"] = value
        else:
            theirs = {"word": "wte", "position": "wpe", "norm": "ln_f"}[module]
            found[f"transformer.{theirs}.{part}"] = value
    return {**found, "lm_head.weight": found["transformer.wte.weight"]}


def build(case: Case, context: Any) -> Loop:
    """See `Build`."""
    size = case.size
    config = GPT2Config(
        vocab_size=size.vocab,
        n_positions=size.seq,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "sdpa"
    model = GPT2LMHeadModel(config)
    model.load_state_dict(weights_of(case))
    model.train()
    parameters = list(model.parameters())

    def forward(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            logits = model(input_ids=tokens).logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Loop(case, parameters, adamw(parameters), forward)
