"""Test shell completion with bash itself, and with zsh if it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megalite.cli.main import main


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def completed(path: Path, *words: str) -> list[str]:
    """Return bash's completions of the last word."""
    line = " ".join(f"'{word}'" for word in words)
    asks = f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _megalite; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc", "-c", asks], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("bash", tmp_path, capsys)
    assert completed(path, "megalite", "pla") == ["plan", "plan-fit", "plan-chain"]
    assert completed(path, "megalite", "data", "") and "merge" in completed(path, "megalite", "data", "me")
    assert completed(path, "megalite", "train", "--pipeline-model-parallel-s") == ["--pipeline-model-parallel-size"]
    assert completed(path, "megalite", "train", "--tp", "2", "--optimizer", "ad") == ["adam"]
    assert completed(path, "./pretrain_gpt.py", "--no-check-for-n") == ["--no-check-for-nan-in-loss-and-grad"]
    assert "gpt2-124m" in completed(path, "megalite", "plan", "--preset", "gpt2")
    assert completed(path, "megalite", "completion", "z") == ["zsh"]
    assert completed(path, "megalite", "runs", "--") == ["--help", "--html", "--png", "--json"]
    assert completed(path, "megalite", "train", "--config", "x") == [], "files, by -o default"
    assert completed(path, "megalite", "nothing", "--") == completed(path, "megalite", "--x") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_completion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("zsh", tmp_path, capsys)
    asks = f"autoload -U compinit && compinit -u; source {path}; emulate sh; COMP_WORDS=(megalite runs --h); COMP_CWORD=2; "
    done = subprocess.run(
        ["zsh", "-f", "-c", asks + "_megalite; echo ${COMPREPLY[@]}"], capture_output=True, text=True, timeout=60
    )
    assert "--help" in done.stdout and "--html" in done.stdout and "parse error" not in done.stderr
