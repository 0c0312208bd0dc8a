"""Rules about the network's shape that hold on any number of ranks."""

from megalite.config.errors import ConfigError
from megalite.config.rules.layout import divisors
from megalite.config.run import RunConfig


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
    if model.ffn_size < 1:
        raise ConfigError(
            f"hidden_size {model.hidden_size} with swiglu gives an MLP of width 8·h/3 rounded down to a multiple of "
            f"64 = 0; set --ffn-hidden-size, e.g. 64"
        )
    if model.position_embedding_type == "rope":
        if model.head_size % 2:
            raise ConfigError(
                f"a head size of {model.head_size} is odd, but rope turns pairs of channels; use --kv-channels "
                f"{model.head_size + 1}"
            )
    elif "rotary_base" in explicit:
        raise ConfigError(
            f"rotary_base {model.rotary_base:g} has no effect with position_embedding_type "
            f"{model.position_embedding_type}; use rope or remove it"
        )
    if model.max_position_embeddings is not None and s > model.max_position_embeddings:
        raise ConfigError(
            f"seq_length {s} is more than max_position_embeddings {model.max_position_embeddings}; use "
            f"--max-position-embeddings {s} or a shorter sequence"
        )
