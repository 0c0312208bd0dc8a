"""Each family's logits are those of Hugging Face's transformers for the same random weights, in float64.

transformers computes norms, rotary tables, softmaxes and routing in float32 whatever the model's type. To compare
beyond that it is run with float32 made float64 (`all_float64`), and a dispatch mode proves that nothing was left."""

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.flags import parse_arguments
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.families import FAMILIES as CONVERTED
from megalite.models.gpt import GPTStage
from tests.models.stages import B, S, build, named, varied
from tests.support.tiny import rows_of

VOCAB = 37
SMALL: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB}
SMALL |= {"make_vocab_size_divisible_by": 8, "max_position_embeddings": 12}
THEIR_SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 12,
    "intermediate_size": 20,
    "attn_implementation": "eager",
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A small preset, and the configuration of the same model in transformers."""

    preset: str
    changes: dict[str, Any]  # to the preset, besides SMALL
    kind: str  # transformers' model: `Llama` for LlamaForCausalLM
    theirs: dict[str, Any]

    @property
    def names(self) -> str:
        """The megalite family with these names of tensors."""
        small = self.kind.lower()
        return {"gptoss": "gpt_oss", "gemma": "llama", "gemma3": "gemma3_text"}.get(small, small)

    @property
    def model(self) -> ModelConfig:
        config = parse_arguments(["--preset", self.preset]).config
        return varied(config.model, **{**SMALL, **self.changes})


def rope(base: float, kind: str = "default", **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": base, "rope_type": kind, **more}}


def by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """RoPE of layers with full attention, and of those with a window."""
    kinds = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {kind: each["rope_parameters"] for kind, each in kinds.items()}}


GPT2: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 16, "n_positions": 12, "vocab_size": VOCAB}
GPT2 |= {"attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None}
GROUPED = {"num_query_groups": 2, "ffn_hidden_size": 20}
# With heads of 16, a base of 50 and 30 original positions: one frequency is kept, three are mixed, four slowed in full.
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROWS = rows_of(
    """
gpt2: preset=gpt2-124m
gpt2 there: kind=GPT2 GPT2 activation_function=gelu_new
gpt3: preset=gpt3-1.3b activation=gelu
gpt3 there: kind=GPT2 GPT2 activation_function=gelu
llama2: preset=llama2-7b num_query_groups=4 ffn_hidden_size=20
llama2 there: kind=Llama num_key_value_heads=4 rms_norm_eps=1e-5 ROPE_1E4
llama3: preset=llama3-8b GROUPED
llama3 there: kind=Llama PAIRS rms_norm_eps=1e-5 ROPE_5E5
llama3.1: preset=llama3.1-8b GROUPED kv_channels=16 rotary_base=50.0 rope_original_max_positions=30
llama3.1 there: kind=Llama PAIRS rms_norm_eps=1e-5 head_dim=16 max_position_embeddings=40 LLAMA31
llama-dynamic: preset=llama3-8b GROUPED kv_channels=16 rotary_base=50.0 rope_scaling=dynamic rope_scaling_factor=4.0
  rope_original_max_positions=5
llama-dynamic there: kind=Llama PAIRS rms_norm_eps=1e-5 head_dim=16 max_position_embeddings=5 DYNAMIC
qwen3-yarn: preset=qwen3-8b GROUPED kv_channels=16 rotary_base=50.0 rope_scaling=yarn rope_scaling_factor=4.0
  rope_original_max_positions=60 rope_beta_fast=3.0
qwen3-yarn there: kind=Qwen3 PAIRS rms_norm_eps=1e-6 head_dim=16 max_position_embeddings=240 YARN
mistral: preset=mistral-7b GROUPED sliding_window=4
mistral there: kind=Mistral PAIRS rms_norm_eps=1e-5 sliding_window=4 ROPE_1E4
qwen2: preset=qwen2-7b GROUPED
qwen2 there: kind=Qwen2 PAIRS rms_norm_eps=1e-6 ROPE_1E6
qwen3: preset=qwen3-8b GROUPED kv_channels=6
qwen3 there: kind=Qwen3 PAIRS head_dim=6 rms_norm_eps=1e-6 ROPE_1E6
mixtral: preset=mixtral-8x7b GROUPED num_experts=5
mixtral there: kind=Mixtral PAIRS num_local_experts=5 num_experts_per_tok=2 rms_norm_eps=1e-5
  experts_implementation=eager ROPE_1E6
gpt-oss: preset=gpt-oss-20b GROUPED kv_channels=8 num_experts=6 moe_router_topk=3 activation_func_clamp_value=0.5
  sliding_window=4 rotary_base=50.0 rope_original_max_positions=6 rope_scaling_factor=4.0
