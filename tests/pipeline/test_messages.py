"""Compressed messages: the codecs, and runs compared with one rank that compresses between its layers."""

from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.parity.trajectory import local_parts
from megalite.pipeline.messages import MessageCodec, make_codec
from megalite.training.setup import make_loader
from tests.e2e.programs import REPOSITORY
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Runner, assemble, build, tiny_config

CPU = torch.device("cpu")
KINDS = ("bf16", "uint8", "topk:0.25")
COUNT = 4999


def codec(kind: str, dtype: torch.dtype = torch.float32, count: int = COUNT) -> MessageCodec:
    return make_codec(kind, count, dtype, CPU)


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_message_has_its_size_and_keeps_its_tensor(kind: str, dtype: torch.dtype) -> None:
    x, made = values(dtype), codec(kind, dtype)
    message = made.encode(x)
    assert message.dtype == torch.uint8 and message.shape == (made.nbytes,) and torch.equal(x, values(dtype))
    assert torch.equal(message, made.encode(x.clone())), "equal inputs give equal bits"
    arrived = made.decode(message)
    assert arrived.shape == x.shape and arrived.dtype == dtype


def test_decoded_values() -> None:
    x = values()
    rounded, integers, largest = (codec(kind).decode(codec(kind).encode(x)) for kind in KINDS)
    assert torch.equal(rounded, x.bfloat16().float())
    for block, found in zip(x.split(2048), integers.split(2048), strict=True):
        assert (block - found).abs().max() <= block.abs().max() / 127 * 0.5001
    threshold = x.abs().sort(descending=True).values[1249]  # a quarter of the elements, rounded up
    assert torch.equal(largest, torch.where(x.abs() >= threshold, x, 0.0))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_values_stay_non_finite(kind: str, wrong: float) -> None:
    x = values()
    x[77] = wrong
    assert not codec(kind).decode(codec(kind).encode(x)).isfinite().all()


@pytest.mark.parametrize("text", ["topk", "topk:0", "topk:1.5", "topk:x", "uint8:2", "int4", ""])
def test_unknown_codec_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"use none, bf16, uint8 or topk:SHARE, e\.g\. topk:0\.25"):
        make_codec(text, 8, torch.float32, CPU)


class Lossy(torch.autograd.Function):
    """Apply the compression between two stages, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        made = codec(kind, x.dtype, x.numel())
        return made.decode(made.encode(x.reshape(-1))).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Lossy.forward(ctx, grads[0], ctx.kind), None


Numbers = tuple[list[float], list[dict[str, Any]], float]
"""Return losses and gradients of the steps, and the loss of an evaluation."""


def numbers(runner: Runner) -> Numbers:
    losses, gradients = [], []
    for _ in range(3):
        losses.append(runner.step().loss)
        gradients.append(local_parts(runner.replica, "grad"))
    return losses, gradients, runner.evaluate()


def of_ranks(context: RankContext, world: int, settings: dict[str, Any]) -> Numbers:
    return numbers(Runner(build(context, tiny_config(world, **settings))))


def on_one_rank(kind: str, cuts: tuple[int, ...], settings: dict[str, Any]) -> Runner:
    """Train a model that compresses the outputs of some layers, in training only."""
    runner = Runner(build(RankContext(0, {}), tiny_config(1, **settings)))
    for layer in cuts:
        runner.replica.stages[0].layers[str(layer)].register_forward_hook(
            lambda module, inputs, output: Lossy.apply(output, kind) if torch.is_grad_enabled() else output
        )
    return runner


WHOLE = {"scatter_gather_tensors_in_pipeline": False}
VEE = {"pp": 2, "vpp": 2, "pipeline_schedule": "zb-v"}
RUNS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("uint8", (1,), {"pp": 2, "pipeline_layers": [2, 2]}),
    ("topk:0.25", (0, 1, 2), {"pp": 2, "vpp": 2, "pipeline_layers": [1, 1, 1, 1], "sanitize_communication": True}),
    ("topk:0.25", (0, 2), {**VEE, "pipeline_layers": [1, 1, 1, 1]}),  # at the turn nothing is sent
    ("bf16", (1,), {"pp": 2, "tp": 2, "pipeline_layers": [2, 2]}),
    ("uint8", (1,), {"pp": 2, "tp": 2, "pipeline_layers": [2, 2], **WHOLE}),
    ("uint8", (1,), {"pp": 2, "pipeline_layers": [2, 2], "recompute_granularity": "full", "recompute_ahead": True}),
]


@pytest.mark.parametrize(("kind", "cuts", "settings"), RUNS, ids=str)
def test_run_equals_one_rank_that_compresses(kind: str, cuts: tuple[int, ...], settings: dict[str, Any]) -> None:
    """Evaluation does not compress."""
    found = run_ranks((world := 2 * settings.get("tp", 1)), of_ranks, world, {**settings, "pipeline_compression": kind})
    losses, gradients, evaluation = numbers(on_one_rank(kind, cuts, {}))
    exact, _, _ = numbers(on_one_rank(kind, (), {}))
    assert losses != pytest.approx(exact, rel=1e-6), "compression must have an effect"
    for rank in found:
        assert rank[0] == pytest.approx(losses, rel=1e-10)
        assert rank[2] == pytest.approx(evaluation, rel=1e-10)
    for step, expected in enumerate(gradients):
        ours = assemble([rank[1][step] for rank in found])
        for name, (_, _, wanted) in expected.items():
            np.testing.assert_allclose(ours[name], wanted, rtol=1e-9, atol=1e-12, err_msg=name)


LENGTH = 32


class Text:
    """Sample k is a passage of this project's licence, as bytes; a `SampleSource`."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer((REPOSITORY / "LICENSE").read_bytes(), dtype=np.uint8) % 96 + 1

    def sample(self, k: int) -> np.ndarray:
        start = k * 7919 % (len(self._bytes) - LENGTH - 1)
        return self._bytes[start : start + LENGTH + 1].astype(np.int64)


def learned(kind: str, cuts: tuple[int, ...] = (0,)) -> float:
    """Return the mean loss of the last 10 of 60 steps on text, for two layers with compression between them."""
    sizes = {"num_layers": 2, "vocab_size": 97, "seq_length": LENGTH, "micro_batch_size": 16, "global_batch_size": 16}
    runner = on_one_rank(kind, cuts, {**LLAMA, **sizes, "precision": "fp32", "train_iters": 60})
    runner.loader = make_loader(runner.replica, Text(), eod_token=0)
    losses = [runner.step().loss for _ in range(60)]
    assert losses[0] > 4.4
    return sum(losses[-10:]) / 10


def test_compression_hardly_changes_the_loss_on_text() -> None:
    """The loss falls from 4.6 in 60 steps; limits are relative to its decrease. Residual streams are dense: topk loses much."""
    exact = learned("", ())
    assert exact < 3.0
    for kind, behind in (("bf16", 0.002), ("uint8", 0.005), ("topk:0.25", 0.4)):
        assert learned(kind) < exact + behind * (4.6 - exact), kind
