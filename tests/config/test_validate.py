"""Every rule of `validate`, and the settings that it fills in."""

import re

import pytest

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace, settings
from megalite.config.errors import ConfigError, Problems
from megalite.config.files import dump, level_from_text, preset_names
from megalite.config.flags import parse_arguments
from megalite.config.merge import merge
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable, validate
from tests.config.rows import lines, refused, says

ILLEGAL = refused()


@pytest.mark.parametrize(("world_size", "flags", "parts"), ILLEGAL, ids=[f"{row[0]}: {row[1]}" for row in ILLEGAL])
def test_each_rule_has_one_error(world_size: int, flags: str, parts: list[str]) -> None:
    """One error names the settings and a value that works."""
    invocation = parse_arguments(flags.split())
    with pytest.raises(ConfigError) as error:
        validate(invocation.config, world_size, invocation.explicit)
    (problem,) = error.value.problems
    assert says(problem, parts), problem


@pytest.mark.parametrize("row", lines("idle"))
def test_settings_without_effect_are_reported(row: str) -> None:
    world_size, flags = int(row.split()[0]), row.partition(" ")[2]
    invocation = parse_arguments(flags.split(), world_size=world_size)
    validate(invocation.config, world_size, invocation.explicit)
    (note,) = invocation.notes
    assert note.what in flags and note.kind == "no effect here"
    assert re.match(r"[a-z0-9_]+( .*)? has no effect with", note.why), note.why
    assert invocation.remarks == [f"no effect here: {note.what} ({note.why})"]


def test_settings_without_effect_are_reset() -> None:
    invocation = parse_arguments(
        ["--sequence-parallel", "--tp-comm-overlap", "--etp", "1", "--tiktoken-pattern", "x+", "--eval-iters", "0"]
    )
    config = validate(invocation.config, 1, invocation.explicit)
    assert not (config.parallel.sequence_parallel or config.compute.tp_comm_overlap or config.parallel.etp)
    assert config.training.eval_iters == RunConfig().training.eval_iters


def test_table_has_sixty_invalid_combinations() -> None:
    """The error of a combination names at least two settings or flags."""
    words = [set(re.findall(r"[a-z][a-z0-9_-]*[a-z0-9]", " ".join(parts))) for _, _, parts in ILLEGAL]
    named = [{word.replace("-", "_") for word in row} & set(settings()) for row in words]
    assert sum(len(names) >= 2 for names in named) >= 60
    assert len({flags for _, flags, _ in ILLEGAL}) == len(ILLEGAL)


@pytest.mark.parametrize("row", lines("legal"))
def test_valid_neighbour_of_each_rule(row: str) -> None:
    world_size, flags = int(row.split()[0]), row.partition(" ")[2]
    invocation = parse_arguments(flags.split())
    config = validate(invocation.config, world_size, invocation.explicit)
    assert config.parallel.dp is not None and config.training.global_batch_size is not None
    assert validate(config, world_size, invocation.explicit) == config


def test_missing_settings_are_filled_in() -> None:
    config = validate(replace(RunConfig(), tp=2, pp=2, micro_batch_size=3, activation="swiglu"), 16)
    assert config.parallel.dp == 4
    assert config.training.global_batch_size == 12
    assert config.model.max_position_embeddings == config.training.seq_length == 256
    assert (config.model.num_query_groups, config.model.kv_channels, config.model.ffn_hidden_size) == (4, 32, 320)
    assert config.parallel.etp is None
    assert validate(replace(config, num_experts=4), 16).parallel.etp == 2


def test_every_number_has_bounds() -> None:
    unbounded = {name for name, s in settings().items() if s.type in (int, float) and s.bounds is None}
    assert unbounded == {"rampup_batch_size", "seq_length_warmup"}  # checked by rules


@pytest.mark.timeout(60)
def test_rules_are_fast_for_large_values() -> None:
    """The largest legal value of a setting is validated quickly, and a larger one is refused."""
    lengths = "--train-samples 1000000000000 --rampup-batch-size 1 1 100000000000 --global-batch-size 64"
    config = parse_arguments(lengths.split()).config
    for name, setting in settings().items():
        kind, bounds = setting.type, setting.bounds
        if bounds is None or setting.is_list:
            continue
        high = min(bounds.below, bounds.at_most)
        largest = kind(high) - (kind is int and bounds.below <= bounds.at_most)
        problems = Problems()
        validate(replace(config, **{name: largest}), 1, frozenset({name}), problems=problems)
        with pytest.raises(ConfigError, match=f"{name} is {kind(high + 1):g}|{name} is \\d+; it must be"):
            validate(replace(config, **{name: kind(high + 1)}), 1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-layers 0xffffffffffffffffffff", "num_layers takes a whole number such as 4, got '0xffffffffffffffffffff'"),
        ("--num-layers 99999999999999999999", "num_layers takes a whole number below 2^63 such as 4, got '99999999999999999999'"),
        (f"--num-layers {'9' * 9999}", "num_layers takes a whole number below 2^63 such as 4, got '9999"),
        ("--num-layers 1000000", "num_layers is 1000000; it must be below 10000"),
        ("--rampup-batch-size 1 1 99999999999999 --global-batch-size 8", "SAMPLES is 99999999999999; it must be below"),
        (
            "--rampup-batch-size 1 1 99 --global-batch-size 1000001",
            "INCREMENT 1 makes 1000000 batch sizes up to global_batch_size 1000001; "
            "use 100 or more",
        ),
    ],
)  # fmt: skip
def test_too_large_numbers_are_refused(flags: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        invocation = parse_arguments(flags.split())
        validate(invocation.config, 1, invocation.explicit)
    assert says in str(error.value) and len(str(error.value)) < 300


def test_bad_choice_in_code_is_an_error() -> None:
    with pytest.raises(ConfigError, match="precision cannot be 'fp31': did you mean fp32"):
        validate(replace(RunConfig(), precision="fp31"), 1)


TURNED_OFF = [
    "--preset mixtral-8x7b --num-experts none",
    "--preset llama3-8b --position-embedding-type none",
    "--preset llama3.1-8b --rope-scaling none",
    "--preset llama3.1-8b --rope-scaling linear",
    "--preset gpt2-124m --optimizer sgd",
]


@pytest.mark.parametrize("flags", [*(f"--preset {name} --train-iters 10" for name in preset_names()), *TURNED_OFF])
def test_resolved_config_round_trips(flags: str) -> None:
    """Also without settings that a flag turned off in a preset."""
    invocation = parse_arguments(flags.split())
    config = validate(invocation.config, 1, invocation.explicit)
    reloaded = merge([level_from_text(dump(config), "file resolved.yaml")])
    assert reloaded.config == config
    assert validate(reloaded.config, 1, reloaded.explicit) == config


def test_explicit_settings_of_a_file() -> None:
    level = level_from_text("eval_iters: 10\nhysteresis: 3\n", "file a.yaml")
    merged = merge([level])
    assert merged.explicit == {"hysteresis"}
    with pytest.raises(ConfigError, match="hysteresis 3 has no effect with precision fp32"):
        validate(merged.config, 1, merged.explicit)


def test_microbatch_counts_with_ramp_up() -> None:
    flags = "--rampup-batch-size 4 4 100 --global-batch-size 16 --pp 2"
    config = validate(parse_arguments(flags.split()).config, 4)
    assert microbatch_counts(config) == (2, 4, 6, 8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mock-data --vocab-size 8", "the length of the run is not set; add --train-iters 1000 (or --train-samples)"),
        ("--train-iters 1", "there is no data to train on; add --data-path PREFIX (or --mock-data --vocab-size 1024)"),
        (
            "--train-iters 1 --data-path a",
            "the size of the vocabulary is not known; add --tokenizer-model FILE or --vocab-size 50257",
        ),
    ],
)
def test_missing_training_settings_are_errors(flags: str, message: str) -> None:
    config = validate(parse_arguments(flags.split()).config, 1)
    with pytest.raises(ConfigError) as error:
        require_startable(config)
    assert str(error.value) == message


@pytest.mark.parametrize("tokenizer", ["--tokenizer-model t", "--tokenizer-type ByteLevelTokenizer"])
def test_startable_configs(tokenizer: str) -> None:
    flags = f"--train-iters 1 --data-path a {tokenizer}"
    require_startable(validate(parse_arguments(flags.split()).config, 1))
