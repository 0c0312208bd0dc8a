"""The choice of a kernel: by preference, by request, and the errors."""

import inspect
import re
from types import MappingProxyType
from typing import Any

import pytest
import torch

from megalite.config.compute import ALL_OPERATIONS, KERNELS, OPERATIONS, kernel_requests, unknown_kernels
from megalite.config.errors import ConfigError
from megalite.kernels import layer_ops, registry
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

# Two operations. All their backends use torch's kernels, so that each is available.
NORMS = {
    "torch": Implementation("rmsnorm", "torch", "layer_ops:rms_norm"),
    "triton": Implementation("rmsnorm", "triton", "layer_ops:layer_norm", FLOATS),
    "apex": Implementation(
        *("rmsnorm", "apex", "layer_ops:rms_norm", (torch.float32,)),
        limit=lambda size: "it takes sizes up to 4096" if size > 4096 else None,
    ),
}


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend runs on this CPU; rmsnorm has a kernel of each."""
    monkeypatch.setattr(registry, "why_not_triton", lambda device: None)
    monkeypatch.setattr(registry, "why_not_apex", lambda device: None)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", MappingProxyType({**IMPLEMENTATIONS, "rmsnorm": NORMS}))


def rules(*rows: str) -> Kernels:
    """Build kernels from rules on rmsnorm, each the rest of a YAML mapping."""
    text = "\n".join(f'- {{operation: rmsnorm, device: cpu, because: "rule {n}", {row}}}' for n, row in enumerate(rows))
    return Kernels(preferences=read_preferences(text, "test"))


def chosen(kernels: Kernels, dtype: torch.dtype = torch.float32, size: int = 8) -> tuple[str, str]:
    kernels.get("rmsnorm", device=CPU, dtype=dtype, size=size)
    return kernels.chosen[-1].backend, kernels.chosen[-1].why


def test_every_operation_has_torchs_kernel() -> None:
    assert set(IMPLEMENTATIONS) == set(OPERATIONS)
    for backends in IMPLEMENTATIONS.values():
        assert backends["torch"].dtypes == (torch.float64, *FLOATS)
        assert backends["torch"].limit is None and backends["torch"].extension is None
        assert backends["torch"].load() is not None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_of_an_operation_are_called_alike(operation: str) -> None:
    """All kernels of an operation have the same argument names, order and defaults."""

    def parameters(implementation: Implementation) -> list[list[tuple[str, object]]]:
        loaded = implementation.load()
        functions = loaded if isinstance(loaded, tuple) else (loaded,)
        return [[(each.name, each.default) for each in inspect.signature(f).parameters.values()] for f in functions]

    backends = IMPLEMENTATIONS[operation]
    for backend in set(backends) - {"torch", "apex"}:
        assert parameters(backends[backend]) == parameters(backends["torch"]), backend


def test_one_choice_for_a_use(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, loads = Kernels(), []
    load = Implementation.load
    monkeypatch.setattr(Implementation, "load", lambda self: (loads.append(self.place), load(self))[1])
    for size in (8, 8, 16, 8):
        kernels.get("rmsnorm", device=CPU, dtype=torch.float32, size=size)
    assert loads == ["layer_ops:rms_norm", "layer_ops:rms_norm"]
    assert [choice.use.size for choice in kernels.chosen] == [8, 16]


def test_the_first_of_the_order_that_takes_the_use(everywhere: None) -> None:
    kernels = rules("order: [apex, triton, torch]")
    assert chosen(kernels) == ("apex", "rule 0")
    assert chosen(kernels, size=4097) == ("triton", "rule 0")
    assert chosen(kernels, torch.bfloat16) == ("triton", "rule 0")
    assert chosen(kernels, torch.float64) == ("torch", "rule 0")
    assert chosen(rules("order: [apex]"), torch.float64) == ("torch", "no other backend supports it")


def test_rules_by_type_size_and_device(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = rules(
        "order: [torch]",
        "order: [triton], from_size: 1024, dtypes: [bfloat16, float16]",
        "order: [apex], from_size: 512",
    )
    assert chosen(kernels, size=511) == ("torch", "rule 0")
    assert chosen(kernels, size=512) == ("apex", "rule 2")
    assert chosen(kernels, torch.bfloat16, size=1024) == ("triton", "rule 1")
    assert chosen(kernels, size=1024) == ("apex", "rule 2")
    assert chosen(rules("order: [apex], from_size: 9")) == ("torch", "no rule: torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    text = "".join(
        f'- {{operation: rmsnorm, device: {device}, order: [{backend}], because: "on {device}"}}\n'
        for device, backend in (("cuda", "torch"), ("sm_90", "triton"), ("sm_100", "apex"))
    )
    use = KernelUse("cuda", torch.float32, 8)
    order = read_preferences(text, "test").order("rmsnorm", use, torch.device("cuda", 0))
    assert order == (("triton",), "on sm_90")


def test_what_is_asked_for_serves_every_use(everywhere: None) -> None:
    kernels = Kernels({"rmsnorm": "triton"}, preferences=read_preferences("[]", "test"))
    kernels.check(CPU)
    assert chosen(kernels) == ("triton", "requested")
    assert kernels.get("rmsnorm", device=CPU, dtype=torch.float32, size=8) is layer_ops.layer_norm
    assert kernels.get("layernorm", device=CPU, dtype=torch.float32, size=8) is layer_ops.layer_norm
    assert kernels.chosen[-1].why == "no rule: torch"


def test_one_backend_goes_first_for_all_operations(everywhere: None) -> None:
    kernels = Kernels(kernel_requests(["apex", "layernorm=torch"]), preferences=read_preferences("[]", "test"))
    kernels.check(CPU)
    assert chosen(kernels) == ("apex", "requested for all operations")
    assert kernels.fallback_summary() is None
    for operation in ("layernorm", "swiglu", "geglu", "matmul"):
        kernels.get(operation, device=CPU, dtype=torch.float32, size=8)
    assert kernels.chosen[1].why == "requested"  # by its name
    assert chosen(kernels, torch.bfloat16) == ("torch", "no rule: torch")
    assert chosen(kernels, size=5000) == ("torch", "no rule: torch")
    assert kernels.fallback_summary() == (
        "kernels: not apex but torch for swiglu, geglu, matmul (it has none); torch for rmsnorm (it supports float32, not "
        "bfloat16); torch for rmsnorm (it takes sizes up to 4096)"
    )


def test_a_first_that_cannot_run_here() -> None:
    with pytest.raises(
        ConfigError, match=r"^kernels: apex cannot be used: apex needs a CUDA device, not cpu; remove it$"
    ):
        Kernels({ALL_OPERATIONS: "apex"}).check(CPU)


def test_a_use_that_the_request_does_not_take(everywhere: None) -> None:
    kernels = Kernels({"rmsnorm": "apex"})
    kernels.check(CPU)  # it can run here
    for dtype, size, reason in ((torch.bfloat16, 8, "float32, not bfloat16"), (torch.float32, 5000, "up to 4096")):
        with pytest.raises(ConfigError, match=f"rmsnorm=apex cannot be used: .*{reason}; use rmsnorm=torch"):
            kernels.get("rmsnorm", device=CPU, dtype=dtype, size=size)


@pytest.mark.parametrize("backend", ["triton", "apex"])
def test_a_request_that_cannot_run_here(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, f"why_not_{backend}", lambda device: f"it needs more than a {device}")
    with pytest.raises(ConfigError, match=f"adam={backend} cannot be used: it needs more than a cpu; use adam=torch"):
        Kernels({"adam": backend}).check(CPU)
    assert why_not("adam", backend, KernelUse("cpu", torch.float32, 8)) == "it needs more than a cpu"


def test_an_operation_that_a_backend_has_not() -> None:
    assert backends_of("swiglu") == ["triton", "torch"]
    with pytest.raises(ConfigError, match=r"apex has no swiglu .*; use triton, torch"):
        Kernels({"swiglu": "apex"}).check(CPU)


def test_a_kernel_of_one_launch_is_said_to_fuse(everywhere: None) -> None:
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
def test_wrong_rules_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_preferences(text, "mine.yaml")


def test_the_shipped_rules_name_kernels_that_exist() -> None:
    found = shipped_preferences().rules
    assert {rule.operation for rule in found} == set(OPERATIONS)
    for rule in found:
        assert set(rule.order) <= set(backends_of(rule.operation)), rule
        assert "torch" in rule.order, rule
        assert rule.because.startswith(("assumed: ", "measured ")), rule
        assert set(rule.dtypes) <= {"float32", "bfloat16", "float16"}, rule


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_users_kernel_of_each_operation_can_be_tried(operation: str) -> None:
    """torch's kernel passes as a user's kernel; a failing one is refused with its error."""
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


def test_a_users_kernel_serves_where_it_is_asked_for_and_right() -> None:
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
    for says, facts in others.items():
        refused = pytest.raises(ConfigError, match=f"rmsnorm=mine cannot be used: {says}")
        with registered(KERNELS, "rmsnorm=mine", wrong, **facts), refused:
            Kernels({"rmsnorm": "mine"}).get("rmsnorm", **sizes)
    with registered(KERNELS, "nothing=mine", wrong):
        assert "no operation nothing" in next(unknown_kernels({"nothing": "mine"}))
    assert "no backend mine" in next(unknown_kernels({"rmsnorm": "mine"}))
