"""Rules about the network's shape that hold on any number of ranks."""

from megalite.config.errors import ConfigError
from megalite.config.rules.divide import divisors
from megalite.config.rules.effect import refuse_idle
from megalite.config.run import RunConfig

LLAMA3_SETTINGS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_positions")


def check_network(config: RunConfig, explicit: frozenset[str]) -> None:
    """Heads, groups, widths and positions must fit one another."""
    model, s = config.model, config.training.seq_length
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        below = model.hidden_size // heads * heads
        raise ConfigError(
            f"hidden_size {model.hidden_size} is not divisible by num_attention_heads {heads}; use hidden_size "
            f"{below + heads}, or say the size of a head with --kv-channels {max(1, model.hidden_size // heads)}"
        )
    if heads % model.query_groups:
        raise ConfigError(
            f"num_attention_heads {heads} is not divisible by num_query_groups {model.query_groups}; use "
            f"num_query_groups {divisors(heads)}"
        )
    dense = not all(map(model.is_moe_layer, range(model.num_layers))) or model.moe_ffn_hidden_size is None
    if dense and model.ffn_size < 1:
        raise ConfigError(
            f"hidden_size {model.hidden_size} with {model.activation} gives an MLP of width 8·h/3 rounded down to a multiple of "
            f"64 = 0; set --ffn-hidden-size, e.g. 64"
        )
    if model.add_qkv_bias and model.add_bias_linear:
        raise ConfigError(
            "add_qkv_bias has no effect with add_bias_linear, which gives every linear layer of attention a bias; remove "
            "it, or add --disable-bias-linear"
        )
    _check_rope(config, explicit)
    if model.max_position_embeddings is not None and s > model.max_position_embeddings:
        raise ConfigError(
            f"seq_length {s} is more than max_position_embeddings {model.max_position_embeddings}; use "
            f"--max-position-embeddings {s} or a shorter sequence"
        )


def _check_rope(config: RunConfig, explicit: frozenset[str]) -> None:
    """RoPE's settings need RoPE, and those of one kind of scaling that kind."""
    model = config.model
    positions = f"with position_embedding_type {model.position_embedding_type}"
    if model.position_embedding_type == "rope":
        if model.head_size % 2:
            raise ConfigError(
                f"a head size of {model.head_size} is odd, but rope turns pairs of channels; use --kv-channels "
                f"{model.head_size + 1}"
            )
    else:
        refuse_idle(config, explicit, ["rotary_base"], cause=positions, remedy="use rope")
        if model.rope_scaling != "none":
            raise ConfigError(
                f"rope_scaling {model.rope_scaling} has no effect {positions}; use rope, or --rope-scaling none"
            )
    scaling = f"with rope_scaling {model.rope_scaling}"
    if model.rope_scaling == "none":
        remedy = "use linear or llama3,"
        refuse_idle(config, explicit, ["rope_scaling_factor"], cause=scaling, remedy=remedy)
    if model.rope_scaling != "llama3":
        refuse_idle(config, explicit, LLAMA3_SETTINGS, cause=scaling, remedy="use llama3")
    elif model.rope_low_freq_factor >= model.rope_high_freq_factor:
        raise ConfigError(
            f"rope_low_freq_factor {model.rope_low_freq_factor:g} is not below rope_high_freq_factor "
            f"{model.rope_high_freq_factor:g}; use {model.rope_high_freq_factor / 4:g}"
        )
