"""apex's layer kernels against float64, through stand-ins with apex's signatures."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.kernels import probes
from megalite.kernels.attention import unfused_attention
from megalite.kernels.cross_entropy import cross_entropy_forward
from megalite.kernels.layer_ops import apply_rope, layer_norm, rms_norm
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.topology.group import Group

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SOFTMAX = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
"""Scores, probabilities and dropped probabilities are each rounded."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: list[Tensor], exact: list[Tensor], limit: float) -> None:
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == found[0].dtype and ours.shape == right.shape
        assert (ours.double() - right).norm() <= limit * right.norm()


def run(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return output and gradients, for a gradient that is not contiguous, like that of a permuted output."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    y = function(*leaves)
    grad = torch.arange(y.numel()).view(y.shape).double().cos().to(y.dtype)
    grad = grad.transpose(0, -2).contiguous().transpose(0, -2)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [17, 1000])  # apex has no specialized kernel for these sizes
@pytest.mark.parametrize("name, torchs", [("rmsnorm", rms_norm), ("layernorm", layer_norm)])
def test_norms_equal_torch(
    apex: ModuleType, name: str, torchs: Callable[..., Tensor], size: int, dtype: torch.dtype, zero_centered: bool
) -> None:
    x = draw(size, 3, 5, dtype=dtype).permute(2, 1, 0)
    inputs = [x, 0.1 * draw(size, dtype=dtype, seed=1) + (not zero_centered)]
    if name == "layernorm":
        inputs.append(draw(size, dtype=dtype, seed=2))
    ours = getattr(apex, name)
    found = run(lambda *given: ours(*given, 1e-5, zero_centered=zero_centered), inputs)
    wide = [tensor.double() for tensor in inputs]
    exact = run(lambda *given: torchs(*given, 1e-5, zero_centered=zero_centered), wide)
    assert_near(found, exact, ROUNDING[dtype])


def test_too_many_elements_are_an_error(apex: ModuleType) -> None:
    apex.check_elements("rmsnorm", torch.empty(1, dtype=torch.bfloat16).expand(2**16, 2**15))  # no memory
    x = torch.empty(2**31 + 8, dtype=torch.bfloat16, device="meta").view(-1, 8)
    refused = r"rmsnorm=apex supports less than 2\^31 elements .* use rmsnorm=torch"
    with pytest.raises(ConfigError, match=refused):
        apex.rmsnorm(x, torch.ones(8, dtype=torch.bfloat16, device="meta"), 1e-5)


