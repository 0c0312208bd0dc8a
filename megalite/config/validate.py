"""`validate`: the one place that decides whether a config is legal, and that fills in what it leaves open.

Pure arithmetic: it opens no file, needs no device and works for any world size. What only the schedule generator can
tell (which numbers of microbatches a schedule takes) is asked of it by the dry run and by training, for each of
`microbatch_counts(config)`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megalite.config.batch import microbatch_counts, samples_per_microbatch
from megalite.config.describe import replace, settings
from megalite.config.errors import Findings, Problems, gathered, hide
from megalite.config.rules.batch import check_batch, check_rampup_form, check_run_lengths
from megalite.config.rules.compute import check_compute, check_recompute
from megalite.config.rules.data_parallel import LLAMA3_SETTINGS, check_data_parallel, check_network
from megalite.config.rules.files import check_checkpoint, check_data, check_evaluation
from megalite.config.rules.layout import check_experts, check_layout, check_model_cuts, resolve_dp
from megalite.config.rules.optimizers import ADAM_SETTINGS, check_optimizer
from megalite.config.rules.ranges import check_ranges
from megalite.config.rules.run import check_elastic, check_hang_timeout, check_stops, check_visibility
from megalite.config.rules.schedules import check_schedules
from megalite.config.run import RunConfig

__all__ = ["microbatch_counts", "require_startable", "validate"]


def validate(
    config: RunConfig,
    world_size: int | None,
    explicit: frozenset[str] = frozenset(),
    *,
    startable: bool = False,
    problems: Problems | None = None,
) -> RunConfig:
    """Check a config for `world_size` ranks and fill in dp, global_batch_size and the derived sizes of the model.

    Filled in: dp, etp (with experts), global_batch_size, num_query_groups, kv_channels, ffn_hidden_size,
    max_position_embeddings. vocab_size stays open if a tokenizer is to give it: validate again once it is known.
    Validating the result again changes nothing.

    Args:
        config: what was asked for.
        world_size: number of ranks; None if it is not known: rules that need it are skipped.
        explicit: settings given by the user (`Invocation.explicit`). Some have an effect only beside another one, and
            that they are there at all is then the error.
        startable: it must have what training needs and a dry run does not: a length and data.
        problems: gets what is wrong, and says which settings are already known to be. Default: raised, all in one.

    Raises:
        ConfigError: everything that is not legal, each with its name, both values and a value that works.
    """
    with gathered(problems) as found:
        check_ranges(config, found)
        found.extend(check_rampup_form(_readable(config, found)), "rampup_batch_size")
        if world_size is None:
            found.wrong.add("dp")
        with found.collecting("dp"):
            if world_size is not None:
                config = replace(config, dp=resolve_dp(_readable(config, found), world_size))
        seen = _readable(config, found)
        for check in _OF_WHAT_IS_ASKED:
            found.extend(check(seen, explicit))
        config = _resolve(_without_idle(config), found)
        seen = _readable(config, found)
        for check in _OF_WHAT_IS_RESOLVED:
            found.extend(check(seen, explicit))
        if startable:
            found.extend(_unstartable(seen))
    return config


def require_startable(config: RunConfig) -> None:
    """Raise ConfigError unless a validated config has what training needs and a dry run does not: length and data."""
    with gathered(None) as found:
        found.extend(_unstartable(config))


def _unstartable(config: RunConfig) -> Findings:
    yield _no_length(config)
    yield _no_data(config)
    yield _no_vocabulary(config)


def _no_length(config: RunConfig) -> Findings:
    if config.training.train_iters is None and config.training.train_samples is None:
        yield "the length of the run is not set; add --train-iters 1000 (or --train-samples)"


def _no_data(config: RunConfig) -> Findings:
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        yield "there is no data to train on; add --data-path PREFIX (or --mock-data --vocab-size 1024)"


def _no_vocabulary(config: RunConfig) -> Findings:
    data = config.data
    tokenizer = data.tokenizer_model or data.vocab_file or data.tokenizer_type == "ByteLevelTokenizer"
    # Mock data without it has a rule of its own, and without any data there is no tokenizer yet.
    if config.model.vocab_size is None and not tokenizer and (data.data_path or data.train_data_path):
        yield "the size of the vocabulary is not known; add --tokenizer-model FILE or --vocab-size 50257"


def _readable(config: RunConfig, problems: Problems) -> RunConfig:
    """The config for rules: to read what is wrong in it ends the rule."""
    return RunConfig(**{name: hide(section, problems.wrong) for name, section in vars(config).items()})


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


def _resolve(config: RunConfig, problems: Problems) -> RunConfig:
    """Fill in what is derived; what is derived from something wrong is wrong too."""
    seen = _readable(config, problems)
    for name, derive in _DERIVED.items():
        with problems.collecting(name):
            config = replace(config, **{name: derive(seen)})
    return config


_OF_WHAT_IS_ASKED: tuple[Callable[[RunConfig, frozenset[str]], Findings], ...] = (
    check_layout,
    check_hang_timeout,
    check_elastic,
    check_data_parallel,
    check_optimizer,
    check_compute,
    check_network,
    check_experts,
    check_model_cuts,
    check_recompute,
)
_OF_WHAT_IS_RESOLVED: tuple[Callable[[RunConfig, frozenset[str]], Findings], ...] = (
    check_batch,
    check_schedules,
    check_run_lengths,
    check_data,
    check_evaluation,
    check_checkpoint,
    check_stops,
    check_visibility,
)
_DERIVED: Mapping[str, Callable[[RunConfig], object]] = MappingProxyType(
    {
        "etp": lambda c: c.parallel.expert_tp if c.model.num_experts else c.parallel.etp,
        "global_batch_size": lambda c: c.training.global_batch_size or samples_per_microbatch(c),
        "num_query_groups": lambda c: c.model.query_groups,
        "kv_channels": lambda c: c.model.head_size,
        "ffn_hidden_size": lambda c: c.model.ffn_size or None,  # 0: no layer has a dense MLP
        "max_position_embeddings": lambda c: c.model.max_position_embeddings or c.training.seq_length,
    }
)
"""Setting that may be left open -> what it then is."""