gpt-oss there: kind=GptOss PAIRS head_dim=8 num_local_experts=6 num_experts_per_tok=3 sliding_window=4 swiglu_limit=0.5
  experts_implementation=eager OSS_YARN
gemma: preset=gemma-7b GROUPED kv_channels=6
gemma there: kind=Gemma PAIRS head_dim=6 rms_norm_eps=1e-6 ROPE_1E4
gemma2: preset=gemma2-9b GROUPED kv_channels=6 SCALE sliding_window=4 attn_logit_softcapping=2.0
  final_logit_softcapping=3.0
gemma2 there: kind=Gemma2 PAIRS head_dim=6 query_pre_attn_scalar=10 sliding_window=4 ROPE_1E4
  attn_logit_softcapping=2.0 final_logit_softcapping=3.0
gemma3: preset=gemma3-27b GROUPED kv_channels=6 SCALE sliding_window=4 window_attn_skip_freq=[3] rotary_base=50.0
  rotary_base_local=20.0
gemma3 there: kind=Gemma3 PAIRS head_dim=6 query_pre_attn_scalar=10 sliding_window=4
  layer_types=["sliding_attention","sliding_attention","full_attention"] GEMMA3
olmo2: preset=olmo2-7b GROUPED
olmo2 there: kind=Olmo2 PAIRS rms_norm_eps=1e-6 ROPE_5E5
qwen2-mixed: preset=qwen2-7b GROUPED sliding_window=4 window_attn_skip_freq=[0,1,1]
qwen2-mixed there: kind=Qwen2 PAIRS rms_norm_eps=1e-6 ROPE_1E6 use_sliding_window sliding_window=4 max_window_layers=1
smollm3: preset=llama3-8b GROUPED no_rope_freq=[2] tie_embeddings
smollm3 there: kind=SmolLM3 PAIRS rms_norm_eps=1e-5 no_rope_layer_interval=2 ROPE_5E5
granite: preset=granite-3.1-8b GROUPED rotary_base=1e4 softmax_scale=0.3 logits_scaling=3.0
granite there: kind=Granite PAIRS rms_norm_eps=1e-5 attention_multiplier=0.3 embedding_multiplier=12.0
  residual_multiplier=0.22 logits_scaling=3.0 tie_word_embeddings ROPE_1E4
""",
    {
        "GPT2": GPT2,
        "GROUPED": GROUPED,
        "PAIRS": {"num_key_value_heads": 2},
        "SCALE": {"softmax_scale": 10**-0.5},
        **{f"ROPE_{base}": rope(float(base)) for base in ("1E4", "5E5", "1E6")},
        "LLAMA31": rope(50.0, "llama3", original_max_position_embeddings=30, **LLAMA31),
        "DYNAMIC": rope(50.0, "dynamic", factor=4.0),
        "YARN": rope(50.0, "yarn", original_max_position_embeddings=60, factor=4.0, beta_fast=3.0),
        "OSS_YARN": rope(50.0, "yarn", factor=4.0, original_max_position_embeddings=6, truncate=False),
        "GEMMA3": by_kind(rope(50.0, "linear", factor=8.0), rope(20.0)),
    },
)
"""Settings of a preset, and of the same model in transformers."""


def _family(name: str) -> Family:
    ours, theirs = dict(ROWS[name]), dict(ROWS[f"{name} there"])
    return Family(ours.pop("preset"), ours, theirs.pop("kind"), theirs)


FAMILIES = {name: _family(name) for name in ROWS if not name.endswith(" there")}


FLOAT64 = torch.float64


class OnlyFloat64(TorchDispatchMode):
    """Fails at the first operation that creates a floating-point tensor of another type."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                assert tensor.dtype == FLOAT64, f"{func} made a {tensor.dtype}"
        return out


@contextlib.contextmanager
def all_float64() -> Iterator[None]:
    """Replace every run-time use of float32 in transformers by float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch, OnlyFloat64():
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(Tensor, "float", Tensor.double)
            yield
    finally:
        torch.set_default_dtype(before)


def their_model(family: Family) -> Any:
    """Build the transformers model with random weights."""
    # From where it lives: an import from the top of the package reads every model that there is.
    small = re.sub(
        "(?<=[a-z0-9])(?<!granite)(?<!ol)(moe|lite|oss|open|m2|v[23]|v32|next)$",
        r"_\1",
        family.kind.lower().replace("moelite", "_moelite").replace("moedsa", "_moe_dsa").replace("nh", "n_h"),
    )
    folder = f"transformers.models.{small}"
    config_class = getattr(
        importlib.import_module(f"{folder}.configuration_{small}"),
        f"{family.kind}{'Text' * (family.kind in ('Gemma3', 'Qwen3_5', 'Qwen3_5Moe'))}Config",
    )
    name = "GPT2LMHeadModel" if family.kind == "GPT2" else f"{family.kind}ForCausalLM"
    model_class = getattr(importlib.import_module(f"{folder}.modeling_{small}"), name)
    settings = family.theirs if family.kind == "GPT2" else {**THEIR_SMALL, **family.theirs}
    with all_float64():
        found = model_class(config_class(**settings)).eval()
    return with_weights(found)


def with_weights(found: Any) -> Any:
    """Draw the weights of a transformers model, large enough that every part affects the logits."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.add_(0.2 * noise) if parameter.dim() == 1 else parameter.copy_(0.3 * noise)
        for name, buffer in found.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, dtype=torch.float64, generator=generator))
    return found


