"""Resume a real checkpoint without model settings, with and without `--use-checkpoint-args`."""

from pathlib import Path

import pytest

from megalite.cli.train import main

COMMON = "--mock-data --micro-batch-size 1 --global-batch-size 2 --log-interval 1 --device cpu"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 64 --swiglu"


def test_model_settings_come_from_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = (
        f"{COMMON} {MODEL} --train-iters 2 --save-interval 2 --save {tmp_path}",
        f"{COMMON} --train-iters 3 --load {tmp_path} --use-checkpoint-args",
        f"{COMMON} --train-iters 3 --load {tmp_path} --vocab-size 64 --swiglu",
    )
    for number, line in enumerate(lines):
        assert main(line.split()) == 0
        out = capfd.readouterr().out
        assert number == 0 or ("step 3/3" in out and "step 1/3" not in out)
