"""Requested attention backends against torch's choice, and the errors for unavailable backends."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.errors import ConfigError
from megalite.context_parallel.attention import ring_attention
from megalite.context_parallel.tiles import Visibility
from megalite.kernels import attention_backends
from megalite.kernels.attention import causal_attention
from megalite.kernels.attention_backends import (
    AttentionShape,
    blocked_attention,
    choose_attention,
    varlen_attention,
    varlen_fault,
    why_not_blocked,
    why_not_varlen,
)
from megalite.models.linear_attention import _places_in_documents
from megalite.topology.group import Group

CPU = torch.device("cpu")


def test_cached_places_can_be_saved_for_a_backward() -> None:
    """Even if generation made them, in inference mode."""
    with torch.inference_mode():
        cached = attention_backends._bounds(((0, 1),), 7, CPU)[0], _places_in_documents(7, ((0, 1),), CPU)
    assert not any(each.is_inference() for each in cached)


def make_shape(dtype: torch.dtype = torch.float64, groups: int = 4, device: torch.device = CPU) -> AttentionShape:
    return AttentionShape(device=device, dtype=dtype, heads=4, groups=groups, head_size=16)


def draw(shape: AttentionShape, s_q: int, s_k: int) -> list[Tensor]:
    """Draw inputs in the model's memory order: views of [s, b, heads, d]."""
    generator = torch.Generator().manual_seed(s_q)
    sizes = [(s_q, 2, shape.heads, 16), (s_k, 2, shape.groups, 16), (s_k, 2, shape.groups, 16)]
    tensors = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    return [t.to(shape.device, shape.dtype).permute(1, 2, 0, 3).detach().requires_grad_() for t in tensors]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_requested_backends_equal_torchs_choice(backend: str, groups: int) -> None:
    shape = make_shape(groups=groups)
    kernel = choose_attention(backend, shape, seq=12).kernel
    for causal, s_q in ((True, 12), (False, 1)):
        given = draw(shape, s_q, 12)
        ours, expected = kernel(*given, causal=causal), causal_attention(*given, causal=causal)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        grad = torch.linspace(-1.0, 1.0, ours.numel(), dtype=torch.float64).view(ours.shape)
        torch.testing.assert_close(
            torch.autograd.grad(ours, given, grad), torch.autograd.grad(expected, given, grad), rtol=1e-11, atol=1e-12
        )


