"""What the network is: shapes, norms, activations, positions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalite.config.option import option
from megalite.config.registry import Registry

TRAINING_FIELDS = frozenset(
    {
        *("hidden_dropout", "attention_dropout", "init_method_std"),
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy"),
        "moe_pad_expert_input_to_capacity",
        *("moe_router_bias_update_rate", "mtp_num_layers", "mtp_loss_scaling_factor"),
    }
)
"""Settings of the model that say how it is trained, not what it computes once it is: they may differ between a
checkpoint and the run that loads it, and other formats need not express them."""


LAYER_LISTS = ("window_attn_skip_freq", "no_rope_freq")
"""Settings that are one number n, for every n-th layer, or a 0 or 1 for each layer."""

GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
"""Values of activation with a gate."""

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Of multi_latent_attention."""


def free_settings(position_embedding_type: str, *, extends: bool) -> frozenset[str]:
    """Settings of the model in which a run and the weights that it loads may differ. `extends`: the run may stretch the
    context, as with --finetune."""
    free = set(TRAINING_FIELDS) - (set() if extends else {"mtp_num_layers"})
    if position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")  # a limit, not a shape
    if extends:
        free |= {"rotary_base", "rotary_base_local", "sliding_window", "window_attn_skip_freq"}
        free |= {name for name in ModelConfig.__dataclass_fields__ if name.startswith("rope_")}
    return frozenset(free)


def _every(frequency: list[int], index: int, *, listed: int) -> bool:
    """A layer is one of every n-th, of one number n; or stands as `listed` in a list of all layers."""
    return (index + 1) % max(frequency[0], 1) == 0 if len(frequency) == 1 else frequency[index] == listed


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """Of one kind of layer."""

    shapes: "Callable[[ModelConfig, int], list[Any]] | None" = None
    """Of a model and a layer's number: its parameters, as `models.shapes.ParameterShape`; None: those of gpt. Memory and
    FLOPs follow, and a run makes sure that they are all. Activations count as those of gpt."""


