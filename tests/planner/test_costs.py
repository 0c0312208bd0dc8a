"""What a recomputing backward costs beside twice the forward."""

import pytest

from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import layer_forward_flops
from megalite.partition.pipeline import _recompute_flops, plan_stages

LLAMA = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --vocab-size 128 "
    "--ffn-hidden-size 96 --swiglu --disable-bias-linear --position-embedding-type rope"
)
EXPERTS = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
PROJECTIONS = 2 * 2 * (3 * 64 * 64 + 64 * 64)  # Query, key, value and output of both layers, for a token


def config_of(line: str) -> RunConfig:
    return validate(parse_arguments(line.split()).config, 1)


def again(line: str) -> int:
    config = config_of(line)
    (plan,) = plan_stages(config)
    return _recompute_flops(config, plan)


@pytest.mark.parametrize("window", ["", " --sliding-window 32"])
@pytest.mark.parametrize(("model", "feed_forward"), [(LLAMA, "mlp"), (EXPERTS, "moe")])
def test_the_parts_of_a_layer_add_up(model: str, feed_forward: str, window: str) -> None:
    line = model + window
    config = config_of(line)
    layers = sum(layer_forward_flops(config.model, index, 512) for index in range(2))
    core, inner = (again(f"{line} {SELECTIVE} {module}") for module in ("core_attn", feed_forward))
    assert core == 2 * 4 * (32 if window else 512) * 64
    assert core + inner + PROJECTIONS == layers == again(f"{line} --recompute-granularity full")
    assert again(f"{line} {SELECTIVE} core_attn {feed_forward}") == core + inner
    assert again(line) == again(f"{line} {SELECTIVE} layernorm mlp_act") == 0


def test_a_window_does_not_change_what_the_feed_forward_costs() -> None:
    assert again(f"{LLAMA} {SELECTIVE} mlp") == again(f"{LLAMA} --sliding-window 32 {SELECTIVE} mlp") > 0
