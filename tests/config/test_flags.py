"""The command line: spellings, precedence, provenance and errors."""

from pathlib import Path

import pytest
import yaml

from megalite.config.data import DATASETS
from megalite.config.describe import Setting, replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.megatron import DERIVED, FROM_VALUE, SHORTHANDS, WORDS
from megalite.config.megatron_flags import REFUSED, known_flags
from megalite.config.run import RunConfig
from megalite.config.strategies import ALIASES
from tests.config.rows import lines, parts_of, says
from tests.support.plugins import registered

EXAMPLES = {int: "3", float: "0.25", str: "x"}


def changed(flags: str) -> dict[str, object]:
    """Return the settings that differ from the defaults."""
    default = values_of(RunConfig())
    return {k: v for k, v in values_of(parse_arguments(flags.split()).config).items() if v != default[k]}


def test_every_spelling_of_each_setting() -> None:
    with registered(DATASETS, EXAMPLES[str], lambda split, config, tokenizer: None):
        for name, setting in settings().items():
            every_spelling(setting, "json" if name == "imports" else EXAMPLES.get(setting.type, ""))


def every_spelling(setting: Setting, example: str) -> None:
    name = setting.name
    for flag in setting.flags:
        if setting.type is bool:
            assert changed(flag if not setting.default else "--no-" + flag[2:]) == {name: not setting.default}
            continue
        others = [choice for choice in setting.choices if choice != setting.default]
        word = others[0] if others else setting.default if setting.choices else example
        expected = word if setting.type is str else setting.type(word)
        invocation = parse_arguments([flag, word])
        assert values_of(invocation.config)[name] == ([expected] if setting.is_list else expected), name
        assert invocation.provenance[name] == f"flag {flag}"
        assert invocation.explicit == {name}
        assert parse_arguments([f"{flag}={word}"]).config == invocation.config, name


@pytest.mark.parametrize("row", lines("flag_values"))
def test_values_of_flags(row: str) -> None:
    flags, _, expected = row.partition("=>")
    assert changed(flags) == yaml.safe_load(f"{{{expected}}}")


def test_shorthand_flags() -> None:
    for flag, sets in SHORTHANDS.items():
        values = values_of(parse_arguments([flag]).config)
        assert {name: values[name] for name in sets} == sets


def test_none_unsets() -> None:
    config = parse_arguments(["--preset", "gpt2-124m", "--vocab-size", "none"]).config
    assert config.model.vocab_size is None
    assert config.model.num_layers == 12


def test_known_foreign_flags_are_accepted_or_refused() -> None:
    """Each known flag with the right number of words: accepted flags give notes, all refused ones are in one error."""
    accepted: list[str] = []
    refused: list[str] = []
    for flag, known in known_flags().items():
        example = "" if known.values is None else "7" if known.values in ("*", ".*") else known.values.split("|")[0]
        example = "hybrid_layer_specs hybrid_stack_spec" if flag == "--spec" else example
        words = [flag, *example.replace("0?\\.0*", "0.0").replace("0?\\.0050*", "0.005").split()]
        (refused if known.kind == REFUSED else accepted).extend(words)
    found = parse_arguments(accepted)
    assert found.config == RunConfig()
    taken = {note.what.split()[0]: (note.kind, note.why) for note in found.notes}
    assert taken == {flag: (known.kind, known.why) for flag, known in known_flags().items() if known.kind != REFUSED}
    with pytest.raises(ConfigError) as error:
        parse_arguments(refused)
    said = dict.fromkeys(problem.split()[0] for problem in error.value.problems if " is refused: " in problem)
    assert list(said) == [flag for flag, known in known_flags().items() if known.kind == REFUSED]


def test_one_line_names_all_accepted_flags() -> None:
    flags = "--use-mcore-models --no-rope-fusion --no-mmap-bin-files --transformer-impl local --moe-router-topk 4 --fp8-amax-history-len 16"
    assert parse_arguments(flags.split()).remarks == [
        "already so: --use-mcore-models --transformer-impl; no effect here: --no-rope-fusion --no-mmap-bin-files --moe-router-topk "
        "(megalite port says why)",
        "--fp8-amax-history-len 16: fp8 scales come from the current tensors, without a history; first and last "
        "layer, experts and head are in bf16",
    ]
    assert parse_arguments(["--tp", "1"]).remarks == []


def test_files_accept_the_same_flags(tmp_path: Path) -> None:
    """A switch that a file turns off has no effect."""
    file = tmp_path / "run.yaml"
    file.write_text("use_mcore_models: true\nno_rope_fusion: false\nqk-l2-norm: null\ntrain_sync_interval: 4\n")
    assert [note.what for note in parse_arguments(["--config", str(file)]).notes] == [
        "--use-mcore-models",
        "--train-sync-interval",
    ]
    file.write_text("qk_l2_norm: true\ncuda_graph_scope: [a, b]\nfim_data: true\n")
    with pytest.raises(ConfigError) as error:
        parse_arguments(["--config", str(file)])
    assert [problem.split(" is refused")[0] for problem in error.value.problems] == [
        f"file {file}: qk_l2_norm",
        f"file {file}: fim_data",
    ]


