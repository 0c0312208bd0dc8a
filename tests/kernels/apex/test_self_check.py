"""apex kernels are chosen only if they match torch in a self-check."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.kernels.registry import IMPLEMENTATIONS, Kernels, KernelUse, why_not

CPU = torch.device("cpu")
APEX_OPERATIONS = [operation for operation, backends in IMPLEMENTATIONS.items() if "apex" in backends]
SIZES = {"softmax": 32, "rope": 16}


def uses() -> list[tuple[str, torch.dtype]]:
    return [(name, dtype) for name in APEX_OPERATIONS for dtype in IMPLEMENTATIONS[name]["apex"].dtypes]


@pytest.mark.parametrize("operation, dtype", uses())
def test_correct_kernels_are_used(installed: ModuleType, operation: str, dtype: torch.dtype) -> None:
    kernels = Kernels({operation: "apex"})
    kernels.check(CPU)
    found = kernels.get(operation, device=CPU, dtype=dtype, size=SIZES.get(operation, 40))
    first = found[0] if isinstance(found, tuple) else found
    assert first.__module__ == "megalite.kernels.apex"
    assert [choice.backend for choice in kernels.chosen] == ["apex"]


def _scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*given: Any) -> Any:
        results = function(*given)
        return [1.02 * each for each in results] if isinstance(results, list) else 1.02 * results

    return wrong


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*given: Any) -> None:
        function(*given)
        function(*given)

    return wrong


WRONG = {
    "rmsnorm": ("fused_layer_norm_cuda", "rms_backward_affine", _scaled),
    "layernorm": ("fused_layer_norm_cuda", "forward_affine", _scaled),
    "rope": ("fused_rotary_positional_embedding", "backward_cached", _scaled),
    "softmax": ("scaled_upper_triang_masked_softmax_cuda", "backward", _scaled),
    "cross_entropy": ("xentropy_cuda", "backward", _scaled),
    "weight_grad": ("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp16", _twice),
    "adam": ("amp_C", "multi_tensor_adam", _twice),
    "lamb": ("amp_C", "multi_tensor_lamb_stage1_cuda", _twice),
}


@pytest.mark.parametrize("operation", APEX_OPERATIONS)
def test_wrong_kernels_are_errors(installed: ModuleType, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extension, name, spoil = WRONG[operation]
    module = __import__(extension)
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    implementation = IMPLEMENTATIONS[operation]["apex"]
    use = KernelUse("cpu", implementation.dtypes[-1], SIZES.get(operation, 40))
    reason = why_not(operation, "apex", use)
    assert reason.startswith("apex's kernel differs from torch in its self-check: ")
    with pytest.raises(ConfigError, match=f"kernels: {operation}=apex cannot be used: apex's kernel differs"):
        Kernels({operation: "apex"}).get(operation, device=CPU, dtype=use.dtype, size=use.size)


def test_another_version_of_apex_fails_the_self_check(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of this apex lacks a parameter."""
    module = __import__("fused_layer_norm_cuda")
    real = module.rms_backward_affine
    monkeypatch.setattr(module, "rms_backward_affine", lambda a, b, c, d, e, f: real(a, b, c, d, e, f, False))
    reason = why_not("rmsnorm", "apex", KernelUse("cpu", torch.float32, 16))
    assert reason.startswith("apex's kernel failed in its self-check (") and "\n" not in reason


def test_nan_fails_the_self_check(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("amp_C")
    monkeypatch.setattr(module, "multi_tensor_adam", lambda *given: given[2][1][0].fill_(float("nan")))
    reason = why_not("adam", "apex", KernelUse("cpu", torch.float32, 16))
    assert reason is not None and "a relative error of nan" in reason


def test_self_check_does_not_change_torchs_generator(installed: ModuleType) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert why_not("rmsnorm", "apex", KernelUse("cpu", torch.float32, 16)) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_self_check_runs_once_for_all_flat_buffers(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("amp_C")
    real, calls = module.multi_tensor_adam, []
    monkeypatch.setattr(module, "multi_tensor_adam", lambda *given: (calls.append(1), real(*given)))
    for size in (10**6, 10**7, 10**8):
        assert why_not("adam", "apex", KernelUse("cpu", torch.float32, size)) is None
    assert len(calls) == 1
