"""One step: decisions that all ranks take together, and number formats."""

from typing import Any

import numpy as np
import pytest
import torch

from megalite.data.loader import Microbatch
from megalite.topology.group import Group
from megalite.training.non_finite import NonFiniteError
from megalite.training.step import Stepper, masked_loss, token_denominators
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Z1, Runner, build, tiny_config


def nan_in_the_loss(context: RankContext) -> str:
    """The loss is NaN only on the last stage; the gradients are finite."""
    runner = Runner(build(context, tiny_config(2, pp=2)))
    totals = Stepper._totals

    def with_nan(stepper: Stepper, work: Any, over: Group, losses: list[torch.Tensor], *more: Any) -> list[float]:
        return totals(stepper, work, over, [loss * float("nan") for loss in losses], *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "_totals", with_nan)
        with pytest.raises(NonFiniteError) as caught:
            runner.step()
    return str(caught.value)


def test_nan_loss_with_finite_gradients_stops_all_ranks() -> None:
    found = run_ranks(2, nan_in_the_loss)
    assert found[0] == found[1]
    assert "loss nan" in found[0]


def test_meanwhile_runs_after_all_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, order = Runner(build(RankContext(0, {}), tiny_config(1))), list[str]()
    scope, compute = type(runner.replica.strategy.scope), runner.stepper._run

    def run(*args: Any, **kwargs: Any) -> Any:
        order.append("compute")
        return compute(*args, **kwargs)

    monkeypatch.setattr(runner.stepper, "_run", run)
    monkeypatch.setattr(scope, "all_reduce", lambda group, tensor, **how: order.append("sum"))
    size = runner.replica.config.training.global_batch_size
    assert size is not None
    batch = runner.loader.load(0, size)
    runner.stepper.step(batch, before=runner.progress, batch_size=size, meanwhile=lambda: order.append("read"))
    assert order[order.index("compute") :] == ["compute", "sum", "sum", "read"]


def counted(context: RankContext, world: int, settings: dict[str, Any]) -> list[tuple[int | None, float]]:
    """Return (zeros in the gradient, norm of the parameters) of three steps."""
    logs = {"log_num_zeros_in_grad": True, "log_params_norm": True}
    runner = Runner(build(context, tiny_config(world, **logs, **settings)))
    return [(runner.step().num_zeros, runner.stepper.params_norm()) for _ in range(3)]


@pytest.mark.parametrize(
    "settings", [{"tp": 2}, {"pp": 2, "dp": 2, **Z1}, {"dp": 2, "dp_strategy": "fully-sharded"}], ids=str
)
def test_gradient_zeros_and_parameter_norm_cover_the_model(settings: dict[str, Any]) -> None:
    """Padding and copies count once; embedding rows of tokens that are in no sample have no gradient.

    Not tested with cp, where gradients that are 0 except for rounding, such as of a key's bias, become exactly 0."""
    world = int(np.prod([settings.get(axis, 1) for axis in ("tp", "pp", "dp")]))
    untied = {"tie_embeddings": False}
    alone = counted(RankContext(0, {}), 1, untied)
    runner = Runner(build(RankContext(0, {}), tiny_config(1, **untied)))
    for zeros, norm in alone:
        runner.step()
        parameters = [p for stage in runner.replica.stages.values() for p in stage.parameters()]
        gradients = [parameter.main_grad for parameter in parameters]
        assert zeros == sum(int((gradient == 0).sum()) for gradient in gradients) > 32
        assert norm == pytest.approx(float(sum(p.detach().square().sum() for p in parameters)) ** 0.5, rel=1e-12)
    for ours in run_ranks(world, counted, world, {**settings, **untied}):
        assert [zeros for zeros, _ in ours] == [zeros for zeros, _ in alone]
        assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in alone], rel=1e-9)


def test_clipping_scales_to_the_limit() -> None:
    """After a step the gradients are clipped: their norm is the limit, or unchanged if below."""
    for clip, factor in ((0.05, None), (1e3, 1.0), (0.0, 1.0)):
        runner = Runner(build(RankContext(0, {}), tiny_config(1, clip_grad=clip)))
        result = runner.step()
        norm = float(runner.replica.strategy.local_norm_squared().sqrt())
        expected = clip if factor is None else result.grad_norm
        assert norm == pytest.approx(expected, rel=1e-4)


CPU = torch.device("cpu")


def microbatch(mask: list[list[float]]) -> Microbatch:
    tokens = torch.zeros(len(mask), len(mask[0]), dtype=torch.int64)
    return Microbatch(tokens, tokens, torch.tensor(mask), tuple(range(len(mask))))


def test_batch_without_tokens_has_loss_zero() -> None:
    batch = microbatch([[0, 0, 0]])
    total = token_denominators([batch], mtp_num_layers=0, dp=Group.solo("dp"), device=CPU)
    assert masked_loss(torch.full((1, 3), 5.0), batch.loss_mask, total[0]).item() == 0.0
