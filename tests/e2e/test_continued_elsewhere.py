"""A small run of today's models on real text, stopped and continued on another layout, is that of one rank."""

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.programs import Corpus, losses

pytestmark = pytest.mark.e2e

STEPS, SWITCH = 6, 3
SMALL = f"--precision fp64 --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --save-interval {SWITCH} "
SMALL += "--log-interval 1 --eval-interval 6 --eval-iters 1 --num-layers 4 --make-vocab-size-divisible-by 8"
LAYOUTS = (
    (8, "--tp 2 --pp 2 --ep 2 --sequence-parallel --use-distributed-optimizer"),
    (2, "--tp 2 --etp 1 --ep 2 --sequence-parallel"),
)


def test_a_run_continues_on_another_layout(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With latent attention, experts balanced by a bias, and a second token."""
    base = tmp_path_factory.mktemp("run")
    switched, whole = base / "switched", base / "whole"

    def words(folder: object) -> list[str]:
        resume = f"--run-dir {folder} --load {folder}/checkpoints --fresh-if-missing"
        return f"--config examples/experts/run.yaml {SMALL} --seq-length 64 {resume}".split() + corpus.flags

    for (ranks, layout), stop in zip(LAYOUTS, ([f"--exit-interval={SWITCH}"], []), strict=True):
        train_forked(ranks, *words(switched), *layout.split(), *stop, seconds=240).require_success()
    train_forked(1, *words(whole), seconds=240).require_success()
    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert expected[-1][1] < expected[0][1]
    assert losses(switched) == [(step, pytest.approx(loss, rel=1e-9)) for step, loss in expected]
