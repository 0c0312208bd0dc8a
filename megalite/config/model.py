"""What the network is: shapes, norms, activations, positions."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One GPT. GPT-2/3 by default; Llama by `normalization`, `activation`, `position_embedding_type` and so on."""

    num_layers: int = option(2, basic=True)
    """Transformer blocks."""
    hidden_size: int = option(128, basic=True)
    """Width h of the residual stream."""
    num_attention_heads: int = option(4, basic=True)
    """Attention (query) heads."""
    num_query_groups: int | None = option(None)
    """Key/value heads of grouped-query attention; default: as many as there are attention heads."""
    kv_channels: int | None = option(None)
    """Size of one head; default hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = option(None)
    """Width of the MLP; default 4·h, or 8·h/3 rounded down to a multiple of 64 with swiglu."""
    vocab_size: int | None = option(None)
    """Token ids are below this; default: the tokenizer's size."""
    make_vocab_size_divisible_by: int = option(128)
    """Embedding rows are padded to a multiple of this. Never of the layout: checkpoints must not depend on it."""
    max_position_embeddings: int | None = option(None)
    """Rows of the learned position embedding, and the longest sequence allowed; default seq_length."""
    position_embedding_type: str = option("learned_absolute", choices=("learned_absolute", "rope", "none"))
    """How positions enter."""
    rotary_base: float = option(10000.0)
    """RoPE's theta."""
    normalization: str = option("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Norm before attention, before the MLP and at the end."""
    norm_epsilon: float = option(1e-5, flags=("--layernorm-epsilon",))
    """Added to the variance inside the norm."""
    activation: str = option("gelu", choices=("gelu", "gelu_tanh", "swiglu"))
    """MLP nonlinearity; swiglu has a gate beside the up projection."""
    add_bias_linear: bool = option(True)
    """Biases in the linear layers of attention and MLP."""
    tie_embeddings: bool = option(True)
    """The output head uses the word embedding's weight."""
    hidden_dropout: float = option(0.0)
    """Dropout on the embedding and on each residual branch."""
    attention_dropout: float = option(0.0)
    """Dropout on attention probabilities; above 0 the unfused attention is used."""
    init_method_std: float = option(0.02)
    """Standard deviation of the initial weights; residual output projections get it divided by sqrt(2·num_layers)."""
    num_experts: int | None = option(None)
    """Experts of each MoE layer; default: a dense MLP."""
    moe_router_topk: int = option(2)
    """Experts each token is sent to."""

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP (of one expert, with experts)."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // 3 // 64 * 64 if self.activation == "swiglu" else 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: vocab_size rounded up; needs vocab_size to be known."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set and no tokenizer has resolved it")
        multiple = self.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple
