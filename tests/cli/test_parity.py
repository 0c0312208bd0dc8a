"""Test `megalite parity`: output, exit status and refused input."""

import json
import shlex

import pytest

from megalite.cli.main import main
from megalite.cli.tool_commands import PARITY
from megalite.config.errors import ConfigError
from tests.support.ranks import forked_pools

Captured = pytest.CaptureFixture[str]
SMALL = "parity --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 40"


def run(line: str) -> int:
    return main(line.split())


@pytest.mark.timeout(600)
def test_equal_layout(capsys: Captured) -> None:
    assert run(f"{SMALL} --tp 2 --dp 1 --steps 2 --bf16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks = tp 2 x cp 1 x dp 1 x pp 1 (vpp 1) against one rank; fp64, 2 steps")
    assert lines[1].startswith("shrunk: ") and "precision bf16 -> fp64" in lines[1]
    table = [line.split() for line in lines[4:] if line]
    assert [row[:3] for row in table[:3]] == [["step", "1", "loss"], ["gradient", "norm", table[1][2]], table[2][:3]]
    assert table[2][0] == "gradient" and table[2][-1].startswith(("layers.", "embedding.", "final_norm"))
    assert lines[-1].startswith("SAME: worst difference ") and lines[-1].endswith("tolerance 1e-09")


@pytest.mark.timeout(600)
def test_difference_is_reported_as_json(capsys: Captured) -> None:
    with forked_pools():
        assert run(f"{SMALL} --pp 2 --dp 1 --tolerance 0 --json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is False and found["verdict"].startswith("DIFFERENT: first the ")
    assert (found["world_size"], found["steps"], found["tolerance"]["tensor"]) == (2, 3, 0.0)
    assert [line["what"] for line in found["lines"]] == [
        *(["loss", "gradient norm", "gradient"] * 3),
        *("weight", "evaluation loss"),
    ]
    assert max(line["difference"] for line in found["lines"]) < 1e-9
    assert found["config"]["training"]["precision"] == "fp64"
    assert found["shrunk"]["global_batch_size"][0] is None


@pytest.mark.timeout(600)
def test_fuzzer_counts_and_repeats_failures(capsys: Captured) -> None:
    with forked_pools():
        assert run("parity --fuzz 0 --seed 6 --steps 1") == 0
        first = capsys.readouterr().out
        assert first.startswith("1 layouts in ") and first.endswith("with seed 6: 0 different from one rank\n")
        assert run("parity --fuzz 0 --seed 6 --steps 1 --tolerance 0") == 1
        line, verdict, count = capsys.readouterr().out.splitlines()
        assert verdict.startswith("  DIFFERENT: first the ")
        assert count.endswith("1 different from one rank")
        command, *arguments = shlex.split(line)
        assert command == "megalite"
        assert main(arguments) == 1  # the line repeats the failure
        assert f"  {capsys.readouterr().out.splitlines()[-1]}" == verdict


def test_batch_refused_by_the_schedule_is_an_error(capsys: Captured) -> None:
    vee = "--pp 2 --vpp 2 --dp 1 --pipeline-schedule dualpipe-v"
    assert run(f"{SMALL.replace(' 2 ', ' 4 ', 1)} {vee} --global-batch-size 3") == 2
    assert "needs 4 microbatches or more but has 3" in capsys.readouterr().err


def test_flags_of_parity_are_not_settings() -> None:
    found = PARITY.parse(["--tp", "2", "--steps=5", "--pipeline-layers", "1", "3", "--tolerance", "1e-6"])
    assert (found.steps, found.tolerance, found.fuzz) == (5, 1e-6, None)
    assert found.invocation.config.parallel.tp == 2
    assert found.invocation.config.parallel.pipeline_layers == [1, 3]
    with pytest.raises(ConfigError, match="--fuzz: takes a number"):
        PARITY.parse(["--fuzz", "inf"])