def tables(s: int, d: int) -> tuple[Tensor, Tensor]:
    angles = draw(s, 1, 1, d // 2, seed=3)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rope_equals_torch(apex: ModuleType, dtype: torch.dtype) -> None:
    x, (cos, sin) = draw(7, 2, 3, 24, dtype=dtype)[..., 8:16], tables(7, 8)  # a part of a wider row
    found = run(lambda x: apex.rope(x, cos, sin), [x])
    exact = run(lambda x: apply_rope(x, cos.double(), sin.double()), [x.double()])
    assert_near(found, exact, ROUNDING[dtype])


def test_separate_positions_per_sequence_are_an_error(apex: ModuleType) -> None:
    cos = torch.ones(4, 3, 1, 4)
    with pytest.raises(ConfigError, match=r"rope=apex supports one table for all sequences.*use rope=torch"):
        apex.rope(torch.ones(4, 3, 2, 8), cos, cos)


@pytest.mark.parametrize("dtype", SOFTMAX)
@pytest.mark.parametrize("head_size", [16, 24])  # the scale of 16 is exact in half types, that of 24 is not
@pytest.mark.parametrize("drops", [False, True])
def test_attention_equals_float64(apex: ModuleType, dtype: torch.dtype, head_size: int, drops: bool) -> None:
    q, k, v = (draw(20, 2, n, head_size, dtype=dtype, seed=n + i).permute(1, 2, 0, 3) for i, n in enumerate((4, 2, 2)))
    keep = draw(2, 4, 20, 20) >= -0.5 if drops else None
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    causal = apex.causal_softmax_forward, apex.causal_softmax_backward
    given = {"keep": keep, "p": 0.3}
    found = run(lambda *x: unfused_attention(*x, visible=None, causal=causal, **given), [q, k, v])
    wide = [tensor.double() for tensor in (q, k, v)]
    exact = run(lambda *x: unfused_attention(*x, visible=visible, **given), wide)
    assert_near(found, exact, SOFTMAX[dtype])


@pytest.mark.parametrize(
    "shape, reason",
    [
        ((2, 4, 16), "it supports sequences of 17 to 16384 tokens, not 16"),
        ((2, 4, 22), "it supports sequences of a multiple of 4 tokens, not 22"),
        ((2, 3, 20), "it requires a multiple of 8 matrices of 20 x 20 scores, but got 6"),
        ((1, 3, 132), "it requires a multiple of 4 matrices of 132 x 132 scores, but got 3"),
    ],
)
def test_unsupported_scores_are_errors(apex: ModuleType, shape: tuple[int, int, int], reason: str) -> None:
    scores = torch.zeros(*shape, shape[-1], dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=f"softmax=apex cannot be used: {reason}; use softmax=torch"):
        apex.causal_softmax_forward(scores, 0.25)
    assert [n for n in (16, 17, 20, 16384, 16388) if probes.softmax_limit(n) is None] == [20, 16384]


def test_softmax_scale_is_not_rounded(apex: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own scale parameter has the scores' type."""
    seen: list[object] = []
    kernels = probes.extension("scaled_upper_triang_masked_softmax_cuda")
    monkeypatch.setattr(kernels, "forward", lambda scores, scale: (seen.append(scale), scores)[1])
    for scale in (24**-0.5, 0.25):
        apex.causal_softmax_forward(torch.ones(2, 4, 20, 20, dtype=torch.bfloat16), scale)
    assert seen == [1.0, 0.25]


def logits_and_labels(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw [n, v] logits, and labels with some zeros."""
    labels = torch.randint(40, (12,), generator=torch.Generator().manual_seed(0))
    labels[::4] = 0
    return (5 * draw(12, 40)).to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [1, 4])
def test_vocabulary_shards_equal_the_whole(apex: ModuleType, dtype: torch.dtype, parts: int) -> None:
    logits, labels = logits_and_labels(dtype)
    grad, exact = draw(12, seed=1).abs(), logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (right,) = torch.autograd.grad(losses, exact, grad.double())
    pieces = list(enumerate(logits.chunk(parts, dim=1)))  # not contiguous: the kernel would ignore their strides
    width = 40 // parts
    found = [apex.cross_entropy_forward(part, labels, width * place) for place, part in pieces]
    stats = torch.stack([each for each, _ in found])
    maximum, total, picked = stats.unbind(1)
    logsumexp = (maximum + total.log()).logsumexp(0)
    loss = logsumexp - (picked + maximum).gather(0, (labels // width).unsqueeze(0)).squeeze(0)
    assert stats.dtype == torch.float32
    torch.testing.assert_close(loss.double(), losses.detach(), atol=1e-5, rtol=1e-5)
    over_all = None if parts == 1 else logsumexp
    grads = [
        apex.cross_entropy_backward(saved, labels, width * place, over_all, grad)
        for place, (_, saved) in enumerate(found)
    ]
    assert grads[0].dtype == dtype
    assert_near([torch.cat(grads, dim=1)], [right], ROUNDING[dtype])


def test_label_0_is_not_padding(apex: ModuleType) -> None:
    """apex's own wrapper treats label 0 as padding, without loss or gradient."""
    logits, labels = logits_and_labels(torch.float32)
    logits.requires_grad_()
    kernel = apex.cross_entropy_forward, apex.cross_entropy_backward
    where = {"first": 0, "vocab_size": 40, "tp": Group.solo("tp"), "kernel": kernel}
    losses = vocab_parallel_cross_entropy(logits.view(6, 2, 40), labels.view(6, 2), **where).flatten()
    losses.sum().backward()
    assert bool((losses[labels == 0] > 0.1).all())
    assert bool((logits.grad[labels == 0, 0] < 0).all())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("wide", [True, False])
def test_weight_gradients_accumulate(apex: ModuleType, dtype: torch.dtype, wide: bool) -> None:
    main = torch.float32 if wide else dtype
    # Not contiguous: the kernel would ignore their strides.
    grad_y, x = draw(6, 33, dtype=dtype).t(), draw(33, 20, dtype=dtype, seed=1)[:, ::2]
    main_grad = draw(6, 10, dtype=main, seed=2)
    exact = main_grad.double() + grad_y.double().t() @ x.double()
    apex.accumulate_weight_grad(main_grad, grad_y, x)
    assert_near([main_grad], [exact], ROUNDING[main])


def test_empty_inputs_are_accepted(apex: ModuleType) -> None:
    """Empty inputs launch no kernel, which would fail."""
    x, factors = torch.empty(4, 0, 32, requires_grad=True), [torch.ones(32, requires_grad=True) for _ in "ab"]
    for function, count in ((apex.rmsnorm, 1), (apex.layernorm, 2)):
        y = function(x, *factors[:count], 1e-5)
        grads = torch.autograd.grad(y.sum(), [x, *factors[:count]])
        assert y.shape == x.shape == grads[0].shape
        assert all(bool((grad == 0).all()) for grad in grads[1:])
    heads = torch.empty(0, 2, 2, 8, requires_grad=True)
    rotated = apex.rope(heads, *tables(0, 8))
    assert rotated.shape == heads.shape
    rotated.sum().backward()
    logits, labels = torch.empty(0, 40), torch.empty(0, dtype=torch.int64)
    stats, saved = apex.cross_entropy_forward(logits, labels, 0)
    assert stats.shape == cross_entropy_forward(logits, labels, 0)[0].shape
    assert apex.cross_entropy_backward(saved, labels, 0, None, torch.empty(0)).shape == (0, 40)
    main_grad = torch.ones(6, 10)
    apex.accumulate_weight_grad(main_grad, torch.empty(0, 6), torch.empty(0, 10))
    assert bool((main_grad == 1).all())
