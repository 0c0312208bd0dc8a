"""Small runs of current models on real text, resumed on another layout, have the losses of one rank."""

import pytest

from tests.e2e.forked import train_forked
from tests.e2e.programs import Corpus, losses

pytestmark = pytest.mark.e2e

STEPS, SWITCH = 6, 3
SMALL = f"--precision fp64 --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --save-interval {SWITCH} "
SMALL += "--log-interval 1 --eval-interval 6 --eval-iters 1 --num-layers 4 --make-vocab-size-divisible-by 8"

RUNS = {
    "latent attention, experts balanced by a bias, a second token": (
        "experts",
        "--seq-length 64",
        (4, "--pp 2 --ep 2 --use-distributed-optimizer"),
        (2, "--tp 2 --etp 1 --ep 2 --sequence-parallel"),
    ),
    "layers with a window and layers without, each with another RoPE, over a divided sequence": (
        "quickstart",
        "--position-embedding-type rope --rotary-base-local 1000 --sliding-window 24 --window-attn-skip-freq 2 "
        "--reset-attention-mask",
        (4, "--tp 2 --cp 2"),
        (2, "--cp 2 --cp-comm-type allgather --context-parallel-load-balancer area"),
    ),
    "ZeRO-3 in a pipeline, states and activations in host memory, a blend for each split": (
        "shakespeare",
        "--lr-warmup-iters 1 --train-data-path 0.3 {data} 0.7 {data} --valid-data-path {data} {data} --test-data-path 1 {data}",
        (4, "--pp 2 --vpp 2 --dp-strategy fully-sharded --optimizer-cpu-offload --cpu-offloading-num-layers 1"),
        (2, "--cp 2"),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_after_resume_on_another_layout_equal_one_rank(
    name: str, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> None:
    example, model, *layouts = RUNS[name]
    base = tmp_path_factory.mktemp("run")
    switched, whole = base / "switched", base / "whole"

    def words(folder: object) -> list[str]:
        resume = f"--run-dir {folder} --load {folder}/checkpoints --fresh-if-missing"
        data = corpus.flags[4:] if "{data}" in model else corpus.flags
        line = f"--config examples/{example}/run.yaml {SMALL} {model} {resume}"
        return line.format(data=corpus.prefix).split() + data

    for (ranks, layout), stop in zip(layouts, ([f"--exit-interval={SWITCH}"], []), strict=True):
        train_forked(ranks, *words(switched), *layout.split(), *stop, seconds=240).require_success()
    train_forked(1, *words(whole), seconds=240).require_success()
    expected = losses(whole)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert expected[-1][1] < expected[0][1]
    assert losses(switched) == [(step, pytest.approx(loss, rel=1e-9)) for step, loss in expected]
