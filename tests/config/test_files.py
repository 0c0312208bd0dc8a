"""YAML files: keys, types, errors; `dump` and `load` are inverses."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megalite.config.describe import Setting, replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import dump, level_from_text, load
from megalite.config.merge import merge
from megalite.config.registry import Registry
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from tests.config.rows import lines, parts_of, says


def parse(text: str) -> RunConfig:
    return merge([level_from_text(text, "file run.yaml")]).config


def changed(text: str) -> dict[str, object]:
    default = values_of(RunConfig())
    return {name: value for name, value in values_of(parse(text)).items() if value != default[name]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {num_layers: 4}\nparallel:\n  tp: 2\n", {"num_layers": 4, "tp": 2}),
        ("num_layers: 4\ntp: 2\n", {"num_layers": 4, "tp": 2}),
        ("tensor-model-parallel-size: 2\npipeline_model_parallel_size: 4\n", {"tp": 2, "pp": 4}),
        ("parallel: {tensor_model_parallel_size: 2}\n", {"tp": 2}),
        ("optimizer:\n  optimizer: adam\n  lr: 1e-4\n", {"lr": 1e-4}),
        ("optimizer: adam\nlr: 3\n", {"lr": 3.0}),
        ("train_samples: 1e6\n", {"train_samples": 1_000_000}),
        ("train_samples: 2.0\n", {"train_samples": 2}),
        ("pipeline_layers: [3, 1]\n", {"pipeline_layers": [3, 1]}),
        ("pipeline_layers: 3,1\n", {"pipeline_layers": [3, 1]}),
        ("data_path: [a, b]\nsplit: 969,30,1\n", {"data_path": ["a", "b"], "split": "969,30,1"}),
        (
            "bf16: true\nuse_distributed_optimizer: true\n",
            {"precision": "bf16", "dp_strategy": "distributed-optimizer"},
        ),
        ("num_layers: 12\npp: 2\nnum-layers-per-virtual-pipeline-stage: 3\n", {"num_layers": 12, "pp": 2, "vpp": 2}),
        ("data_parallel_sharding_strategy: optim\n", {"dp_strategy": "distributed-optimizer"}),
        ("model:\ntraining: {}\nseed: 7\n", {"seed": 7}),
        ("dp: null\n", {}),
        ("recompute_granularity: none\n", {}),
        ("tp: 2\nparallel: {tp: 2}\n", {"tp": 2}),
    ],
)
def test_keys_of_files(text: str, expected: dict[str, object]) -> None:
    assert changed(text) == expected


@pytest.mark.parametrize(("text", "parts"), parts_of(lines("file_errors")))
def test_errors_of_files(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text.replace(r"\n", "\n"))
    assert says(str(error.value), parts)


def test_invalid_yaml_and_python_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"file run\.yaml is not YAML: .*line 1"):
        parse("a: [1\n")
    with pytest.raises(ConfigError, match=r"file run\.yaml is not YAML: could not determine a constructor"):
        parse("seed: !!python/object/apply:os.getpid []\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit_duration_in_mins: 1:30:00\n", "exit_duration_in_mins takes a number such as 0.1, got '1:30:00'"),
        ("train_iters: 1:30\n", "train_iters takes a whole number such as 4, got '1:30'"),
        ("num_layers: 0xffffffffffffffffffff\n", "num_layers takes a whole number below 2^63 such as 4, got 1208925819614629174706175"),
        (f"num_layers: {'9' * 10_000}\n", "num_layers takes a whole number below 2^63 such as 4, got '9999"),
        (f"num_layers: !!int {'9' * 10_000}\n", "is not YAML: a value does not match its type"),
        ("num_layers: !!int four\n", "is not YAML: a value does not match its type"),
        ("seed: 2024-13-45\n", "is not YAML: a value does not match its type"),
        ("model: 3\n", "model is a section and takes settings below it, such as `model: {num_layers: 2}`, got 3"),
    ],
)  # fmt: skip
def test_unusual_values(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(parse(text), 1)
    assert says in str(error.value) and len(str(error.value)) < 300


def test_numbers_in_yaml() -> None:
    expected = {"num_layers": 10, "seed": 255, "train_iters": 1000, "lr": 1.5e-5}
    assert changed("num_layers: 010\nseed: 0xff\ntrain_iters: 1_000\nlr: 1.5e-05\n") == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "zero", "folder"])
def test_pipes_and_devices_are_not_read(kind: str, tmp_path: Path) -> None:
    """Reading a pipe would wait for its writer, and /dev/zero has no end."""
    path = {"pipe": tmp_path / "pipe", "zero": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    says = "Is a directory" if kind == "folder" else "it is a pipe or device, not a file"
    with pytest.raises(ConfigError, match=f"config file {path} cannot be read: {says}"):
        load(path)
    with pytest.raises(ConfigError, match=f"data_args_path {path} cannot be read: {says}"):
        parse(f"data_args_path: {path}\n")


def test_alias_bomb_is_refused_with_a_short_message() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    bomb = "model: {num_layers: *a11}"
    with pytest.raises(ConfigError) as error:
        parse("\n".join(["training: {}", *lines, bomb, "exit_signals: [*a11]"]))
    assert len(error.value.problems) == 14 and max(map(len, error.value.problems)) < 300


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tp: 2\n")
    with pytest.raises(ConfigError) as error:
        load(tmp_path / "rum.yaml")
    assert str(error.value) == f"config file {tmp_path}/rum.yaml does not exist: did you mean {tmp_path}/run.yaml?"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run_dir: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read"):
        load(tmp_path / "latin.yaml")


def values(setting: Setting) -> st.SearchStrategy[object]:
    """Any value of the setting's type, including text that looks like numbers or YAML syntax."""
    text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1).filter(str.strip)
    odd = st.sampled_from(["none", "null", "1e5", "0x10", "yes", "1:30", "a: b", "- a", "#a", "'", "2024-01-01"])
    strategy: st.SearchStrategy[object] = {
        int: st.integers(-(2**63) + 1, 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: text | odd,
    }[setting.type]
    if setting.choices or isinstance(setting.legal, Registry):
        strategy = st.sampled_from(setting.choices) if setting.choices else st.nothing()
    if setting.name == "imports":
        strategy = st.sampled_from(["json", "math", "xml.dom"])
    if setting.is_list:
        strategy = st.lists(strategy, min_size=0)
    return strategy | st.none() if setting.optional else strategy


@hypothesis_settings(deadline=None, max_examples=20)
@given(st.fixed_dictionaries({}, optional={name: values(setting) for name, setting in settings().items()}))
def test_dump_and_load_round_trip(changes: dict[str, object]) -> None:
    config = replace(RunConfig(), **changes)
    assert parse(dump(config)) == config


def test_load_reads_a_file(tmp_path: Path) -> None:
    config = replace(RunConfig(), tp=3, run_dir="a b", pipeline_layers=[1, 1])
    (tmp_path / "run.yaml").write_text(dump(config))
    assert load(tmp_path / "run.yaml") == config
