"""Compare AdamW and SGD over flat shards with torch's, and AdamW with bf16 moments with fp32 arithmetic."""

from typing import Any

import pytest
import torch

from megalite.config.optimizer import MOMENTS, OptimizerConfig
from megalite.optimizers import adam
from megalite.optimizers.adam import AdamW, RoundedAdamW
from megalite.optimizers.base import SGD, FlatParameter, Optimizer, Segment, Update
from tests.data_parallel.toy import SHAPES, ToyRun
from tests.optimizers.flats import drawn, flats_of, set_gradients, update, weights
from tests.support.ranks import RankContext, run_ranks

TENSORS = {"matrix": (7, 5), "one": (1,), "norm": (5,), "bias": (3,)}
DECAYED = ("matrix", "one")
ADAM: dict[str, Any] = {"lr": 1e-2, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-4}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {name: drawn(seed + i, *shape) for i, (name, shape) in enumerate(TENSORS.items())}


def made(**settings: Any) -> Optimizer:
    kind = SGD if settings.get("optimizer") == "sgd" else AdamW
    return kind(flats_of(tensors(0), DECAYED), OptimizerConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        ADAM,
        *(
            {"optimizer": "sgd", "sgd_momentum": m, "sgd_nesterov": n}
            for m, n in ((0.0, False), (0.9, False), (0.9, True))
        ),
    ],
    ids=str,
)
def test_steps_equal_torch_per_tensor(settings: dict[str, Any]) -> None:
    ours = made(**settings)
    small = {name: torch.nn.Parameter(value) for name, value in tensors(0).items()}
    theirs: torch.optim.Optimizer = torch.optim.AdamW(
        small.values(), weight_decay=0.0, betas=(0.8, 0.95), eps=1e-4, foreach=False
    )
    if "optimizer" in settings:
        momentum, nesterov = settings["sgd_momentum"], settings["sgd_nesterov"]
        theirs = torch.optim.SGD(small.values(), lr=1.0, momentum=momentum, nesterov=nesterov, foreach=False)
    for step in range(1, 5):
        set_gradients(ours.parameters, tensors(100 * step))
        ours.step(update(step))
        for name, parameter in small.items():
            parameter.grad = tensors(100 * step)[name]
            if name in DECAYED:
                parameter.data.mul_(1 - update(step).lr * update(step).weight_decay)
        theirs.param_groups[0]["lr"] = update(step).lr
        theirs.step()
    for name, values in weights(ours).items():
        torch.testing.assert_close(values, small[name].data, rtol=1e-12, atol=1e-12)
    assert ours.updates == 4


BOTH: dict[str, Any] = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
RANDOM: dict[str, Any] = {**BOTH, "stochastic_rounding": True}


def gradient(step: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


def advance(optimizer: Optimizer, parameter: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        parameter.grad = gradient(step, parameter.numel())
        optimizer.step(Update(step=step, lr=0.01, weight_decay=0.1))


def flat(size: int) -> FlatParameter:
    whole = Segment("w", 0, size, 0, (size,), ((0, size),), True)
    return FlatParameter(torch.nn.Parameter(gradient(1000, size)), True, (whole,))


def config(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(adam_beta2=0.95, **settings)


def test_update_equals_fp32_with_rounded_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare each step with AdamW from the same rounded moments, with rounding to nearest."""
    monkeypatch.setattr(adam, "CPU_PIECE", 64)
    ours, theirs = flat(200), flat(200)
    rounded, plain = RoundedAdamW([ours], config(**BOTH), seed=1), AdamW([theirs], config())
    for step in range(1, 6):
        for name in MOMENTS:
            plain.state(theirs.param)[name].copy_(rounded.state(ours.param)[name])
        advance(rounded, ours.param, range(step, step + 1))
        advance(plain, theirs.param, range(step, step + 1))
        assert torch.equal(ours.param, theirs.param)
        for name in MOMENTS:
            expected = plain.state(theirs.param)[name].bfloat16()
            assert torch.equal(rounded.state(ours.param)[name], expected)
    assert rounded.updates == 5


def test_fp32_moments_give_adamw() -> None:
    ours, theirs = flat(200), flat(200)
    advance(RoundedAdamW([ours], config(), seed=1), ours.param, range(1, 6))
    advance(AdamW([theirs], config()), theirs.param, range(1, 6))
    assert torch.equal(ours.param, theirs.param)


@pytest.mark.parametrize("which", MOMENTS)
def test_one_moment_in_bf16(which: str) -> None:
    one = flat(50)
    state = RoundedAdamW([one], config(**{f"{which}_dtype": "bf16"}), seed=1).state(one.param)
    expected = {name: torch.bfloat16 if name == which else torch.float32 for name in MOMENTS}
    assert {name: values.dtype for name, values in state.items()} == expected


def second_moment(**settings: Any) -> float:
    """Return the mean second moment after 300 updates with gradients of 1, starting at 0.5."""
    one = flat(4096)
    optimizer = RoundedAdamW([one], OptimizerConfig(adam_beta2=0.999, **settings), seed=1)
    optimizer.state(one.param)["exp_avg_sq"].fill_(0.5)
    for step in range(1, 301):
        one.param.grad = torch.ones(4096)
        optimizer.step(Update(step=step, lr=0.0, weight_decay=0.0))
    return optimizer.state(one.param)["exp_avg_sq"].double().mean().item()


def test_stochastic_rounding_moves_a_second_moment() -> None:
    exact = 1 - 0.5 * 0.999**300
    assert second_moment(**RANDOM) == pytest.approx(exact, rel=2e-3)
    assert second_moment(**BOTH) == 0.5, "rounding to nearest does not change it"


def moments(context: RankContext, dp: int, settings: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return weights and moments by tensor after each of three updates, for this rank's elements."""
    run = ToyRun(context.topology(dp=dp), {**settings, "reduction_order": "rank"})
    found = []
    for _ in range(3):
        run.step()
        state = {f"weight {name}": values for name, values in run.weights().items()}
        for shard in run.strategy.shards:
            for name, values in run.optimizer.state(shard.main_param).items():
                whole = run.strategy.gather(shard, values)
                for placed in shard.bucket.placed:
                    tensor = placed.parameter.info.spec.name
                    state[f"{name} {tensor}"] = whole[placed.start : placed.stop].clone()
        found.append(state)
    return found


def test_ranges_on_ranks_round_equally() -> None:
    """Four ranks with another bucket size have the bits of one rank."""
    settings = {**RANDOM, "precision": "bf16"}
    (whole, *_) = run_ranks(4, moments, 4, settings)
    sharded = {"dp_strategy": "distributed-optimizer", "ddp_bucket_size": 100}
    for rank in run_ranks(4, moments, 4, {**settings, **sharded}):
        for ours, theirs in zip(rank, whole, strict=True):
            assert ours.keys() == theirs.keys() and len(ours) == 3 * len(SHAPES)
            for key, values in theirs.items():
                assert torch.equal(ours[key], values), key
