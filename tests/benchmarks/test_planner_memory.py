"""The memory benchmark: cases of one rank, and the paper's closed forms beside its figure and our count."""

import pytest

from benchmarks.planner.memory import (
    FIGURE_1,
    GPTShape,
    Recompute,
    first_rank,
    layer_bytes,
    measured_rows,
    published_model,
    published_rows,
)
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.partition.activations import layer_activation_bytes


@pytest.mark.parametrize("name", ["gpt, dropout, core_attn recomputed", "experts, moe recomputed"])
def test_real_runs_hold_what_was_predicted(name: str) -> None:
    (row,) = measured_rows(None, [name])
    assert row["predicted_state_bytes"] == row["state_bytes"]
    assert row["predicted_activation_bytes"] == pytest.approx(row["activation_bytes"], rel=0.02)
    assert abs(row["error"]) < 0.002


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_our_count_is_theirs_for_their_model(recompute: Recompute, sequence_parallel: bool) -> None:
    shape = GPTShape(layers=4, hidden=64, heads=4, sequence=32, micro_batch=3, tp=2)
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 3 --vocab-size 512 "
        f"--tp 2 --bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --recompute-granularity {recompute}"
    )
    flags += " --sequence-parallel" if sequence_parallel else ""
    config = validate(parse_arguments(flags.split()).config, 2)
    theirs = layer_bytes(shape, sequence_parallel=sequence_parallel, recompute=recompute)
    assert layer_activation_bytes(config) == theirs
    full = layer_bytes(shape, sequence_parallel=sequence_parallel, recompute="full")
    assert full == 2 * 32 * 3 * 64


def test_the_figure_to_a_hundredth_of_a_gibibyte() -> None:
    for row in published_rows():
        assert abs(row["form"] - row["published"]) < 0.01
        # We count more: norms, biases, embedding and head.
        assert row["form"] <= row["counted"] < 1.12 * row["form"]


def test_what_is_counted_is_the_first_rank() -> None:
    shape, batch, _ = FIGURE_1["175B"]
    plain, selective = (first_rank(published_model(shape, batch, plain)) for plain in (True, False))
    assert plain.parameter_bytes == selective.parameter_bytes
    assert plain.activation_bytes > 5 * selective.activation_bytes
