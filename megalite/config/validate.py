"""`validate`: the one place that decides whether a config is legal, and that fills in what it leaves open.

Pure arithmetic: it opens no file, needs no device and works for any world size. What only the schedule generator can
tell (which numbers of microbatches a schedule takes) is asked of it by the dry run and by training, for each of
`microbatch_counts(config)`.
"""

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace, settings
from megalite.config.errors import ConfigError
from megalite.config.rules.batch import check_batch, check_rampup_form
from megalite.config.rules.compute import check_compute
from megalite.config.rules.data_parallel import check_data_parallel
from megalite.config.rules.elastic import check_elastic
from megalite.config.rules.experts import check_experts
from megalite.config.rules.files import check_checkpoint, check_data, check_evaluation
from megalite.config.rules.hangs import check_hang_timeout
from megalite.config.rules.layout import check_layout, check_model_cuts, resolve_dp
from megalite.config.rules.network import LLAMA3_SETTINGS, check_network
from megalite.config.rules.optimizers import ADAM_SETTINGS, check_optimizer
from megalite.config.rules.ranges import check_ranges
from megalite.config.rules.recompute import check_recompute
from megalite.config.rules.run_lengths import check_run_lengths
from megalite.config.rules.schedules import check_schedules
from megalite.config.rules.stops import check_stops
from megalite.config.rules.visibility import check_visibility
from megalite.config.run import RunConfig

__all__ = ["microbatch_counts", "require_startable", "validate"]


def validate(config: RunConfig, world_size: int, explicit: frozenset[str] = frozenset()) -> RunConfig:
    """Check a config for `world_size` ranks and fill in dp, global_batch_size and the derived sizes of the model.

    Filled in: dp, etp (with experts), global_batch_size, num_query_groups, kv_channels, ffn_hidden_size,
    max_position_embeddings. vocab_size stays open if a tokenizer is to give it: validate again once it is known.
    Validating the result again changes nothing.

    Args:
        config: what was asked for.
        world_size: number of ranks.
        explicit: settings given by the user (`Invocation.explicit`). Some have an effect only beside another one, and
            that they are there at all is then the error.

    Raises:
        ConfigError: for the first thing that is not legal: its name, both values and a value that works.
    """
    check_ranges(config)
    check_rampup_form(config)
    config = replace(config, dp=resolve_dp(config, world_size))
    check_layout(config, explicit)
    check_hang_timeout(config, world_size)
    check_elastic(config, explicit)
    check_data_parallel(config, explicit)
    check_optimizer(config, explicit)
    check_compute(config)
    check_network(config, explicit)
    check_experts(config, explicit)
    check_model_cuts(config)
    check_recompute(config, explicit)
    config = _resolve(_without_idle(config))
    check_batch(config)
    check_schedules(config, explicit)
    check_run_lengths(config, explicit)
    check_data(config, explicit)
    check_evaluation(config, explicit)
    check_checkpoint(config, explicit)
    check_stops(config, explicit)
    check_visibility(config, explicit)
    return config


def require_startable(config: RunConfig) -> None:
    """Raise ConfigError unless a validated config has what training needs and a dry run does not: length and data."""
    if config.training.train_iters is None and config.training.train_samples is None:
        raise ConfigError("the length of the run is not set; add --train-iters 1000 (or --train-samples)")
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        raise ConfigError(
            "there is no data to train on; add --data-path PREFIX (or --mock-data --vocab-size 1024)"
        )
    tokenizer = data.tokenizer_model or data.vocab_file or data.tokenizer_type == "ByteLevelTokenizer"
    if config.model.vocab_size is None and not tokenizer:
        raise ConfigError(
            "the size of the vocabulary is not known; add --tokenizer-model FILE or --vocab-size 50257"
        )


def _without_idle(config: RunConfig) -> RunConfig:
    """Put back what a preset sets and a flag left without effect: read again from a file, it would be an error."""
    model = config.model
    idle: list[str] = []
    if model.num_experts is None:
        idle += [name for name in settings() if name.startswith("moe_")]
    if model.position_embedding_type != "rope":
        idle.append("rotary_base")
    if model.rope_scaling == "none":
        idle.append("rope_scaling_factor")
    if model.rope_scaling != "llama3":
        idle += LLAMA3_SETTINGS
    if config.optimizer.optimizer == "sgd":
        idle += ADAM_SETTINGS
    return replace(config, **{name: settings()[name].default for name in idle})


def _resolve(config: RunConfig) -> RunConfig:
    model, training, parallel = config.model, config.training, config.parallel
    assert parallel.dp is not None
    return replace(
        config,
        etp=parallel.expert_tp if model.num_experts else parallel.etp,
        global_batch_size=training.global_batch_size or training.micro_batch_size * parallel.dp,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        ffn_hidden_size=model.ffn_size or None,  # 0: no layer has a dense MLP
        max_position_embeddings=model.max_position_embeddings or training.seq_length,
    )
