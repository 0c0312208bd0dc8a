"""One error names everything that is wrong with flags and files, without consequential errors."""

from pathlib import Path

import pytest

from megalite.config.describe import replace, settings
from megalite.config.errors import ConfigError, Problems, Reported
from megalite.config.flags import parse_arguments
from megalite.config.rules.rule import rule_settings
from megalite.config.run import RunConfig
from megalite.config.validate import validate


def refused(flags: str, world_size: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        invocation = parse_arguments(flags.split(), world_size=world_size)
        validate(invocation.config, world_size or 1, invocation.explicit, startable=world_size is not None)
    return error.value.problems


def test_one_error_for_flags_and_files(tmp_path: Path) -> None:
    """One problem of each kind: unknown flag, key or choice, wrong type, out of range, a contradiction."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_layers: four, hiden_size: 64}\noptimizer: {lr: -1}\nseed: 3\nseed: 4\n")
    flags = f"--config {file} --vocab-size 64 --train-iter 3 --pp x --precision b16 --split 9,1,0 --mock-data"
    assert refused(flags, world_size=2) == (
        "unknown flag --train-iter: did you mean --train-iters? (--help-all lists all)",
        "--pp: pp takes a whole number such as 4, got 'x'",
        "--precision: precision cannot be 'b16': did you mean bf16? (one of fp32, bf16, fp16, fp64)",
        f"file {file}: seed is given twice, on lines 3 and 4; keep one of them",
        f"file {file}, model: num_layers takes a whole number such as 4, got 'four'",
        f"file {file}, model: unknown key hiden_size: did you mean hidden_size?",
        "lr is -1; it must be above 0, e.g. 0.001",
    )


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        # The wrong value is the only problem: rules that depend on it are skipped.
        ("--tp 0 --sequence-parallel", 1),
        ("--tpp 2 --sequence-parallel", 1),
        ("--num-attention-heads 0 --hidden-size 7", 1),
        ("--rampup-batch-size 4 --global-batch-size 7 --micro-batch-size 2", 2),
        ("--confg run.yaml --ep 2", 1),
        ("--config nowhere.yaml --seqence-parallel", 2),
        # Contradictions do not hide each other; all contradictions of one setting are named.
        ("--ep 2 --save-interval 5 --keep-every 7 --min-lr 1 --lr 0.1", 5),
        ("--optimizer sgd --adam-beta1 0.5 --adam-beta2 0.5 --muon-steps 3", 3),
        ("--num-layers 2 --pp 4", 2),
    ],
)
def test_number_of_problems(flags: str, problems: int) -> None:
    assert len(refused(flags)) == problems, refused(flags)


def test_missing_settings_are_listed_with_wrong_ones() -> None:
    found = refused("--lr -1 --tp 2", world_size=1)
    assert [text.split(";")[0].split(" is ")[0] for text in found] == [
        "lr",
        "world size 1",
        "the length of the run",
        "there",
    ]
    assert "--train-iters" not in str(refused("--train-iter 5", world_size=1)[1:])


def test_dry_run_lists_the_same_problems_as_the_run() -> None:
    assert refused("--dry-run --world-size 3 --tp 2 --lr fast") == (
        "--lr: lr takes a number such as 0.1, got 'fast'",
        "world size 3 is not a multiple of tp·pp·cp = 2·1·1 = 2; start 2 or 4 ranks, or choose tp, pp, cp with a product "
        "among 1, 3",
    )


def test_rules_do_not_fail_on_wrong_settings() -> None:
    """With any wrong setting, rules neither fail nor report consequences of it."""
    for name, setting in settings().items():
        problems = Problems()
        problems.add(f"{name} is wrong", name)
        validate(RunConfig(), 1, problems=problems)
        assert list(problems.found) == [f"{name} is wrong"]
        if setting.bounds is not None and not setting.is_list:
            low = max(setting.bounds.at_least, setting.bounds.above) - 1
            with pytest.raises(ConfigError) as error:
                validate(replace(RunConfig(), **{name: setting.type(low)}), 1, frozenset({name}))
            assert error.value.problems[0].startswith(f"{name} is ") and len(error.value.problems) == 1, name


def test_hidden_setting_cannot_be_read() -> None:
    seen = rule_settings(RunConfig(), wrong={"num_attention_heads", "tp"})
    assert seen.num_layers == seen.run.model.num_layers == 2
    for name in ("num_attention_heads", "head_size", "query_groups", "tp"):
        with pytest.raises(Reported):
            getattr(seen, name)
    with pytest.raises(Reported):
        _ = seen.run.parallel.tp


def test_one_problem_is_one_line_and_many_are_truncated() -> None:
    assert str(ConfigError("a")) == "a"
    assert str(ConfigError("a", "b")) == "there are 2 problems:\n- a\n- b"
    assert str(ConfigError(*map(str, range(99)))).splitlines()[-2:] == ["- 29", "- and 69 more"]


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--training.steps", "--train-iters"),
        ("--gradient_accumulation_steps", "--global-batch-size"),
        ("--activation-checkpointing", "--recompute-granularity"),
        ("--model-name-or-path", "--load or --preset"),
    ],
)
def test_names_of_other_frameworks(flag: str, meant: str, tmp_path: Path) -> None:
    """The error suggests megalite's name, and does not report settings that would be missing without it."""
    shown = flag.replace("_", "-")
    assert refused(f"{flag} 4") == (f"unknown flag {shown}: did you mean {meant}? (--help-all lists all)",)
    file = tmp_path / "run.yaml"
    file.write_text(f"{flag[2:]}: 4\n")
    (said,) = refused(f"--config {file}")
    name = meant.split()[0][2:].replace("-", "_")
    assert said == f"file {file}: unknown section or key {flag[2:]}: did you mean {name}?"


def test_values_of_other_frameworks() -> None:
    (said,) = refused("--dp-strategy zero-3")
    assert "dp_strategy cannot be 'zero-3': did you mean fully-sharded? (" in said