BLOCKS: Registry[Any] = Registry("block", {"gpt": "megalite.models.block:Block"}, BlockFacts)
"""Layers with the signature of `models.block.Block`. Your own: `@BLOCKS.register("mine")` above a subclass."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One GPT. GPT-2/3 by default; Llama by `normalization`, `activation`, `position_embedding_type` and so on."""

    num_layers: int = option(2, at_least=1, below=10_000, basic=True)
    """Transformer blocks."""
    block: str = option("gpt", choices=BLOCKS)
    """Kind of the transformer blocks: gpt, or one that an import has registered."""
    hidden_size: int = option(128, at_least=1, below=2**24, basic=True)
    """Width h of the residual stream."""
    num_attention_heads: int = option(4, at_least=1, below=2**24, basic=True)
    """Attention (query) heads."""
    num_query_groups: int | None = option(None, flags=("--num-key-value-heads",), at_least=1, below=2**24)
    """Key/value heads of grouped-query attention; default: num_attention_heads."""
    kv_channels: int | None = option(None, at_least=1, below=2**24)
    """Size of one head; default hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = option(None, at_least=1, below=2**24)
    """Width of the MLP; default 4·h, or 8·h/3 rounded down to a multiple of 64 with a gate."""
    vocab_size: int | None = option(None, at_least=1, below=2**31)
    """Token ids are below this; default: the tokenizer's size."""
    make_vocab_size_divisible_by: int = option(128, at_least=1, below=2**24)
    """Embedding rows are padded to a multiple of this."""
    max_position_embeddings: int | None = option(None, at_least=1, below=2**31)
    """Rows of the learned position embedding, and the longest sequence; default seq_length."""
    position_embedding_type: str = option("learned_absolute", choices=("learned_absolute", "rope", "none"))
    """How positions enter."""
    rotary_base: float = option(10000.0, above=0)
    """RoPE's theta."""
    rotary_percent: float = option(1.0, above=0, at_most=1)
    """Share of each head that RoPE turns, from its first channel on."""
    rotary_interleaved: bool = option(False)
    """RoPE turns neighbouring channels against each other (GPT-J), not the two halves of a head (Llama)."""
    rope_scaling: str = option("none", choices=("none", "linear", "llama3", "yarn", "dynamic"))
    """How RoPE is stretched: all frequencies (linear), the slow ones (llama3, yarn), or by a larger base (dynamic)."""
    rope_scaling_factor: float = option(8.0, above=1)
    """How far rope_scaling stretches positions."""
    rope_low_freq_factor: float = option(1.0, above=0)
    """llama3: wavelengths above original positions / this are stretched in full."""
    rope_high_freq_factor: float = option(4.0, above=0)
    """llama3: wavelengths below original positions / this stay."""
    rope_original_max_positions: int = option(
        8192, at_least=1, below=2**31, flags=("--yarn-original-max-position-embeddings",)
    )
    """llama3, yarn, dynamic: sequence length of the model's first training."""
    rope_beta_fast: float = option(32.0, above=0, flags=("--yarn-beta-fast",))
    """yarn: channels with more turns than this within the original positions stay."""
    rope_beta_slow: float = option(1.0, above=0, flags=("--yarn-beta-slow",))
    """yarn: channels with fewer turns than this are stretched in full."""
    rope_truncate: bool = option(True, flags=("--yarn-correction-range-round-to-int",))
    """yarn: the channels between which it mixes are rounded to whole pairs."""
    rope_mscale: float | None = option(None, above=0, flags=("--mscale",))
    """yarn: queries and keys grow by the ratio of 0.1·this·ln(factor) + 1 and the same of rope_mscale_all_dim."""
    rope_mscale_all_dim: float | None = option(None, above=0, flags=("--mscale-all-dim",))
    """yarn: see rope_mscale; without both the growth is 0.1·ln(factor) + 1. In multi_latent_attention scores grow by
    the square too."""
    rope_attention_factor: float | None = option(None, above=0)
    """yarn: the growth of queries and keys, given directly."""
    sliding_window: int | None = option(None, at_least=2)
    """Keys that a query sees, its own included; default: all before it."""
    window_attn_skip_freq: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers without sliding_window: every n-th, or for each layer 1 with the window, 0 without."""
    rotary_base_local: float | None = option(None, above=0)
    """RoPE's theta, without rope_scaling, in layers with the window; default: rotary_base."""
    no_rope_freq: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers without RoPE: every n-th, or for each layer 1 without, 0 with."""
    softmax_scale: float | None = option(None, above=0)
    """Factor on products of queries and keys; default: 1 / sqrt(head size)."""
    attn_logit_softcapping: float | None = option(None, above=0)
    """Attention scores s become c·tanh(s/c) for this c. Takes attention in pieces."""
    softmax_type: str = option("vanilla", choices=("vanilla", "off-by-one", "learnable"))
    """A sink in attention's softmax: 0 (off-by-one), learned for each head (learnable), or none (vanilla). Sinks take
    attention in pieces."""
    final_logit_softcapping: float | None = option(None, above=0)
    """Logits z become c·tanh(z/c) for this c."""
    multi_latent_attention: bool = option(False)
    """Queries, keys and values come out of narrow latents; heads share the keys' part with rope (DeepSeek-V2). qk_norm
    norms the latents."""
    q_lora_rank: int | None = option(None, at_least=1, below=2**24)
    """Channels of the queries' latent; default: none."""
    kv_lora_rank: int = option(32, at_least=1, below=2**24)
    """Channels of the latent of keys and values."""
    qk_head_dim: int = option(128, flags=("--qk-nope-head-dim",), at_least=1, below=2**24)
    """Channels without rope of each head's query and key."""
    qk_pos_emb_head_dim: int = option(64, flags=("--qk-rope-head-dim",), at_least=2, below=2**24)
    """Channels with rope of each head's query, and of the key that all heads share."""
    v_head_dim: int = option(128, at_least=1, below=2**24)
    """Channels of each head's value; at most qk_head_dim + qk_pos_emb_head_dim."""
    pre_norms: bool = option(True)
    """Norm before attention and before the MLP."""
    post_norms: bool = option(False)
    """Norm on the output of attention and of the MLP, before the residual sum."""
    normalization: str = option("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Kind of all norms."""
    norm_zero_centered: bool = option(False, flags=("--apply-layernorm-1p",))
    """Norms multiply by 1 + weight; weights start at 0."""
    qk_norm: bool = option(False, flags=("--qk-layernorm",))
    """Norm over each head of queries and keys before RoPE."""
    qk_norm_all_heads: bool = option(False)
    """qk_norm is over all heads together."""
    norm_epsilon: float = option(1e-5, above=0, flags=("--layernorm-epsilon",))
    """Added to the variance inside the norm."""
    activation: str = option("gelu", choices=("gelu", "gelu_tanh", "squared_relu", *GATED))
    """MLP nonlinearity; swiglu and geglu have a gate. quick_geglu: gate·sigmoid(1.702·gate)·up."""
    activation_func_clamp_value: float | None = option(None, above=0)
    """With a gate: largest gate, and largest magnitude of the up projection."""
    glu_linear_offset: float = option(0.0, at_least=0, below=1000)
    """With a gate: added to the up projection."""
    add_bias_linear: bool = option(True)
    """Biases in the linear layers of attention and MLP; experts: moe_add_bias_linear."""
    add_qkv_bias: bool = option(False, flags=("--add-qkv-bias-linear",))
    """Bias of queries, keys and values where add_bias_linear is off."""
    scale_embeddings: bool = option(False)
    """Multiply word embeddings by sqrt(hidden_size)."""
    tie_embeddings: bool = option(True)
    """The output head uses the word embedding's weight."""
    hidden_dropout: float = option(0.0, at_least=0, below=1)
    """Dropout on the embedding and on each residual branch."""
    attention_dropout: float = option(0.0, at_least=0, below=1)
    """Dropout on attention probabilities, by unfused attention."""
    use_mup: bool = option(False)
    """Maximal update parametrization (arXiv 2203.03466): the learning rate found at mup_base_hidden_size fits."""
    mup_base_hidden_size: int | None = option(None, at_least=1, below=2**20)
    """use_mup: the width that the learning rate was found with; default: hidden_size."""
    mup_base_head_dim: int | None = option(None, at_least=1, below=2**20)
    """use_mup: the head size at which scores are as without it; default: 1."""
    init_method_std: float = option(0.02, above=0, below=100)
    """Standard deviation of initial weights; of residual output projections divided by sqrt(2·num_layers)."""
    num_experts: int | None = option(None, at_least=2, below=2**20)
    """Experts of each MoE layer; default: a dense MLP."""
    moe_router_topk: int = option(2, at_least=1, below=2**24)
    """Experts each token is sent to."""
    moe_ffn_hidden_size: int | None = option(None, at_least=1, below=2**24)
    """Width of one expert; default ffn_hidden_size."""
    moe_add_bias_linear: bool = option(False)
    """Biases in the router and in both layers of each expert."""
    moe_shared_expert_intermediate_size: int | None = option(None, at_least=1, below=2**24)
    """Width of the shared expert, for every token; default: none."""
    moe_shared_expert_gate: bool = option(False)
    """The shared expert's output is multiplied by a sigmoid of one more projection per token."""
    moe_layer_freq: int = option(1, at_least=1, below=10_000)
    """Every n-th layer has experts, from the first on; others have a dense MLP."""
    moe_first_dense_layers: int = option(0, at_least=0, below=10_000)
    """First layers, with a dense MLP in any case."""
    moe_router_pre_softmax: bool = option(False)
    """Softmax over all experts before the top-k choice; default: over the chosen."""
    moe_router_score_function: str = option("softmax", choices=("softmax", "sigmoid"))
    """What makes scores of the router's logits; those of a sigmoid are divided by the sum of the chosen."""
    moe_router_enable_expert_bias: bool = option(False)
    """Balance experts by a bias in the choice alone, which grows after steps with too few tokens (arXiv 2408.15664)."""
    moe_router_bias_update_rate: float = option(1e-3, at_least=0, below=1)
    """What such a bias grows or shrinks by in a step."""
    moe_router_num_groups: int | None = option(None, at_least=1, below=2**20)
    """Groups of neighbouring experts; a token goes to moe_router_group_topk of them; default: no groups."""
    moe_router_group_topk: int | None = option(None, at_least=1, below=2**20)
    """Groups a token goes to: those with the largest sums of their best topk / group_topk scores."""
    moe_router_topk_scaling_factor: float = option(1.0, above=0)
    """Factor on the router's weights."""
    mtp_num_layers: int = option(0, at_least=0, below=100)
    """Further layers, each predicting one token further ahead in training (DeepSeek-V3)."""
    mtp_loss_scaling_factor: float = option(0.1, at_least=0)
    """Weight of the mean of their losses."""
    moe_aux_loss_coeff: float = option(0.0, at_least=0)
    """Weight of the load-balancing loss of each MoE layer, taken over each sequence."""
    moe_z_loss_coeff: float = option(0.0, at_least=0)
    """Weight of the mean square of the router's log-sum-exp."""
    moe_expert_capacity_factor: float | None = option(None, above=0)
    """An expert takes at most this times the even share of each sequence's tokens; default: no limit."""
    moe_token_drop_policy: str = option("probs", choices=("probs", "position"))
    """Which tokens an expert over capacity leaves out: the least probable or the last."""
    moe_pad_expert_input_to_capacity: bool = option(False)
    """Fill experts up to their capacity with zeros: the host never waits for how many tokens they get."""

    @property
    def head_size(self) -> int:
        """Size of one attention head's query and key; and of its value but for `value_size`."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def expert_capacity(self, seq_length: int) -> int:
        """Tokens of a sequence that an expert takes at most."""
        if self.num_experts is None or self.moe_expert_capacity_factor is None:
            return seq_length
        return math.ceil(self.moe_expert_capacity_factor * seq_length * self.moe_router_topk / self.num_experts)

    @property
    def value_size(self) -> int:
        """Size of one attention head's value."""
        return self.v_head_dim if self.multi_latent_attention else self.head_size

    @property
    def rotary_size(self) -> int:
        """Channels of a head that RoPE turns."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else int(self.head_size * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        if self.multi_latent_attention or self.num_query_groups is None:
            return self.num_attention_heads
        return self.num_query_groups

    def has_window(self, index: int) -> bool:
        """Layer `index` of the whole model sees sliding_window keys alone; layers behind the last are as the last."""
        index = min(index, self.num_layers - 1)
        if self.sliding_window is None or self.window_attn_skip_freq is None:
            return self.sliding_window is not None
        return not _every(self.window_attn_skip_freq, index, listed=0)

    def has_rope(self, index: int) -> bool:
        """RoPE turns queries and keys of layer `index` of the whole model; layers behind the last are as the last."""
        index = min(index, self.num_layers - 1)
        if self.position_embedding_type != "rope" or self.no_rope_freq is None:
            return self.position_embedding_type == "rope"
        return not _every(self.no_rope_freq, index, listed=1)

    @property
    def embedding_scale(self) -> float:
        """What word embeddings are multiplied with."""
        return math.sqrt(self.hidden_size) if self.scale_embeddings else 1.0

    @property
    def width_multiplier(self) -> float:
        """m of `use_mup`: how many times as wide as the base the model is."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the first values of hidden matrices, before what the depth takes of it."""
        return self.init_method_std / math.sqrt(self.width_multiplier)

    @property
    def score_scale(self) -> float | None:
        """Factor on the products of queries and keys, where it is not 1 / sqrt(head size)."""
        if self.use_mup:
            return math.sqrt(self.mup_base_head_dim or 1) / self.head_size
        return self.softmax_scale

    @property
    def mtp_layers(self) -> range:
        """Numbers of the layers behind the last, on the last stage, that predict further tokens."""
        return range(self.num_layers, self.num_layers + self.mtp_num_layers)

    @property
    def is_gated(self) -> bool:
        """The MLP has a gate beside its up projection."""
        return self.activation in GATED

    @property
    def ffn_size(self) -> int:
        """Width of the dense MLP."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // 3 // 64 * 64 if self.is_gated else 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width of one expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    def is_moe_layer(self, index: int) -> bool:
        """Layer `index` of the whole model has experts instead of a dense MLP; layers behind the last are as the last."""
        index = min(index, self.num_layers - 1)
        if self.num_experts is None or index < self.moe_first_dense_layers:
            return False
        return (index - self.moe_first_dense_layers) % self.moe_layer_freq == 0

    @property
    def score_table(self) -> bool:
        """The router needs the scores of all experts, not of the chosen alone."""
        return self.moe_router_score_function == "sigmoid" or self.moe_router_pre_softmax or self.moe_aux_loss_coeff > 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: vocab_size rounded up; needs vocab_size to be known."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set and no tokenizer has resolved it")
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple
