"""The choice of a kernel by preference or by request, and its errors."""

import inspect
import re
from types import MappingProxyType
from typing import Any

import pytest
import torch

from megalite.config.compute import KERNELS, OPERATIONS, kernel_requests, unknown_kernels
from megalite.config.errors import ConfigError
from megalite.kernels import layer_ops, registry
from megalite.kernels.linear_attention import delta_scan
from megalite.kernels.registry import (
    FLOATS,
    IMPLEMENTATIONS,
    Implementation,
    Kernels,
    KernelUse,
    backends_of,
    read_preferences,
    shipped_preferences,
    why_not,
)
from tests.support.plugins import registered

CPU = torch.device("cpu")

# All backends use torch's kernels, so that each is available.
NORMS = {
    "torch": Implementation("rmsnorm", "torch", "layer_ops:rms_norm"),
    "triton": Implementation("rmsnorm", "triton", "layer_ops:layer_norm", FLOATS),
    "apex": Implementation(
        *("rmsnorm", "apex", "layer_ops:rms_norm", (torch.float32,)),
        limit=lambda size: "it takes sizes up to 4096" if size > 4096 else None,
    ),
}


@pytest.fixture
def all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every backend available on this CPU, each with a kernel for rmsnorm."""
    monkeypatch.setattr(registry, "why_not_triton", lambda device: None)
    monkeypatch.setattr(registry, "why_not_apex", lambda device: None)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", MappingProxyType({**IMPLEMENTATIONS, "rmsnorm": NORMS}))


def kernels_with_rules(*rows: str) -> Kernels:
    """Return kernels with one rule for rmsnorm per row; a row is the end of a YAML mapping."""
    text = "\n".join(f'- {{operation: rmsnorm, device: cpu, because: "rule {n}", {row}}}' for n, row in enumerate(rows))
    return Kernels(preferences=read_preferences(text, "test"))


def choose(kernels: Kernels, dtype: torch.dtype = torch.float32, size: int = 8) -> tuple[str, str]:
    kernels.get("rmsnorm", device=CPU, dtype=dtype, size=size)
    return kernels.chosen[-1].backend, kernels.chosen[-1].why


def test_every_operation_has_a_torch_kernel() -> None:
    assert set(IMPLEMENTATIONS) == set(OPERATIONS)
    for backends in IMPLEMENTATIONS.values():
        assert backends["torch"].dtypes == (torch.float64, *FLOATS)
        assert backends["torch"].limit is None and backends["torch"].extension is None
        assert backends["torch"].load() is not None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_of_an_operation_have_the_same_signature(operation: str) -> None:
    """All kernels of an operation have the same argument names, order and defaults."""

    def parameters(implementation: Implementation) -> list[list[tuple[str, object]]]:
        loaded = implementation.load()
        functions = loaded if isinstance(loaded, tuple) else (loaded,)
        return [[(each.name, each.default) for each in inspect.signature(f).parameters.values()] for f in functions]

    backends = IMPLEMENTATIONS[operation]
    for backend in set(backends) - {"torch", "apex"}:
        assert parameters(backends[backend]) == parameters(backends["torch"]), backend


def test_kernel_is_chosen_once_per_use(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, loads = Kernels(), []
    load = Implementation.load
    monkeypatch.setattr(Implementation, "load", lambda self: (loads.append(self.place), load(self))[1])
    for size in (8, 8, 16, 8):
        kernels.get("rmsnorm", device=CPU, dtype=torch.float32, size=size)
    assert loads == ["layer_ops:rms_norm", "layer_ops:rms_norm"]
    assert [choice.use.size for choice in kernels.chosen] == [8, 16]


def test_first_backend_that_supports_the_use_is_chosen(all_backends: None) -> None:
    kernels = kernels_with_rules("order: [apex, triton, torch]")
    assert choose(kernels) == ("apex", "rule 0")
    assert choose(kernels, size=4097) == ("triton", "rule 0")
    assert choose(kernels, torch.bfloat16) == ("triton", "rule 0")
    assert choose(kernels, torch.float64) == ("torch", "rule 0")
    assert choose(kernels_with_rules("order: [apex]"), torch.float64) == ("torch", "no other backend supports it")


def test_rules_match_by_type_size_and_device(all_backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_with_rules(
        "order: [torch]",
        "order: [triton], from_size: 1024, dtypes: [bfloat16, float16]",
        "order: [apex], from_size: 512",
    )
    assert choose(kernels, size=511) == ("torch", "rule 0")
    assert choose(kernels, size=512) == ("apex", "rule 2")
    assert choose(kernels, torch.bfloat16, size=1024) == ("triton", "rule 1")
    assert choose(kernels, size=1024) == ("apex", "rule 2")
    assert choose(kernels_with_rules("order: [apex], from_size: 9")) == ("torch", "no rule: torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    text = "".join(
        f'- {{operation: rmsnorm, device: {device}, order: [{backend}], because: "on {device}"}}\n'
        for device, backend in (("cuda", "torch"), ("sm_90", "triton"), ("sm_100", "apex"))
    )
    use = KernelUse("cuda", torch.float32, 8)
    order = read_preferences(text, "test").order("rmsnorm", use, torch.device("cuda", 0))
    assert order == (("triton",), "on sm_90")


def test_request_applies_only_to_its_operation(all_backends: None) -> None:
    kernels = Kernels({"rmsnorm": "triton"}, preferences=read_preferences("[]", "test"))
    kernels.check(CPU)
    assert choose(kernels) == ("triton", "requested")
    assert kernels.get("rmsnorm", device=CPU, dtype=torch.float32, size=8) is layer_ops.layer_norm
    assert kernels.get("layernorm", device=CPU, dtype=torch.float32, size=8) is layer_ops.layer_norm
    assert kernels.chosen[-1].why == "no rule: torch"


def test_backend_can_be_requested_for_all_operations(all_backends: None) -> None:
    kernels = Kernels(kernel_requests(["apex", "layernorm=torch"]), preferences=read_preferences("[]", "test"))
    kernels.check(CPU)
    assert choose(kernels) == ("apex", "requested for all operations")
    assert kernels.fallback_summary() is None
    for operation in ("layernorm", "swiglu", "geglu", "matmul"):
        kernels.get(operation, device=CPU, dtype=torch.float32, size=8)
    assert kernels.chosen[1].why == "requested"  # by its operation
    assert choose(kernels, torch.bfloat16) == ("torch", "no rule: torch")
    assert choose(kernels, size=5000) == ("torch", "no rule: torch")
    assert kernels.fallback_summary() == (
        "kernels: not apex but torch for swiglu, geglu, matmul (it has none); torch for rmsnorm (it supports float32, not "
        "bfloat16); torch for rmsnorm (it takes sizes up to 4096)"
    )


def test_unsupported_use_of_a_requested_kernel_is_an_error(all_backends: None) -> None:
    kernels = Kernels({"rmsnorm": "apex"})
    kernels.check(CPU)  # apex is available on this device
    for dtype, size, reason in ((torch.bfloat16, 8, "float32, not bfloat16"), (torch.float32, 5000, "up to 4096")):
        with pytest.raises(ConfigError, match=f"rmsnorm=apex cannot be used: .*{reason}; use rmsnorm=torch"):
            kernels.get("rmsnorm", device=CPU, dtype=dtype, size=size)


@pytest.mark.parametrize("backend", ["triton", "apex"])
def test_unavailable_requested_backend_is_an_error(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, f"why_not_{backend}", lambda device: f"it needs more than a {device}")
    with pytest.raises(ConfigError, match=f"adam={backend} cannot be used: it needs more than a cpu; use adam=torch"):
        Kernels({"adam": backend}).check(CPU)
    assert why_not("adam", backend, KernelUse("cpu", torch.float32, 8)) == "it needs more than a cpu"


def test_request_for_a_missing_kernel_is_an_error() -> None:
    assert backends_of("swiglu") == ["triton", "torch"]
    with pytest.raises(ConfigError, match=r"apex has no swiglu .*; use triton, torch"):
        Kernels({"swiglu": "apex"}).check(CPU)


def test_kernels_of_other_backends_count_as_fused(all_backends: None) -> None:
    where = {"device": CPU, "dtype": torch.float32, "size": 8}
    assert not Kernels().fuses("rmsnorm", **where)
    assert Kernels({"rmsnorm": "triton"}).fuses("rmsnorm", **where)


_RULE = "- {operation: adam, device: cpu, order: [torch], because: b}\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1", "mine.yaml: expected a list of rules, got dict"),
        ("- 3", "mine.yaml, rule 1 takes `key: value` lines, got 3"),
        (_RULE.replace("because: b", ""), "rule 1: because is missing"),
        (_RULE + _RULE.replace("b}", "b, since: 3}"), "rule 2: unknown key since"),
    ],
)
def test_malformed_rules_are_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_preferences(text, "mine.yaml")


def test_shipped_rules_name_existing_kernels() -> None:
    found = shipped_preferences().rules
    assert {rule.operation for rule in found} == set(OPERATIONS)
    for rule in found:
        assert set(rule.order) <= set(backends_of(rule.operation)), rule
        assert "torch" in rule.order, rule
        assert rule.because.startswith(("assumed: ", "measured ")), rule
        assert set(rule.dtypes) <= {"float32", "bfloat16", "float16"}, rule


@pytest.mark.parametrize("operation", OPERATIONS)
def test_user_kernel_of_each_operation_is_self_checked(operation: str) -> None:
    """torch's kernel passes as a user's kernel; a kernel that fails is an error with its message."""
    torchs = IMPLEMENTATIONS[operation]["torch"].load()
    name, sizes = f"{operation}=mine", {"device": CPU, "dtype": torch.float32, "size": 64}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    with registered(KERNELS, name, torchs):
        assert Kernels({operation: "mine"}).get(operation, **sizes) is torchs
    refused = pytest.raises(
        ConfigError, match=rf"{name} cannot be used: mine's kernel failed in its self-check \(not today\)"
    )
    with registered(KERNELS, name, tuple(fail for _ in torchs) if isinstance(torchs, tuple) else fail), refused:
        Kernels({operation: "mine"}).get(operation, **sizes)


def test_user_kernel_is_used_if_requested_and_correct() -> None:
    def wrong(*inputs: Any, **options: Any) -> torch.Tensor:
        return 1.01 * layer_ops.rms_norm(*inputs, **options)

    sizes = {"device": CPU, "dtype": torch.float32, "size": 8}
    with registered(KERNELS, "rmsnorm=mine", layer_ops.rms_norm, dtypes=("float32",)):
        assert [*unknown_kernels(kernel_requests(["rmsnorm=mine"]))] == []
        kernels = Kernels({"rmsnorm": "mine"})
        kernels.check(CPU)
        assert kernels.get("rmsnorm", **sizes) is layer_ops.rms_norm
        assert kernels.summary() == {"rmsnorm": "mine"} and backends_of("rmsnorm")[-1] == "mine"
        assert Kernels().get("rmsnorm", **sizes) is not None
        with pytest.raises(ConfigError, match="rmsnorm=mine cannot be used: it supports float32, not bfloat16"):
            kernels.get("rmsnorm", **{**sizes, "dtype": torch.bfloat16})
        with pytest.raises(ConfigError, match="mine has no swiglu"):
            Kernels({"swiglu": "mine"}).check(CPU)
    others: dict[str, dict[str, Any]] = {
        "mine's kernel differs from torch": {},
        "it runs on cuda, not on cpu": {"devices": ("cuda",)},
    }
    for message, facts in others.items():
        refused = pytest.raises(ConfigError, match=f"rmsnorm=mine cannot be used: {message}")
        with registered(KERNELS, "rmsnorm=mine", wrong, **facts), refused:
            Kernels({"rmsnorm": "mine"}).get("rmsnorm", **sizes)
    refused = pytest.raises(ConfigError, match="self-check: the corrections of the gradients has a relative error")
    with registered(KERNELS, "delta_scan=mine", lambda *inputs: delta_scan(*inputs[:5])), refused:
        Kernels({"delta_scan": "mine"}).get("delta_scan", **sizes)
    with registered(KERNELS, "nothing=mine", wrong):
        assert "no operation nothing" in next(unknown_kernels({"nothing": "mine"}))
    assert "no backend mine" in next(unknown_kernels({"rmsnorm": "mine"}))