def test_shape_from_a_checkpoint_is_used() -> None:
    shape = {"num_layers": 8, "hidden_size": 64, "hidden_dropout": 0.5, "of_a_later_version": 1}
    flags = ["--load", "ckpt", "--use-checkpoint-args", "--num-layers", "4", "--hidden-size", "64"]
    invocation = parse_arguments(flags, shape=lambda folder, step: shape if (folder, step) == ("ckpt", None) else None)
    assert invocation.config.model.num_layers == 8 and invocation.config.model.hidden_dropout == 0.0
    assert invocation.remarks == ["num_layers: flag --num-layers sets 4; the checkpoint's 8 overrides it"]
    without = parse_arguments(flags, shape=lambda folder, step: None)
    assert without.config.model.num_layers == 4
    assert [note.why for note in without.notes] == ["ckpt has no checkpoint: the settings are used"]


def test_tables_of_flags_do_not_overlap() -> None:
    own = {flag for setting in settings().values() for flag in setting.flags}
    negative = {"--no-" + flag[2:] for setting in settings().values() if setting.type is bool for flag in setting.flags}
    tables = [own, negative, set(SHORTHANDS), set(WORDS), set(FROM_VALUE), set(known_flags())]
    tables.append(set(DERIVED) - {"--moe-layer-freq"})  # a setting, except for its lists
    assert len(set().union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize(("flags", "parts"), parts_of(lines("flag_errors")))
def test_errors_of_flags(flags: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(flags.split())
    assert says(str(error.value), parts)


def test_precedence_and_provenance(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: {num_layers: 5, hidden_size: 96}\nlr: 0.5\nseed: 7\n")
    second.write_text("hidden_size: 192\nseed: 1234\n")
    flags = f"--preset gpt2-124m --config {first} --config {second} --lr 0.25"
    invocation = parse_arguments(flags.split())
    values = values_of(invocation.config)
    names = ("num_attention_heads", "num_layers", "hidden_size", "lr", "seed", "tp")
    assert [values[name] for name in names] == [12, 5, 192, 0.25, 1234, 1]
    assert [invocation.provenance[name] for name in names] == [
        "preset gpt2-124m",
        f"file {first}",
        f"file {second}",
        "flag --lr",
        f"file {second}",
        "default",
    ]
    # The later file restates the default seed; preset values are not explicit.
    assert invocation.explicit == {"num_layers", "hidden_size", "lr"}


def test_derived_flag_uses_other_levels_and_can_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("num_layers_per_virtual_pipeline_stage: 3\npp: 2\n")
    assert parse_arguments(["--preset", "gpt2-124m", "--config", str(file)]).config.parallel.vpp == 2
    assert parse_arguments(["--preset", "gpt2-124m", "--config", str(file), "--vpp", "1"]).config.parallel.vpp == 1


def test_run_options() -> None:
    invocation = parse_arguments(["--dry-run", "--json", "--world-size", "16"])
    assert (invocation.dry_run, invocation.json, invocation.world_size) == (True, True, 16)
    assert invocation.config == RunConfig()
    found = [parse_arguments([flag]).help for flag in ("--help", "-h", "--help-all")]
    assert found == ["basic", "basic", "all"]
    assert parse_arguments(["--nonsense", "--help"]).help == "basic"
    assert parse_arguments(["--version"]).version


@pytest.mark.parametrize(
    ("flags", "vpp"),
    [
        ("--pp 2", 1),
        ("--pp 2 --pipeline-schedule zb-v", 2),
        ("--pp 2 --pipeline-schedule dualpipe-v --vpp 1", 1),
        ("--pp 2 --pipeline-schedule zb-h1", 1),
        ("--pp 2 --pipeline-model-parallel-layout Et|t|t|tL", 2),
        ("--pp 2 --pipeline-layout Et|t|t|tL --vpp 4", 4),
        ("--pp 2 --pipeline-layout Et|t|tL", 1),
        ("--pp 2 --pipeline-layout Et|tL --pipeline-schedule zb-v", 1),
        ("--pipeline-schedule zb-v", 1),
    ],
)
def test_default_of_vpp(flags: str, vpp: int) -> None:
    assert parse_arguments(flags.split()).config.parallel.vpp == vpp


def test_vpp_follows_the_final_schedule(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("parallel: {pp: 4, pipeline_schedule: zb-v}\n")
    assert parse_arguments(["--config", str(path)]).config.parallel.vpp == 2
    other = parse_arguments(["--config", str(path), "--pipeline-schedule", "1f1b"])
    assert other.config.parallel.vpp == 1 and "vpp" not in other.explicit


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_of_strategies(alias: str, tmp_path: Path) -> None:
    """Aliases work in flags and files, and a remark names their settings."""
    file = tmp_path / "run.yaml"
    file.write_text(f"parallel: {{dp_strategy: {alias}}}\n")
    meant = ALIASES[alias]
    said = ", ".join(f"{setting} {value}" for setting, value in meant.items())
    for words in (["--dp-strategy", alias], ["--config", str(file)]):
        found = parse_arguments(words)
        assert found.config == replace(RunConfig(), **meant)
        assert found.remarks == [f"dp_strategy {alias}: {said} here"]
    again = parse_arguments(["--config", str(file), "--dp-strategy", "gossip"])
    assert again.config.parallel.dp_strategy == "gossip"


def test_alias_with_a_setting_that_it_sets() -> None:
    with pytest.raises(ConfigError, match="shard_gradients is given twice"):
        parse_arguments(["--dp-strategy", "zero2", "--no-shard-gradients"])
