"""`validate`: the one place that decides whether a config is legal and fills in its open settings.

Pure arithmetic: it opens no file, needs no device and works for any world size. Only the schedule generator knows
which numbers of microbatches it accepts, so dry run and training build the schedule for each of
`microbatch_counts(config)`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megalite.config.batch import samples_per_microbatch
from megalite.config.describe import check_choice, replace, settings, values_of
from megalite.config.errors import Findings, Problems, raise_at_end
from megalite.config.numbers import plain
from megalite.config.registry import import_modules
from megalite.config.rules.batch import BATCH, LENGTHS, SCHEDULES, check_rampup_form, check_schedule_form
from megalite.config.rules.compute import COMPUTE, NETWORK, RECOMPUTE
from megalite.config.rules.data_parallel import OPTIMIZER, STRATEGY
from megalite.config.rules.layout import CUTS, EXPERTS, LAYOUT, resolve_dp
from megalite.config.rules.rule import Check, Settings, render, rule_settings, rules
from megalite.config.rules.run import CHECKPOINT, DATA, ELASTIC, HANG, STOPS, TOKENIZER, VISIBILITY
from megalite.config.run import RunConfig
from megalite.config.training import parse_batch_schedule

_REQUEST_CHECKS: tuple[Check, ...] = (
    *(*LAYOUT, *HANG, *ELASTIC, *STRATEGY, *OPTIMIZER),
    *(*COMPUTE, *NETWORK, *EXPERTS, *CUTS, *RECOMPUTE, *TOKENIZER),
)
_RESOLVED_CHECKS: tuple[Check, ...] = (*BATCH, *SCHEDULES, *LENGTHS, *DATA, *CHECKPOINT, *STOPS, *VISIBILITY)
_START_CHECKS: tuple[Check, ...] = (
    *rules(
        {
            "the length of the run is not set; add --train-iters 1000 (or --train-samples)": (
                lambda c: c.train_iters is None and c.train_samples is None
            ),
            "there is no data to train on; add --data-path PREFIX (or --mock-data --vocab-size 1024)": (
                lambda c: not (c.data_path or c.train_data_path or c.mock_data or c.dataset)
            ),
            # Mock data without it has a separate rule, and without any data there is no tokenizer yet.
            "the size of the vocabulary is not known; add --tokenizer-model FILE or --vocab-size 50257": (
                lambda c: (
                    (c.data_path or c.train_data_path or c.dataset) and c.vocab_size is None and not _has_tokenizer(c)
                )
            ),
        }
    ),
)


def _has_tokenizer(c: Settings) -> bool:
    return bool(c.tokenizer_model or c.vocab_file or c.tokenizer_type == "ByteLevelTokenizer")


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
    max_position_embeddings, eval_interval (with valid_data_path). vocab_size stays open if a tokenizer provides it: validate again once it is known.
    Validating the result again changes nothing.

    Args:
        config: the requested settings.
        world_size: number of ranks; None if unknown: rules that need it are skipped.
        explicit: settings that the user gave (`Invocation.explicit`): giving a setting that has no effect is an error.
        startable: also require what training needs and a dry run does not: a length and data.
        problems: collects problems, and has the settings known to be wrong. Default: raised together.

    Raises ConfigError: everything that is not legal, with the setting's name, both values and a value that works."""
    import_modules(config.training.imports)
    with raise_at_end(problems) as found:

        def check(*checks: Check, wrong: tuple[str, ...] = ()) -> None:
            seen = rule_settings(config, explicit, found.wrong)
            word = partial(render, seen)
            for each in checks:
                found.extend(each(seen), *wrong, render=word)

        _check_values(config, found)
        check(check_rampup_form, wrong=("rampup_batch_size",))
        check(check_schedule_form, wrong=("step_batch_size_schedule",))
        if world_size is None:
            found.wrong.add("dp")
        with found.collecting({"dp"}):
            if world_size is not None:
                config = replace(config, dp=resolve_dp(rule_settings(config, explicit, found.wrong), world_size))
        check(*_REQUEST_CHECKS)
        if config.training.eval_iters == 0 and not config.training.full_validation:
            found.unused.add("eval_interval")
            if not (config.data.valid_data_path or config.data.test_data_path):  # which are evaluated by default
                found.unused.add("eval_iters")
        # When the config is read back from a file, an ignored setting of a preset would be an error.
        config = replace(config, **{name: settings()[name].default for name in found.unused})
        config = _resolve(config, found)
        check(*_RESOLVED_CHECKS)
        if startable:
            check(*_START_CHECKS)
    return config


def check_rules(config: RunConfig, explicit: frozenset[str], *checks: Check) -> Problems:
    """Run some rules alone and return their problems."""
    problems, seen = Problems(), rule_settings(config, explicit)
    for check in checks:
        problems.extend(check(seen), render=partial(render, seen))
    return problems


def require_startable(config: RunConfig) -> None:
    """Raise ConfigError unless a validated config can start training: it needs a length and data."""
    check_rules(config, frozenset(), *_START_CHECKS).raise_all()


def _check_values(config: RunConfig, problems: Problems) -> None:
    """Check that each setting is one of its choices, or a number within its bounds."""
    for name, value in values_of(config).items():
        # Defaults are legal, and most settings have them.
        if value is not None and value != settings()[name].default and name not in problems.wrong:
            problems.extend(_wrong_value(name, value), name)


def _wrong_value(name: str, value: Any) -> Findings:
    setting = settings()[name]
    check_choice(setting, value, "config")
    if setting.bounds is None:
        return
    example = "" if setting.default in (None, []) else f", e.g. {setting.default}"
    for element in value if isinstance(value, list) else [value]:
        error = setting.bounds.error(element)
        if error:
            what = f"has {plain(element)} in it; each" if setting.is_list else f"is {plain(element)}; it"
            yield f"{name} {what} {error}{example}"


def _last_size(c: Settings) -> int | None:
    return parse_batch_schedule(c.step_batch_size_schedule)[-1][1] if c.step_batch_size_schedule is not None else None


_DERIVED: Mapping[str, Callable[[Settings], object]] = {
    "etp": lambda c: c.expert_tp if c.num_experts else c.etp,
    "global_batch_size": lambda c: c.global_batch_size or _last_size(c) or samples_per_microbatch(c.run),
    "num_query_groups": lambda c: c.query_groups,
    "kv_channels": lambda c: c.head_size,
    "ffn_hidden_size": lambda c: c.ffn_size or None,  # 0: no layer has a dense MLP
    "max_position_embeddings": lambda c: c.max_position_embeddings or c.seq_length,
    "eval_interval": lambda c: (
        c.eval_interval
        or (1000 if c.valid_data_path and (c.eval_iters or c.full_validation) and not c.dataset else None)
    ),
}
"""Setting that may be left open -> its derived value."""


def _resolve(config: RunConfig, problems: Problems) -> RunConfig:
    """Fill in derived settings; a setting derived from a wrong one is wrong too."""
    seen, found = rule_settings(config, wrong=problems.wrong), {}
    for name, derive in _DERIVED.items():
        with problems.collecting({name}):
            found[name] = derive(seen)
    return replace(config, **found)
