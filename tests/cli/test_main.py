"""Test `megalite COMMAND` and `megalite config`."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from megalite.cli.main import COMMANDS, commands, main
from megalite.cli.model_commands import DATA_MERGE, PREPROCESS, TRAIN_TOKENIZER
from megalite.cli.tool_commands import CONFIG as config_main
from megalite.config.files import preset_names
from megalite.config.flags import full_help
from megalite.data.indexed_dataset import TOKEN_DTYPES
from megalite.preprocess.train_tokenizer import WORD_PATTERNS
from megalite.tokenizers.tiktoken_tokenizer import PATTERNS

Captured = pytest.CaptureFixture[str]


def test_usage_lists_the_commands(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("megalite 0.")


def test_flags_are_parsed_before_the_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = types.SimpleNamespace(run=lambda flags: seen.append((flags.folder, flags.png)))
    monkeypatch.setitem(sys.modules, "megalite.cli.runs", module)
    assert main(["runs", "a", "--png", "b"]) == 0
    assert seen == [(Path("a"), Path("b"))]
    module.run = lambda flags: 3
    assert main(["runs", "a"]) == 3


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupt(argument: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("importlib.import_module", interrupt)
        assert main(["runs", "a"]) == 130
    monkeypatch.setitem(sys.modules, "megalite.cli.runs", types.SimpleNamespace(run=interrupt))
    assert main(["runs", "a"]) == 130
    assert capsys.readouterr().err == "interrupted\ninterrupted\n"


HELP_WITHOUT = """
import sys

HEAVY = {"torch", "transformers", "matplotlib", "pyarrow", "triton", "scipy"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise AssertionError(f"{name} must not be imported for help")

sys.meta_path.insert(0, Blocker())
from megalite.cli.main import main

sys.exit(any([main([command, "--help"]) for command in sys.argv[1:]]))"""


def test_help_imports_nothing_heavy() -> None:
    """Help takes a fraction of a second; importing torch would take three seconds."""
    done = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT, *COMMANDS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"megalite {command}" in done.stdout for command in COMMANDS)


def test_config_show(capsys: Captured) -> None:
    assert config_main(["--show", "--preset", "gpt2-124m", "--tp", "2", "--world-size", "4"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["parallel"]["tp"], shown["parallel"]["dp"], shown["model"]["num_layers"]) == (2, 2, 12)
    assert config_main(["--show", "--preset", "gpt2-124m", "--tp", "2", "--world-size", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown


def test_config_explain(capsys: Captured) -> None:
    assert config_main(["--explain", "--preset", "gpt2-124m", "--lr", "0.5"]) == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["num_layers"] == ["12", "preset gpt2-124m"]
    assert rows["lr"] == ["0.5", "flag --lr"]
    assert rows["dp"] == ["1", "derived"]
    assert "tp" not in rows
    assert config_main(["--explain", "--lr", "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lr"] == {"value": 0.5, "source": "flag --lr"}


def test_config_tables(capsys: Captured) -> None:
    assert config_main(["--presets"]) == 0
    assert capsys.readouterr().out.split() == preset_names()
    assert config_main([]) == 0
    assert capsys.readouterr().out.startswith("usage: megalite config [SETTINGS ...]")
    assert config_main(["--help-all"]) == 0
    assert "--tensor-model-parallel-size N" in capsys.readouterr().out


def test_help_has_at_most_110_columns() -> None:
    for command in commands():
        texts = [
            command.help() if command.parses else "",
            full_help(command.name) if command.settings is not None else "",
        ]
        wide = [line for text in texts for line in text.splitlines() if len(line) > 110]
        assert wide == [], command.name


def test_choices_repeated_in_help() -> None:
    """The flags repeat the choices, because help imports neither numpy nor the tokenizers."""
    assert DATA_MERGE.spellings["--dtype"].choices == tuple(known.name for known in TOKEN_DTYPES.values())
    assert TRAIN_TOKENIZER.spellings["--pattern"].choices == tuple(WORD_PATTERNS)
    pattern = PREPROCESS.spellings["--tiktoken-pattern"]
    assert f": {', '.join(PATTERNS)}, or a regex" in pattern.help
