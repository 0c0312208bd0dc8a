"""Settings of the model: shapes, norms, activations, position embeddings, experts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megalite.config.registry import Registry, option

TRAINING_FIELDS = frozenset(
    {
        *("hidden_dropout", "attention_dropout", "init_method_std", "apply_wd_to_qk_layernorm"),
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy"),
        *("moe_pad_expert_input_to_capacity", "moe_router_sinkhorn"),
        "moe_router_force_load_balancing",
        *("moe_router_bias_update_rate", "mtp_num_layers", "mtp_loss_scaling_factor"),
        *("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
    }
)
"""Settings of the model that affect training but not the trained network. A checkpoint and the run that loads it may
differ in them, and other checkpoint formats need not store them."""


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Settings of constant factors, with default 1."""

LAYER_LISTS = ("window_attn_skip_freq", "no_rope_freq", "linear_attention_freq", "no_mlp_freq")
"""Settings that take one number n (every n-th layer) or a 0 or 1 for each layer."""

GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
"""Values of `activation` that have a gate."""

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Sizes that only `multi_latent_attention` uses."""

LINEAR_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Sizes of the layers of `linear_attention_freq`."""

INDEX_ROWS = 128
"""Number of queries of sparse attention that have their scores in memory at once."""

LINEAR_CHUNK = 64
"""Tokens of linear attention between two updates of its state; matrix products compute those of a chunk together."""


def free_settings(position_embedding_type: str, *, extends: bool) -> frozenset[str]:
    """Return the model settings in which a run may differ from the weights it loads. `extends`: it may extend the
    context, as with --finetune."""
    free = set(TRAINING_FIELDS) - (set() if extends else {"mtp_num_layers"})
    if position_embedding_type != "learned_absolute":
        free.add("max_position_embeddings")  # a limit, not a shape
    if extends:
        free |= {"rotary_base", "rotary_base_local", "sliding_window", "window_attn_skip_freq"}
        free |= {name for name in ModelConfig.__dataclass_fields__ if name.startswith("rope_")}
    return frozenset(free)


def _every(frequency: list[int], index: int, *, listed: int) -> bool:
    """Return whether layer `index` is an n-th layer (one number n), or has the value `listed` (a list of all
    layers)."""
    return (index + 1) % max(frequency[0], 1) == 0 if len(frequency) == 1 else frequency[index : index + 1] == [listed]


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """Facts about one kind of transformer block."""

    shapes: "Callable[[ModelConfig, int], list[Any]] | None" = None
    """(model, layer index) -> the layer's parameters as `models.shapes.ParameterShape`; None: those of gpt. Memory and
    FLOPs follow from them, and a run compares them with the module. Activations are counted as those of gpt."""


