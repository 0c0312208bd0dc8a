"""Biases that balance experts: their updates, equality over layouts, and the balance on real text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.models.moe_router import Router
from megalite.training.state_tensors import state_tensors
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import continued, save_run
from tests.support.tiny import BIASED, MOE, Runner, build, tiny_config

SETTINGS: dict[str, Any] = {**MOE, **BIASED, "num_layers": 3, "num_experts": 8, "global_batch_size": 4}
GROUPED = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 2}
TEXT = (Path(__file__).parents[2] / "README.md").read_bytes() + (
    Path(__file__).parents[2] / "docs/tour.md"
).read_bytes()


def biases(runner: Runner) -> dict[int, list[float]]:
    return {router.layer: router.bias.tolist() for router in runner.replica.routers}


def trained(context: RankContext, settings: dict[str, Any], folder: str) -> tuple[dict[int, list[float]], list[str]]:
    runner = Runner(build(context, tiny_config(context_size(settings), **SETTINGS, **settings)))
    for _ in range(3):
        runner.step()
    save_run(runner, folder)
    return biases(runner), [
        saved.spec.name for saved, _ in state_tensors(runner.replica) if "router.bias" in saved.spec.name
    ]


def context_size(settings: dict[str, Any]) -> int:
    return int(np.prod([settings.get(axis, 1) for axis in ("tp", "pp", "dp", "cp")]))


def loaded_biases(context: RankContext, settings: dict[str, Any], folder: str) -> dict[int, list[float]]:
    return biases(continued(context, tiny_config(context_size(settings), **SETTINGS, **settings), folder))


LAYOUTS = [{"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}, {"pp": 2, "cp": 2, **GROUPED}]


@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: "-".join(settings))
def test_biases_are_equal_in_all_layouts_and_after_resume(settings: dict[str, Any], tmp_path: Path) -> None:
    alone = {key: value for key, value in settings.items() if key in GROUPED}
    (expected, names), *_ = run_ranks(1, trained, alone, str(tmp_path / "one"))
    assert names == ["layers.1.moe.router.bias", "layers.2.moe.router.bias"]
    assert all(any(bias) for bias in expected.values())
    ranks = run_ranks(context_size(settings), trained, settings, str(tmp_path / "many"))
    for found, _ in ranks:
        assert found == {layer: expected[layer] for layer in found}
    assert sorted(name for _, written in ranks for name in written) == names, "each bias is written once"
    assert run_ranks(1, loaded_biases, alone, str(tmp_path / "many")) == [expected]
    for found in run_ranks(context_size(settings), loaded_biases, settings, str(tmp_path / "one")):
        assert found == {layer: expected[layer] for layer in found}


def test_evaluation_and_skipped_steps_do_not_change_biases() -> None:
    config = tiny_config(**SETTINGS, on_non_finite="skip")
    runner = Runner(build(RankContext(0), config))
    runner.step()
    before = biases(runner)
    runner.evaluate()
    assert biases(runner) == before
    weight = next(iter(runner.replica.stages[0].parameters()))
    kept = runner.stepper._run
    runner.stepper._run = lambda *arguments, **named: [loss * torch.nan for loss in kept(*arguments, **named)]  # type: ignore[method-assign]
    assert runner.step().skipped
    assert biases(runner) == before and weight.isfinite().all()


class Words:
    """Samples of bytes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def sample(self, k: int) -> np.ndarray:
        start = np.random.default_rng(k).integers(len(TEXT) - self.length - 1)
        return np.frombuffer(TEXT, np.uint8, self.length + 1, start).astype(np.int64)


def test_biases_balance_experts_on_real_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the largest over the mean load in the last steps, with a moving bias and with a bias of 0."""

    def imbalance(rate: float) -> float:
        more = {
            "moe_router_bias_update_rate": rate,
            "moe_aux_loss_coeff": 0.0,
            "precision": "fp32",
            "lr": 3e-3,
            "micro_batch_size": 4,
        }
        settings = {**SETTINGS, **more, "vocab_size": 256, "seq_length": 32, "eod_mask_loss": False, "train_iters": 40}
        runner = Runner(build(RankContext(0), tiny_config(**settings | GROUPED)))
        runner.loader.dataset = Words(32)
        loads = {router.layer: torch.zeros(8) for router in runner.replica.routers}
        choose = Router._choose

        def counted(router: Router, scores: torch.Tensor) -> torch.Tensor:
            chosen = choose(router, scores)
            if runner.progress.step >= 25:
                loads[router.layer] += chosen.flatten().bincount(minlength=8)
            return chosen

        with monkeypatch.context() as patch:
            patch.setattr(Router, "_choose", counted)
            for _ in range(40):
                runner.step()
        return max(float(load.max() / load.mean()) for load in loads.values())

    moving, still = imbalance(0.02), imbalance(0.0)
    assert moving < 1.5 < still