@torch.no_grad()
def load(stage: GPTStage, family: Family, theirs: dict[str, Tensor], model: ModelConfig) -> None:
    """Load every parameter from their tensors, by the names of conversion."""
    parameters, filled = named(stage), set()
    for parameter in parameters.values():
        parameter.zero_()  # rows that pad the vocabulary
    for piece in CONVERTED[family.names].pieces(model, theirs.keys()):
        values = theirs[piece.name].flatten()
        for first, place in piece.places(parameters[piece.parameter]):
            place.copy_(values[first : first + place.numel()].view(place.shape))
        filled.add(piece.parameter)
    assert filled == parameters.keys()


TOKENS = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(2))


@functools.cache
def their_numbers(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weights of their model, and its logits [b, s, vocab_size]."""
    them = their_model(FAMILIES[name])
    weights = them.state_dict()
    with torch.no_grad(), all_float64():
        return weights, them(TOKENS, use_cache=False).logits


def both_logits(name: str, model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return our logits and theirs [b, s, vocab_size]."""
    (weights, theirs), us = their_numbers(name), build(model)
    load(us, FAMILIES[name], weights, model)
    us.eval()
    with torch.no_grad():
        ours = us(TOKENS, us.context())
    return ours.transpose(0, 1)[..., :VOCAB], theirs


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float64
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str) -> None:
    assert error(*both_logits(name, FAMILIES[name].model)) < 1e-9


def test_float64_check_detects_float32() -> None:
    family = FAMILIES["llama2"]
    them, tokens = their_model(family), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"made a torch\.float32"), OnlyFloat64():
        them(tokens, use_cache=False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"activation": "gelu"}),
        ("gpt3", {"norm_epsilon": 1e-3}),
        ("llama3", {"rotary_base": 1e4}),
        ("llama3.1", {"rope_scaling": "none"}),
        ("llama3.1", {"rope_scaling": "linear"}),
        ("llama3.1", {"rope_high_freq_factor": 5.0}),
        ("llama-dynamic", {"rope_scaling": "none"}),
        ("llama-dynamic", {"rope_original_max_positions": 6}),
        ("qwen3-yarn", {"rope_attention_factor": 1.0}),
        ("qwen3-yarn", {"rope_beta_fast": 32.0}),
        ("qwen3-yarn", {"rope_truncate": False}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 5}),
        ("mixtral", {"moe_router_topk": 1}),
        ("mixtral", {"moe_router_pre_softmax": True}),
        ("gpt-oss", {"activation": "swiglu"}),
        ("gpt-oss", {"activation_func_clamp_value": 7.0}),
        ("gpt-oss", {"glu_linear_offset": 0.0}),
        ("gpt-oss", {"window_attn_skip_freq": None}),
        ("gpt-oss", {"rope_truncate": True}),
        ("gemma", {"scale_embeddings": False}),
        ("gemma", {"norm_zero_centered": False}),
        ("gemma", {"activation": "geglu"}),
        ("gemma2", {"window_attn_skip_freq": None}),
        ("gemma2", {"window_attn_skip_freq": [0, 1, 0]}),
        ("gemma2", {"softmax_scale": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": 4.0}),
        ("gemma3", {"rotary_base_local": None}),
        ("gemma3", {"rotary_base_local": 50.0}),
        ("gemma3", {"rope_scaling": "none"}),
        ("qwen2-mixed", {"window_attn_skip_freq": [2]}),
        ("smollm3", {"no_rope_freq": None}),
        ("smollm3", {"no_rope_freq": [1, 0, 1]}),
        ("granite", {"embedding_multiplier": 11.0}),
        ("granite", {"residual_multiplier": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("granite", {"softmax_scale": None}),
    ],
)
def test_each_setting_affects_the_logits(name: str, changes: dict[str, Any]) -> None:
    """With one wrong setting the logits differ by far more than the tolerance."""
    assert error(*both_logits(name, varied(FAMILIES[name].model, **changes))) > 1e-6
