"""The paper's closed forms give the paper's figure, and our count term by term gives theirs."""

import pytest

from benchmarks.planner.memory import GPTShape, Recompute, activation_bytes, layer_bytes, parameter_and_optimizer_bytes
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.partition.activations import layer_activation_bytes

# Korthikanti et al. 2022, figure 1, GiB: parameters and optimizer, activations with tensor parallelism alone, and with
# sequence parallelism and selective recomputation.
FIGURE_1 = [
    (GPTShape(layers=48, hidden=6144, heads=64, sequence=2048, micro_batch=4, tp=8), 45.56, 59.25, 9.56),
    (GPTShape(layers=96, hidden=12288, heads=96, sequence=2048, micro_batch=1, tp=8, pp=8, vpp=3), 45.56, 66.84, 12.35),
    (
        GPTShape(layers=105, hidden=20480, heads=128, sequence=2048, micro_batch=1, tp=8, pp=35, vpp=3),
        31.64,
        114.02,
        23.08,
    ),
    (GPTShape(layers=128, hidden=25600, heads=160, sequence=2048, micro_batch=1, tp=8, pp=64), 32.96, 131.25, 26.56),
]


@pytest.mark.parametrize(("shape", "state", "without", "selective"), FIGURE_1)
def test_figure_1(shape: GPTShape, state: float, without: float, selective: float) -> None:
    found = (
        parameter_and_optimizer_bytes(shape),
        activation_bytes(shape, sequence_parallel=False, recompute="none"),
        activation_bytes(shape, sequence_parallel=True, recompute="selective"),
    )
    for value, published in zip(found, (state, without, selective), strict=True):
        # Published in two digits.
        assert value / 2**30 == pytest.approx(published, abs=0.006)


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
