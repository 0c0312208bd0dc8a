"""Reading a model's settings from Megatron-LM's `args`, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.open import open_megatron
from megalite.conversion.weights import ConversionError
from tests.conversion.megatron import builder
from tests.conversion.samples import EXPERTS, GPT, LLAMA, MadeUp


def test_unknown_vocabulary_size_is_the_padded_one(tmp_path: Path) -> None:
    weights = MadeUp(tmp_path, LLAMA)
    for index, args in enumerate(({"vocab_size": None}, {"tokenizer_type": "NullTokenizer"}, {"vocab_size": 99})):
        found = open_megatron(builder.save(tmp_path / str(index), weights, tp=2, **args))
        assert found.model.vocab_size == found.model.padded_vocab_size == builder.padded(weights.model, 2)


def test_activation_of_args(tmp_path: Path) -> None:
    """The fused bias and GELU uses the tanh approximation."""
    for index, (args, activation) in enumerate(
        (
            ({}, "gelu"),
            ({"bias_gelu_fusion": True}, "gelu_tanh"),
            ({"bias_gelu_fusion": True, "onnx_safe": True}, "gelu"),
            ({"openai_gelu": True}, "gelu_tanh"),
        )
    ):
        found = open_megatron(builder.save(tmp_path / str(index), MadeUp(tmp_path, GPT), **args))
        assert found.model.activation == activation


@pytest.mark.parametrize(("topk", "score", "softmax_first"), [(1, "sigmoid", False), (2, "softmax", True)])
def test_sinkhorn_routing_has_its_own_scores(tmp_path: Path, topk: int, score: str, softmax_first: bool) -> None:
    """Megatron-LM then reads no other setting of the scores."""
    args = {
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_router_topk": topk,
        "moe_router_topk_scaling_factor": 2.5,
    }
    model = open_megatron(builder.save(tmp_path / "saved", MadeUp(tmp_path, EXPERTS), **args)).model
    assert (model.moe_router_sinkhorn, model.moe_router_topk_scaling_factor) == (True, 1.0)
    assert (model.moe_router_score_function, model.moe_router_pre_softmax) == (score, softmax_first)


@pytest.mark.parametrize(
    "args, message",
    [
        ({"attention_output_gate": True}, "args.attention_output_gate = True"),
        ({"position_embedding_type": "yarn", "mscale": 0.7}, r"args.mscale and mscale_all_dim are \(0.7, 0.0\)"),
        ({"rope_type": "other", "qk_l2_norm": True}, "args.qk_l2_norm = True, args.rope_type"),
        ({"rope_type": "yarn"}, "args.rope_type is yarn without multi_latent_attention"),
        ({"multi_latent_attention": True}, "args.kv_lora_rank is None; a whole number"),
        ({"hidden_size": "32"}, "args.hidden_size is '32'; a whole number"),
        ({"num_layers": 3}, "args.num_layers is 3, but the files have 2 layers"),
        ({"hidden_size": 64, "kv_channels": 8}, r"word_embeddings.weight is \[304, 32\]; .* require \[304, 64\]"),
        ({"padded_vocab_size": 400}, "args.padded_vocab_size is 400, the embedding has 304 rows"),
        ({"tensor_model_parallel_size": 2}, "args.tensor_model_parallel_size is 2, but .* the files of 1"),
        ({"untie_embeddings_and_output_weights": False}, None),
        ({"normalization": "LayerNorm"}, "lacks .*layernorm.bias, which its args require"),
        ({"window_size": (8, 8)}, "args.window_size is"),
        ({"rotary_base": "much"}, "args.rotary_base is 'much'; a number"),
        ({"norm_epsilon": float("nan")}, "args.norm_epsilon is nan; a number"),
        ({"rotary_base": 1e31}, "args.rotary_base is 1e.31; a number is needed, of at most 1e.30"),
        ({"rotary_base": 10**400}, "args.rotary_base has 1329 bits"),
        ({"window_size": (True, False)}, "args.window_size is .True, False.; it must be two whole"),
        ({"add_bias_linear": "False"}, "args.add_bias_linear is 'False'; True or False"),
        ({"seq_length": 2**31}, "args.seq_length is 2147483648; a whole number above 0 and up to 2147483647"),
        ({"hidden_dropout": 3.0}, "megalite cannot train the model of its args: .*dropout"),
        ({"hidden_size": torch.zeros(3)}, "args.hidden_size is a FakeTensor, not a plain value"),
        ({"num_experts": 4, "moe_layer_freq": 0}, "args.moe_layer_freq is 0; a whole number above 0"),
        (
            {"num_experts": 4, "moe_layer_freq": [1, 0, 1]},
            "args.moe_layer_freq is .1, 0, 1.; only every n-th layer after dense",
        ),
    ],
)
def test_unsupported_args_are_refused(tmp_path: Path, args: dict[str, Any], message: str | None) -> None:
    folder = builder.save(tmp_path / "saved", MadeUp(tmp_path, LLAMA), **args)
    if message is None:  # a tied model in one stage may have a copy of its head
        open_megatron(folder)
        return
    with pytest.raises(ConversionError, match=message):
        open_megatron(folder)
