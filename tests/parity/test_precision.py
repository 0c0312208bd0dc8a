"""bf16 and fp16 in any layout follow the fp32 run of one rank.

Both have fp32 main parameters and gradients, so only weights, activations and messages are rounded, by 2^-9 and 2^-12 of
each value. Twelve small steps (2e-4 per element: with a larger rate the fp32 run itself would amplify a difference in the
last bit) must follow the fp32 trajectory: losses are close, and main parameters move in the same direction."""

from typing import Any

import numpy as np
import pytest

from megalite.parity.trajectory import Runner, assemble, local_parts
from tests.parity.factors import FAMILIES, LOSSES, Settings, world_of
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import build, tiny_config, words

STEPS = 12
SCHEDULE: Settings = words("lr=2e-4 lr_warmup_iters=null lr_decay_style=constant weight_decay=0.0 micro_batch_size=2")
Z1: Settings = {"dp_strategy": "distributed-optimizer"}

MODELS: dict[str, Settings] = {
    "gpt": FAMILIES["gpt"],
    "qwen": {**FAMILIES["qwen"], "num_layers": 2},
    "mixtral": {**FAMILIES["mixtral"], **LOSSES, "num_layers": 2},
}
"""The smallest sizes that the layouts allow, as each layer and microbatch of the many steps costs its collectives."""
LAYOUTS: dict[tuple[str, str], tuple[str, Settings]] = {
    ("gpt-tp2-sp", "bf16"): ("gpt", {"tp": 2, "sequence_parallel": True}),
    ("gpt-pp2-vpp2-dp2", "bf16"): ("gpt", {"pp": 2, "vpp": 2, "dp": 2, **Z1}),
    ("mixtral-dp2-ep2", "bf16"): ("mixtral", {"dp": 2, "ep": 2, **Z1}),
    ("gpt-one", "fp16"): ("gpt", {}),
    ("gpt-pp2-vpp2-dp2", "fp16"): ("gpt", {"pp": 2, "vpp": 2, "dp": 2, **Z1}),
    ("qwen-tp2-cp2-a2a", "fp16"): ("qwen", {"tp": 2, "cp": 2, "cp_comm_type": "a2a"}),
}


def moved(context: RankContext, world: int, settings: Settings) -> dict[str, Any]:
    """Losses of the steps, and main parameters before and after."""
    runner = Runner(build(context, tiny_config(world, **SCHEDULE, **settings)))
    first = local_parts(runner.replica, "main_param")
    losses = [runner.step().loss for _ in range(STEPS)]
    return {"losses": losses, "first": first, "last": local_parts(runner.replica, "main_param")}


def path(ranks: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(losses, change of all main parameters as one vector)."""
    first, last = (assemble([rank[moment] for rank in ranks]) for moment in ("first", "last"))
    return np.array(ranks[0]["losses"]), np.concatenate([(last[k] - first[k]).ravel() for k in sorted(last)])


@pytest.fixture(scope="module")
def exact() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        name: path([moved(RankContext(0), 1, {**settings, "precision": "fp32"})]) for name, settings in MODELS.items()
    }


# Measured over all rows and twenty steps: losses differ by at most 0.95e-3 (bf16) and 1.3e-4 (fp16), cosine at least
# 0.9990 and 0.9996, length within 0.14 %. The bounds are about three times that. Without main parameters the bf16
# weights would hardly change, as their steps are 4e-4.
BOUNDS = {"bf16": (3e-3, 0.997), "fp16": (4e-4, 0.999)}


@pytest.mark.parametrize(("name", "precision"), LAYOUTS)
def test_half_precision_follows_one_rank_in_fp32(
    name: str, precision: str, exact: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    model, layout = LAYOUTS[name, precision]
    scale = {"initial_loss_scale": 2.0**10} if precision == "fp16" else {}
    settings = {**MODELS[model], **layout, "precision": precision, **scale}
    world = world_of(settings)
    losses, movement = path(run_ranks(world, moved, world, settings))
    exact_losses, exact_movement = exact[model]
    loss_bound, cosine_bound = BOUNDS[precision]
    np.testing.assert_allclose(losses, exact_losses, rtol=loss_bound)
    assert exact_losses[-1] < exact_losses[0] - 0.1, "the steps are large enough to learn something"
    lengths = [np.linalg.norm(vector) for vector in (movement, exact_movement)]
    assert movement @ exact_movement / np.prod(lengths) > cosine_bound
    assert lengths[0] == pytest.approx(lengths[1], rel=0.005)