class _RecordOperators(TorchDispatchMode):
    """Record the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_requested_backend_runs() -> None:
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    for backend, runs, absent in (("flash", flash, "_softmax"), ("math", "_safe_softmax", flash)):
        kernel = choose_attention(backend, make_shape(), seq=12).kernel
        with _RecordOperators() as seen:
            kernel(*draw(make_shape(), 12, 12))
        assert runs in seen.names and absent not in seen.names, (backend, seen.names)


def test_auto_reports_torchs_choice() -> None:
    choice = choose_attention("auto", make_shape(groups=2), seq=12)
    assert choice.kernel is causal_attention
    assert (choice.backend, choice.why) == ("flash", "torch's choice")
    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        assert choose_attention("auto", make_shape(), seq=12).backend == "math"
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)


@pytest.mark.parametrize(("backend", "named"), [("cudnn", "cudnn or fused"), ("efficient", "efficient")])
def test_cuda_backends_are_errors_on_cpu(backend: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_attention(backend, make_shape(), seq=12)
    assert str(error.value) == (
        f"attention_backend {named} cannot be used: it does not exist on cpu, which has flash, blocked, math; "
        "use attention_backend auto"
    )


def test_failing_kernel_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image\nmore lines")

    kernels = {**attention_backends._KERNELS, ("math", "cpu"): fails}
    monkeypatch.setattr(attention_backends, "_KERNELS", kernels)
    with pytest.raises(
        ConfigError, match=r"math or unfused or local cannot be used: no kernel image; use attention_backend auto"
    ):
        choose_attention("math", make_shape(), seq=12)


def test_types_and_head_sizes_that_cuda_kernels_lack_are_errors() -> None:
    cuda = torch.device("cuda")
    for shape, message in (
        (make_shape(torch.float32, device=cuda), "it supports bfloat16 and float16, not float32"),
        (AttentionShape(cuda, torch.bfloat16, 4, 4, 12), "it supports head sizes that are multiples of 8, not 12"),
    ):
        for backend in ("flash", "cudnn"):
            with pytest.raises(ConfigError, match=message):
                choose_attention(backend, shape, seq=12)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_requested_backends_on_cuda_are_within_rounding(backend: str, groups: int) -> None:
    shape = AttentionShape(torch.device("cuda"), torch.bfloat16, 4, groups, 16)
    kernel = choose_attention(backend, shape, seq=128).kernel
    given = draw(shape, 128, 128)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    ours, expected = kernel(*given), causal_attention(*exact)
    grad = torch.randn_like(ours)
    pairs = [(ours, expected)]
    pairs += zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    )
    for one, other in pairs:
        assert (one.double() - other).norm() <= 1.5e-2 * other.norm()


WHY_NOT = why_not_blocked(CPU, torch.bfloat16)
BLOCKED = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
# [batch, heads, groups, sequence, head size]: one block or less, several with a remainder, large blocks, few and many heads.
SHAPES = [
    (2, 4, 4, 1, 16),
    (2, 4, 2, 100, 16),
    (1, 3, 3, 128, 24),
    (2, 8, 2, 300, 32),
    (1, 2, 1, 1100, 64),
    (3, 16, 16, 257, 8),
]


def draw_inputs(shape: tuple[int, int, int, int, int]) -> list[Tensor]:
    """Draw queries with large scores, keys, values and the output's gradient, in the model's memory order."""
    b, heads, groups, seq, size = shape
    generator = torch.Generator().manual_seed(seq)
    counts = (heads, groups, groups, heads)
    tensors = [torch.randn((seq, b, count, size), generator=generator) for count in counts]
    tensors[0] *= 3.0
    return [tensor.bfloat16().permute(1, 2, 0, 3) for tensor in tensors]


def outputs_and_gradients(kernel: object, given: list[Tensor]) -> list[Tensor]:
    """Return output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out = kernel(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


@BLOCKED
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocked_attention_is_as_accurate_as_torch(shape: tuple[int, int, int, int, int]) -> None:
    given = draw_inputs(shape)
    exact = outputs_and_gradients(causal_attention, [tensor.double() for tensor in given])
    ours = outputs_and_gradients(blocked_attention, given)
    theirs = outputs_and_gradients(causal_attention, given)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        error, other = ((each.double() - right).norm() / right.norm().clamp(min=1e-3) for each in (mine, their))
        assert error <= max(1.5 * other, 3e-3), (float(error), float(other))


@BLOCKED
def test_blocked_attention_is_causal() -> None:
    given = draw_inputs((1, 2, 2, 300, 16))
    whole = blocked_attention(*given[:3])
    changed = [tensor.clone() for tensor in given[:3]]
    changed[1][:, :, 200:] += 5.0
    changed[2][:, :, 200:] -= 5.0
    after = blocked_attention(*changed)
    assert torch.equal(after[:, :, :200], whole[:, :, :200])
    assert not torch.equal(after[:, :, 200:], whole[:, :, 200:])


@BLOCKED
def test_blocked_attention_without_a_mask_equals_torch() -> None:
    q, k, v, _ = draw_inputs((2, 4, 2, 50, 16))
    found = blocked_attention(q[:, :, :1], k, v, causal=False)
    assert torch.equal(found, causal_attention(q[:, :, :1], k, v, causal=False))


@BLOCKED
def test_blocked_attention_saves_only_its_inputs() -> None:
    q, k, v, _ = (tensor.requires_grad_() for tensor in draw_inputs((2, 4, 4, 256, 16)))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        blocked_attention(q, k, v)
    assert sorted(tensor.numel() for tensor in saved) == [q.numel()] * 3


@BLOCKED
@pytest.mark.parametrize("kinds, backend", [(("amd-avx512",), "blocked"), ((), "flash")])
def test_auto_uses_blocked_where_it_is_faster(
    kinds: tuple[str, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_backends, "cpu_kinds", lambda: kinds)
    half, single = (AttentionShape(CPU, dtype, 4, 4, 16) for dtype in (torch.bfloat16, torch.float32))
    assert choose_attention("auto", half, seq=12).backend == backend
    assert choose_attention("auto", single, seq=12).backend == "flash"


@BLOCKED
def test_blocked_needs_bfloat16_on_cpu() -> None:
    with pytest.raises(ConfigError, match=r"blocked cannot be used: it requires bfloat16, not float32; use"):
        choose_attention("blocked", AttentionShape(CPU, torch.float32, 4, 4, 16), seq=12)
    assert why_not_blocked(torch.device("cuda"), torch.bfloat16) == "it does not exist on cuda"
    choice = choose_attention("blocked", AttentionShape(CPU, torch.bfloat16, 4, 2, 16), seq=12)
    assert (choice.backend, choice.why) == ("blocked", "requested")


def dense_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Implement torch's varlen_attn as documented, one sequence at a time."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert longest_q == longest_k == int(bounds_q.diff().max())
    assert window_size[1] == 0 and enable_gqa
    found = []
    for first, stop in zip(bounds_q.tolist(), bounds_q.tolist()[1:]):
        positions = torch.arange(stop - first)
        distance = positions.unsqueeze(1) - positions
        visible = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        rows = (tensor[first:stop].transpose(0, 1) for tensor in (q, k, v))
        found.append(torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=visible, enable_gqa=True))
    return torch.cat(found, dim=1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("starts", [None, ((0, 5, 6), (0,))])
def test_varlen_attention_equals_ring_attention(
    starts: tuple[tuple[int, ...], ...] | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for documents and windows has the values and gradients of the tiles."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", dense_varlen)
    given = draw(make_shape(groups=2), 12, 12)
    rule = Visibility(window=window, document_starts=starts)
    right = ring_attention(*given, cp=Group.solo("cp"), spans=(((0, 12),),), visibility=rule)
    grad = torch.linspace(-1.0, 1.0, right.numel(), dtype=torch.float64).view(right.shape)
    wanted = torch.autograd.grad(right, given, grad)
    found = varlen_attention(*given, window=window, document_starts=starts)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(found, given, grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_varlen_check_finds_wrong_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(CPU, torch.bfloat16, 4, 2, 16)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", dense_varlen)
    with torch.no_grad():  # as in generation
        assert varlen_fault(shape) is None
    for other in (lambda window: (window[0] + 1, 0), lambda window: (-1, 0)):

        def wrong(*inputs: Any, window_size: Any, other: Any = other, enable_gqa: bool = False) -> Tensor:
            return dense_varlen(*inputs, window_size=other(window_size), enable_gqa=enable_gqa)

        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
        assert "has a relative error of" in (varlen_fault(shape) or "")


def test_varlen_needs_half_types_on_cuda() -> None:
    assert why_not_varlen(make_shape(torch.bfloat16)) == "it does not exist on cpu"
    on_cuda = make_shape(torch.float32, device=torch.device("cuda"))
    assert "it supports bfloat16 and float16" in (why_not_varlen(on_cuda) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
def test_varlen_passes_its_check_on_cuda(groups: int) -> None:
    assert why_not_varlen(make_shape(torch.bfloat16, groups, torch.device("cuda"))) is None