BLOCKS: Registry[Any] = Registry("block", {"gpt": "megalite.models.block:Block"}, BlockFacts)
"""Blocks with the signature of `models.block.Block`. Register a subclass with `@BLOCKS.register("mine")`."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One GPT: GPT-2/3 by default; Llama with `normalization`, `activation`, `position_embedding_type` and others."""

    num_layers: int = option(2, at_least=1, below=10_000, basic=True)
    """Transformer blocks."""
    block: str = option("gpt", choices=BLOCKS)
    """Kind of transformer block: gpt, or one registered by --import."""
    hidden_size: int = option(128, at_least=1, below=2**24, basic=True)
    """Width h of the residual stream."""
    num_attention_heads: int = option(4, at_least=1, below=2**24, basic=True)
    """Attention (query) heads."""
    num_query_groups: int | None = option(None, flags=("--num-key-value-heads",), at_least=1, below=2**24)
    """Key/value heads of grouped-query attention; default: num_attention_heads."""
    kv_channels: int | None = option(None, at_least=1, below=2**24)
    """Size of one head; default: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = option(None, at_least=1, below=2**24)
    """Width of the MLP; default: 4·h, with a gate 8·h/3 rounded down to a multiple of 64."""
    vocab_size: int | None = option(None, at_least=1, below=2**31)
    """Vocabulary size: token ids are below it; default: the tokenizer's size."""
    make_vocab_size_divisible_by: int = option(128, at_least=1, below=2**24)
    """Pad the embedding rows to a multiple of this."""
    max_position_embeddings: int | None = option(None, at_least=1, below=2**31)
    """Rows of the learned position embedding, and the longest sequence; default: seq_length."""
    position_embedding_type: str = option("learned_absolute", choices=("learned_absolute", "rope", "none"))
    """Kind of position embedding."""
    rotary_base: float = option(10000.0, above=0)
    """RoPE's theta."""
    rotary_percent: float = option(1.0, above=0, at_most=1)
    """Fraction of each head's channels that RoPE rotates, starting at the first channel."""
    rotary_interleaved: bool = option(False)
    """RoPE rotates pairs of neighbouring channels (GPT-J) instead of the two halves of a head (Llama)."""
    rope_scaling: str = option("none", choices=("none", "linear", "llama3", "yarn", "dynamic"))
    """RoPE for longer sequences: scale all frequencies (linear), the low ones (llama3, yarn), or raise the base
    (dynamic)."""
    rope_scaling_factor: float = option(8.0, above=1)
    """Factor by which rope_scaling extends the context."""
    rope_low_freq_factor: float = option(1.0, above=0)
    """llama3: wavelengths above rope_original_max_positions / this are scaled by the full factor."""
    rope_high_freq_factor: float = option(4.0, above=0)
    """llama3: wavelengths below rope_original_max_positions / this are not scaled."""
    rope_original_max_positions: int = option(
        8192, at_least=1, below=2**31, flags=("--yarn-original-max-position-embeddings",)
    )
    """llama3, yarn, dynamic: sequence length of the original pretraining."""
    rope_beta_fast: float = option(32.0, above=0, flags=("--yarn-beta-fast",))
    """yarn: channels with more rotations than this within the original positions are not scaled."""
    rope_beta_slow: float = option(1.0, above=0, flags=("--yarn-beta-slow",))
    """yarn: channels with fewer rotations than this are scaled by the full factor."""
    rope_truncate: bool = option(True, flags=("--yarn-correction-range-round-to-int",))
    """yarn: round the bounds of the interpolated channels to whole pairs."""
    rope_mscale: float | None = option(None, above=0, flags=("--mscale",))
    """yarn: factor on queries and keys: 0.1·this·ln(factor) + 1, divided by the same term of rope_mscale_all_dim."""
    rope_mscale_all_dim: float | None = option(None, above=0, flags=("--mscale-all-dim",))
    """yarn: see rope_mscale. If both are unset, the factor is 0.1·ln(factor) + 1. multi_latent_attention also
    multiplies scores by the square of 0.1·this·ln(factor) + 1, if set."""
    rope_attention_factor: float | None = option(None, above=0)
    """yarn: explicit factor on queries and keys, instead of rope_mscale."""
    attn_temperature_beta: float = option(0.0, at_least=0)
    """llama3, yarn, dynamic: multiply queries by 1 + this·ln(1 + floor(position / rope_original_max_positions))
    (Ministral 3)."""
    sliding_window: int | None = option(None, at_least=2)
    """Number of keys that a query attends to, including its own; default: all previous ones."""
    window_attn_skip_freq: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers that ignore sliding_window: every n-th, or a list with 1 (window) or 0 (no window) per layer."""
    rotary_base_local: float | None = option(None, above=0)
    """RoPE's theta, without rope_scaling, in sliding-window layers; default: rotary_base."""
    no_rope_freq: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers without RoPE: every n-th, or a list with 1 (no RoPE) or 0 (RoPE) per layer."""
    softmax_scale: float | None = option(None, above=0)
    """Factor on the query-key products; default: 1 / sqrt(head size)."""
    attn_logit_softcapping: float | None = option(None, above=0)
    """Cap attention scores s to c·tanh(s/c) for this c. Attention is then computed in tiles."""
    softmax_type: str = option("vanilla", choices=("vanilla", "off-by-one", "learnable"))
    """Attention sink in the softmax: 0 (off-by-one), learned per head (learnable), or none (vanilla). With a sink,
    attention is computed in tiles."""
    final_logit_softcapping: float | None = option(None, above=0)
    """Cap logits z to c·tanh(z/c) for this c."""
    multi_latent_attention: bool = option(False)
    """Project queries, keys and values from low-rank latents; all heads share the RoPE part of the keys (DeepSeek-V2).
    With qk_norm the latents are normalized."""
    q_lora_rank: int | None = option(None, at_least=1, below=2**24)
    """Rank of the query latent; default: none."""
    kv_lora_rank: int = option(32, at_least=1, below=2**24)
    """Rank of the latent of keys and values."""
    qk_head_dim: int = option(128, flags=("--qk-nope-head-dim",), at_least=1, below=2**24)
    """Channels without RoPE of each head's query and key."""
    qk_pos_emb_head_dim: int = option(64, flags=("--qk-rope-head-dim",), at_least=2, below=2**24)
    """Channels with RoPE of each head's query, and of the key that all heads share."""
    v_head_dim: int = option(128, at_least=1, below=2**24)
    """Channels of each head's value; at most qk_head_dim + qk_pos_emb_head_dim."""
    attention_output_gate: bool = option(False)
    """Multiply attention by a sigmoid gate of each channel, which is projected with the queries."""
    experimental_attention_variant: str | None = option(None, choices=("gated_delta_net", "mamba2", "dsa"))
    """Linear attention in the layers of linear_attention_freq: gated_delta_net (arXiv 2412.06464) or the state space mamba2
    (arXiv 2405.21060); or dsa: each query of multi_latent_attention attends to the keys that an indexer chooses (arXiv
    2512.02556)."""
    linear_attention_freq: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers with softmax attention: every n-th, or a list with 1 (linear) or 0 (softmax) per layer."""
    linear_conv_kernel_dim: int = option(4, at_least=1, below=1024)
    """Tokens that the causal convolution of linear attention reads, including the token itself."""
    linear_key_head_dim: int = option(128, flags=("--mamba-state-dim",), at_least=1, below=2**24)
    """Size of a query and key head of linear attention."""
    linear_value_head_dim: int = option(128, flags=("--mamba-head-dim",), at_least=1, below=2**24)
    """Size of a value head of linear attention."""
    linear_num_key_heads: int = option(16, flags=("--mamba-num-groups",), at_least=1, below=2**24)
    """Query and key heads of linear attention."""
    linear_num_value_heads: int = option(32, flags=("--mamba-num-heads",), at_least=1, below=2**24)
    """Value heads of linear attention; a multiple of linear_num_key_heads."""
    dsa_indexer_n_heads: int = option(64, at_least=1, below=2**24)
    """Heads of the indexer."""
    dsa_indexer_head_dim: int = option(128, at_least=2, below=2**24)
    """Size of an indexer head; RoPE rotates its first qk_pos_emb_head_dim channels."""
    dsa_indexer_topk: int = option(2048, at_least=1, below=2**31)
    """Keys per query; a query that sees fewer attends to all of them."""
    dsa_indexer_loss_coeff: float = option(0.0, at_least=0)
    """Weight of each layer's indexer loss, the mean over tokens of the divergence of the indexer's distribution over keys from
    attention's. With 0 the indexer does not learn."""
    dsa_indexer_use_sparse_loss: bool = option(False)
    """Compute the indexer loss over the chosen keys instead of all visible ones."""
    dsa_indexer_rope_interleaved: bool = option(False)
    """RoPE of the indexer rotates pairs of neighbouring channels (GLM-5) instead of two halves (DeepSeek-V3.2)."""
    dsa_indexer_k_norm_epsilon: float | None = option(None, above=0)
    """Added to the variance in the LayerNorm of the indexer's keys; default: norm_epsilon."""
    no_mlp_freq: list[int] | None = option(None, at_least=0, below=10_000)
    """Layers of attention alone: every n-th, or a list with 1 (no MLP) or 0 (MLP) per layer."""
    pre_norms: bool = option(True)
    """Normalize the input of attention and of the MLP."""
    post_norms: bool = option(False)
    """Normalize the output of attention and of the MLP, before the residual sum."""
    normalization: str = option("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Kind of norm."""
    norm_zero_centered: bool = option(False, flags=("--apply-layernorm-1p",))
    """Norms multiply by 1 + weight, and weights start at 0."""
    qk_norm: bool = option(False, flags=("--qk-layernorm",))
    """Normalize queries and keys per head, before RoPE."""
    qk_norm_all_heads: bool = option(False)
    """qk_norm normalizes over all heads together."""
    apply_wd_to_qk_layernorm: bool = option(False)
    """Weight decay applies also to the norms of qk_norm, with their biases."""
    norm_epsilon: float = option(1e-5, above=0, flags=("--layernorm-epsilon",))
    """Added to the variance inside the norm."""
    activation: str = option("gelu", choices=("gelu", "gelu_tanh", "squared_relu", *GATED))
    """MLP nonlinearity. The glu variants have a gate; quick_geglu is gate·sigmoid(1.702·gate)·up."""
    activation_func_clamp_value: float | None = option(None, above=0)
    """Gated MLPs: upper limit of the gate, and limit of the up projection's magnitude."""
    glu_linear_offset: float = option(0.0, at_least=0, below=1000)
    """Gated MLPs: constant added to the up projection."""
    add_bias_linear: bool = option(True)
    """Biases in the linear layers of attention and MLP; for experts see moe_add_bias_linear."""
    add_qkv_bias: bool = option(False, flags=("--add-qkv-bias-linear",))
    """Bias of queries, keys and values without add_bias_linear."""
    scale_embeddings: bool = option(False)
    """Multiply word embeddings by sqrt(hidden_size)."""
    embedding_multiplier: float = option(1.0, above=0)
    """Factor on word embeddings, without scale_embeddings."""
    residual_multiplier: float = option(1.0, above=0)
    """Factor on the outputs of attention and of the MLP before the residual sums."""
    logits_scaling: float = option(1.0, above=0)
    """Divisor of logits, before final_logit_softcapping."""
    tie_embeddings: bool = option(True)
    """The output head shares the word embedding's weight."""
    hidden_dropout: float = option(0.0, at_least=0, below=1)
    """Dropout on the embedding and on each residual branch."""
    attention_dropout: float = option(0.0, at_least=0, below=1)
    """Dropout on attention probabilities; uses unfused attention."""
    use_mup: bool = option(False)
    """Maximal update parametrization (arXiv 2203.03466): the learning rate tuned at mup_base_hidden_size transfers."""
    mup_base_hidden_size: int | None = option(None, at_least=1, below=2**20)
    """use_mup: width at which the learning rate was tuned; default: hidden_size."""
    mup_base_head_dim: int | None = option(None, at_least=1, below=2**20)
    """use_mup: head size at which attention scores are unchanged; default: 1."""
    init_method_std: float = option(0.02, above=0, below=100)
    """Standard deviation of initial weights; residual output projections divide it by sqrt(number of branches), which is
    2·num_layers with an MLP in each layer."""
    num_experts: int | None = option(None, at_least=2, below=2**20)
    """Experts of each MoE layer; default: a dense MLP."""
    moe_router_topk: int = option(2, at_least=1, below=2**24)
    """Experts per token."""
    moe_ffn_hidden_size: int | None = option(None, at_least=1, below=2**24)
    """Width of one expert; default: ffn_hidden_size."""
    moe_add_bias_linear: bool = option(False)
    """Biases in the router and in both layers of each expert."""
    moe_shared_expert_intermediate_size: int | None = option(None, at_least=1, below=2**24)
    """Width of the shared expert, which processes every token; default: none."""
    moe_shared_expert_gate: bool = option(False)
    """Multiply the shared expert's output by a sigmoid gate computed from each token."""
    moe_layer_freq: int = option(1, at_least=1, below=10_000)
    """Every n-th layer has experts, starting with the first; the others have a dense MLP."""
    moe_first_dense_layers: int = option(0, at_least=0, below=10_000)
    """Number of leading layers with a dense MLP."""
    moe_router_pre_softmax: bool = option(False)
    """Apply the softmax over all experts before the top-k choice; default: over the chosen ones."""
    moe_router_score_function: str = option("softmax", choices=("softmax", "sigmoid"))
    """Function from router logits to scores; sigmoid scores are divided by the sum of the chosen ones."""
    moe_router_sinkhorn: bool = option(False)
    """Balance experts in training by Sinkhorn's algorithm, which affects only the choice; computed per sequence."""
    moe_router_force_load_balancing: bool = option(False)
    """For benchmarks: choose experts in training by position, evenly, whatever the router computes."""
    moe_router_enable_expert_bias: bool = option(False)
    """Balance experts with a per-expert bias that only affects the choice; experts with too few tokens in a step get a
    larger one (arXiv 2408.15664)."""
    moe_router_bias_update_rate: float = option(1e-3, at_least=0, below=1)
    """Change of the expert bias per step."""
    moe_router_num_groups: int | None = option(None, at_least=1, below=2**20)
    """Groups of consecutive experts; a token is routed to moe_router_group_topk of them; default: no groups."""
    moe_router_group_topk: int | None = option(None, at_least=1, below=2**20)
    """Number of groups per token, chosen by the sum of each group's best topk / group_topk scores."""
    moe_router_topk_scaling_factor: float = option(1.0, above=0)
    """Factor on the router weights."""
    mtp_num_layers: int = option(0, at_least=0, below=100)
    """Multi-token prediction layers (MTP, DeepSeek-V3): each predicts one more token ahead in training."""
    mtp_loss_scaling_factor: float = option(0.1, at_least=0)
    """Weight of the mean MTP loss."""
    moe_aux_loss_coeff: float = option(0.0, at_least=0)
    """Weight of each MoE layer's load-balancing loss, computed per sequence."""
    moe_z_loss_coeff: float = option(0.0, at_least=0)
    """Weight of the router z-loss, the mean square of its log-sum-exp."""
    moe_expert_capacity_factor: float | None = option(None, above=0)
    """Limit of an expert's tokens per sequence, as a multiple of the even share; default: no limit."""
    moe_token_drop_policy: str = option("probs", choices=("probs", "position"))
    """Tokens that an expert over capacity drops: the least probable (probs) or the last (position)."""
    moe_pad_expert_input_to_capacity: bool = option(False)
    """Pad experts to their capacity with zeros, so that the host never waits for token counts."""

    @property
    def head_size(self) -> int:
        """Size of one attention head's query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def expert_capacity(self, seq_length: int) -> int:
        """Most tokens of a sequence that one expert processes."""
        if self.num_experts is None or self.moe_expert_capacity_factor is None:
            return seq_length
        return math.ceil(self.moe_expert_capacity_factor * seq_length * self.moe_router_topk / self.num_experts)

    @property
    def value_size(self) -> int:
        """Size of one attention head's value."""
        return self.v_head_dim if self.multi_latent_attention else self.head_size

    @property
    def rotary_size(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else int(self.head_size * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        if self.multi_latent_attention or self.num_query_groups is None:
            return self.num_attention_heads
        return self.num_query_groups

    @property
    def group_heads(self) -> int:
        """Heads in the rows of qkv of one key/value head: its queries, their gates if there are any, key and value."""
        return self.num_attention_heads // self.query_groups * (1 + self.attention_output_gate) + 2

    @property
    def fused_rows(self) -> dict[str, tuple[int, ...]]:
        """End of a tensor's name -> rows of the matrices in it, one after the other for each key head."""
        d, queries = self.head_size, self.num_attention_heads // self.query_groups * self.head_size
        found = {".attention.qkv.weight": (queries, *[queries] * self.attention_output_gate, d, d)}
        if self.linear_attention_freq is not None:
            key, each = self.linear_key_head_dim, self.linear_num_value_heads // self.linear_num_key_heads
            values = each * self.linear_value_head_dim
            found[".attention.in_proj.weight"] = (key, key, values, values, *[each] * (1 + self.linear_corrects))
        return found

    @property
    def linear_corrects(self) -> bool:
        """Whether tokens of linear attention correct its state, by a write strength (the delta rule), or only add to it."""
        return self.experimental_attention_variant == "gated_delta_net"

    @property
    def is_sparse(self) -> bool:
        """Whether attention is sparse (`dsa`)."""
        return self.experimental_attention_variant == "dsa"

    @property
    def linear_channels(self) -> tuple[int, int]:
        """Channels of a layer with linear attention: those with a convolution, and all that are projected."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        return 2 * keys + values, 2 * keys + 2 * values + (1 + self.linear_corrects) * self.linear_num_value_heads

    def is_linear_layer(self, index: int) -> bool:
        """Return whether layer `index` of the whole model has linear attention; MTP layers equal the last layer."""
        frequency = self.linear_attention_freq
        return frequency is not None and not _every(frequency, min(index, self.num_layers - 1), listed=0)

    def has_mlp(self, index: int) -> bool:
        """Return whether layer `index` of the whole model has an MLP or experts; MTP layers equal the last layer."""
        return self.no_mlp_freq is None or not _every(self.no_mlp_freq, min(index, self.num_layers - 1), listed=1)

    def has_window(self, index: int) -> bool:
        """Return whether layer `index` of the whole model uses the sliding window; MTP layers equal the last layer."""
        index = min(index, self.num_layers - 1)
        if self.is_linear_layer(index):
            return False
        if self.sliding_window is None or self.window_attn_skip_freq is None:
            return self.sliding_window is not None
        return not _every(self.window_attn_skip_freq, index, listed=0)

    def has_rope(self, index: int) -> bool:
        """Return whether layer `index` of the whole model has RoPE; MTP layers equal the last layer."""
        index = min(index, self.num_layers - 1)
        if self.is_linear_layer(index):
            return False
        if self.position_embedding_type != "rope" or self.no_rope_freq is None:
            return self.position_embedding_type == "rope"
        return not _every(self.no_rope_freq, index, listed=1)

    @property
    def embedding_scale(self) -> float:
        """Factor on the word embeddings."""
        return math.sqrt(self.hidden_size) if self.scale_embeddings else self.embedding_multiplier

    @property
    def logit_scale(self) -> float:
        """Factor on the logits."""
        return 1 / (self.width_multiplier * self.logits_scaling)

    @property
    def width_multiplier(self) -> float:
        """Width relative to the base width of `use_mup`; 1 without it."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def hidden_std(self) -> float:
        """Standard deviation of initial hidden matrices, before the division for depth."""
        return self.init_method_std / math.sqrt(self.width_multiplier)

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial projections into the residual stream, divided for the number of branches."""
        return self.hidden_std / math.sqrt(self.num_layers + sum(map(self.has_mlp, range(self.num_layers))))

    @property
    def score_scale(self) -> float | None:
        """Factor on the query-key products; None: 1 / sqrt(head size)."""
        if self.use_mup:
            return math.sqrt(self.mup_base_head_dim or 1) / self.head_size
        return self.softmax_scale

    @property
    def mtp_layers(self) -> range:
        """Indices of the MTP layers, which follow the last layer on the last stage."""
        return range(self.num_layers, self.num_layers + self.mtp_num_layers)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
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

    def has_dense_mlp(self, index: int) -> bool:
        """Return whether layer `index` of the whole model has an MLP without experts."""
        return self.has_mlp(index) and not self.is_moe_layer(index)

    def is_moe_layer(self, index: int) -> bool:
        """Return whether layer `index` of the whole model has experts; MTP layers equal the last layer."""
        index = min(index, self.num_layers - 1)
        if self.num_experts is None or index < self.moe_first_dense_layers or not self.has_mlp(index):
            return False
        return (index - self.moe_first_dense_layers) % self.moe_layer_freq == 0

    @property
    def score_table(self) -> bool:
        """Whether the router keeps the scores of all experts, not only of the chosen ones."""
        return self.moe_router_score_function == "sigmoid" or self.moe_router_pre_softmax or self.moe_aux_loss_coeff > 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: vocab_size rounded up. Raises ValueError: vocab_size is not known."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set and no tokenizer has resolved it")
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple
