"""Token files in YAML, in Megatron-LM's files and on the command line give the same words."""

import json
from pathlib import Path

import pytest

from megalite.config.data import PATH_SETTINGS, DataConfig, parse_data_path
from megalite.config.errors import ConfigError
from megalite.config.files import dump, level_from_text
from megalite.config.flags import parse_arguments
from megalite.config.merge import merge
from megalite.config.run import RunConfig
from megalite.config.validate import validate

BLEND = ["0.3", "a", "0.7", "b"]


def test_registered_dataset_may_read_text_paths() -> None:
    """Text is tokenized only if no registered dataset reads it."""
    assert DataConfig(data_path=["1", "a.txt", "2", "b"]).texts == ["a.txt"]
    assert DataConfig(data_path=["a.txt"], dataset="mine").texts == []


def parse(text: str) -> RunConfig:
    return merge([level_from_text(text, "file run.yaml")]).config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", ["a"]),
        ("0.3 a 0.7 b", BLEND),
        ("[0.3, a, 0.7, b]", BLEND),
        ("['0.3', a, '0.7', b]", BLEND),
        ("{a: 0.3, b: 0.7}", BLEND),
        ("{a: '0.30', b: 1}", ["0.30", "a", "1", "b"]),
        ("[0.1, a, 1.0e-7, b, 3, c]", ["0.1", "a", "1e-07", "b", "3", "c"]),
        ("['my texts/a', b]", ["my texts/a", "b"]),
        ("{my texts/a: 2, b: 1}", ["2", "my texts/a", "1", "b"]),
        ("{2024: 2, b: 1}", ["2", "2024", "1", "b"]),
        ("[]", []),
    ],
)
def test_yaml_forms_of_data_paths(text: str, words: list[str]) -> None:
    config = parse("".join(f"{name}: {text}\n" for name in PATH_SETTINGS))
    assert [getattr(config.data, name) for name in PATH_SETTINGS] == [words] * len(PATH_SETTINGS)
    assert parse("data:\n" + "".join(f"  {name}: {text}\n" for name in PATH_SETTINGS)) == config == parse(dump(config))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true", "takes prefixes of token files such as [a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b', got True"),
        ("3", "takes prefixes of token files such as [a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b', got 3"),
        ("[a, true]", "takes weights and prefixes such as [a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b', got the "
         "bool True among them"),
        ("[a: 1]", "takes weights and prefixes such as [a, b], [0.3, a, 0.7, b], {a: 0.3, b: 0.7} or '0.3 a 0.7 b', got the "
         "dict {'a': 1} among them"),
        ("{a: x}", "takes a number as the weight of a, such as 0.3, got 'x'"),
        ("{a: '1_0'}", "takes a number as the weight of a, such as 0.3, got '1_0'"),
        ("{a: true}", "takes a number as the weight of a, such as 0.3, got True"),
        ("{a: null}", "takes a number as the weight of a, such as 0.3, got None"),
        ("{a: [1]}", "takes a number as the weight of a, such as 0.3, got [1]"),
        ("{}", "is empty; leave it out or give it a value"),
        ("' '", "is empty; leave it out or give it a value"),
        ("['']", "is empty; leave it out or give it a value"),
        ("null", "cannot be null; its default is []"),
    ],
)  # fmt: skip
def test_other_yaml_forms_are_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"train_data_path: {text}\n")
    assert str(error.value) == f"file run.yaml: train_data_path {message}"


def test_repeated_prefix_in_a_mapping_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a is given twice, on lines 2 and 3"):
        parse("data_path:\n  a: 1\n  a: 2\n")
    for text in ("{a: 1, a: 2}", "{1.0: 2, 1: 3}"):
        with pytest.raises(ConfigError, match=r"(a|1) is given twice, on line 1; keep one of them"):
            parse(f"data_path: {text}\n")


def test_file_of_words(tmp_path: Path) -> None:
    path = tmp_path / "paths.txt"
    path.write_text("0.3 a\n0.7 b\n")
    assert parse_arguments(["--data-args-path", str(path)]).config.data.data_path == BLEND
    assert parse(f"data_args_path: {path}\n").data.data_path == BLEND
    invocation = parse_arguments(["--data-args-path", str(path)])
    assert invocation.provenance["data_path"] == "flag --data-args-path"
    assert "data_path" in invocation.explicit
    with pytest.raises(ConfigError, match="data_path is given twice"):
        parse_arguments(["--data-args-path", str(path), "--data-path", "c"])


def test_file_of_splits(tmp_path: Path) -> None:
    path = tmp_path / "paths.json"
    path.write_text(json.dumps({"train": BLEND, "valid": ["c"], "test": None}))
    for data in (
        parse_arguments([f"--per-split-data-args-path={path}"]).config.data,
        parse(f"per_split_data_args_path: {path}\n").data,
    ):
        assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (BLEND, ["c"], [])


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("--data-args-path", b" \n", " is empty; write the words of --data-path in it, e.g. 0.3 a 0.7 b"),
        ("--data-args-path", b"\xff", " cannot be read: it is not UTF-8 text"),
        ("--data-args-path", None, " does not exist"),
        ("--per-split-data-args-path", b"0.3 a", " is not JSON: "),
        ("--per-split-data-args-path", b"[" * 100_000, " is not JSON: "),
        ("--per-split-data-args-path", b'["a"]', " must hold paths for train, valid and test, e.g. "),
        ("--per-split-data-args-path", b'{"train": ["a"], "train": ["b"]}', ": train is given twice; keep one of them"),
        ("--per-split-data-args-path", b"{}", " must hold paths for train, valid and test, e.g. "),
        ("--per-split-data-args-path", b'{"train": ["a"], "val": ["b"]}', " must hold paths for train, "),
        ("--per-split-data-args-path", b'{"train": 3}', ": train takes prefixes of token files such as "),
    ],
)
def test_empty_files_are_errors(tmp_path: Path, flag: str, content: bytes | None, message: str) -> None:
    path = tmp_path / "paths"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        parse_arguments([flag, str(path)])
    assert str(error.value).startswith(f"{flag} {path}{message}")


def test_flag_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"--data-args-path takes one value, got none"):
        parse_arguments(["--data-args-path"])
    with pytest.raises(ConfigError, match=r"file run\.yaml: data_args_path takes the path of a file, got 3"):
        parse("data_args_path: 3\n")


def test_weights() -> None:
    assert parse_data_path([]) == []
    assert parse_data_path(["a"]) == [(None, "a")]
    assert parse_data_path(["a", "b"]) == [(None, "a"), (None, "b")]
    assert parse_data_path(["1_0", "b"]) == [(None, "1_0"), (None, "b")]
    assert parse_data_path(["0.3", "a", "0.7", "b"]) == [(0.3, "a"), (0.7, "b")]
    assert parse_data_path(["1", "2"]) == [(1.0, "2")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["0.3", "a", "b"], "'0.3' looks like a weight"),
        (["0.3", "a", "x", "b"], "'0.3' looks like a weight"),
        (["2023"], "'2023' looks like a weight.* a token file of this name is ./2023"),
        (["0", "a", "1", "b"], "weight 0.0 of a must be a finite number above 0"),
        (["-1", "a", "1", "b"], "weight -1.0 of a must be a finite number above 0"),
        (["inf", "a"], "weight inf of a must be a finite number above 0"),
        (["nan", "a"], "weight nan of a must be a finite number above 0"),
    ],
)
def test_bad_weights_are_found_without_files(entries: list[str], message: str) -> None:
    for name in PATH_SETTINGS[:2]:
        data = DataConfig(**{name: entries})
        with pytest.raises(ConfigError, match=f"{name}: {message}"):
            validate(RunConfig(data=data), 1)


def test_bad_split_is_found_without_files() -> None:
    with pytest.raises(ConfigError, match="'9_0,10' is not a list of numbers"):
        validate(RunConfig(data=DataConfig(data_path=["a"], split="9_0,10")), 1)


@pytest.mark.parametrize("key", ["data_args_path", "per_split_data_args_path"])
def test_file_of_paths_is_outside_sections(key: str) -> None:
    with pytest.raises(ConfigError, match=f"file run.yaml, data: {key} is not part of a section; write it at the top"):
        parse(f"data: {{{key}: paths.txt}}\n")
