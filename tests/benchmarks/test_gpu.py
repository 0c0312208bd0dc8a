"""The GPU benchmark without a GPU: a complete dry run, and the functions that judge its numbers."""

import contextlib
import io
import json
import math
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import breakdown as gpu_profile
from benchmarks.gpu import child as gpu_child
from benchmarks.gpu import flat
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu import run as gpu
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.kernels import rules, write
from benchmarks.gpu.legs import Row
from benchmarks.gpu.operations import Shape
from benchmarks.gpu.report import profiles_table, steps_table
from megalite.kernels import triton
from megalite.kernels.registry import KernelUse, read_preferences

CPU = torch.device("cpu")
CASES = sorted(flat.CASES)
TRIED = {"rmsnorm", "swiglu", "cross_entropy", "softmax", "weight_grad", "adam"}
"""Cases of the dry run: Triton's interpreter is slow, and the other cases use the same code."""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Run all parts of the benchmark once, as a dry run."""
    folder = tmp_path_factory.mktemp("gpu")
    files = folder / "gpu.json", folder / "preferences.yaml"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        tasks = gpu_kernels.kernel_tasks
        patch.setattr(gpu, "kernel_tasks", lambda **how: [task for task in tasks(**how) if task["case"] in TRIED])
        code = gpu.main(["--dry", "--json", str(files[0]), "--write-preferences", str(files[1])])
    result = json.loads(files[0].read_text())
    return SimpleNamespace(code=code, text=printed.getvalue(), result=result, preferences=files[1])


def test_dry_run_measures_every_part(dry: SimpleNamespace) -> None:
    rows = dry.result["rows"]
    assert dry.code == 0 and dry.result["dry"]
    assert dry.result["command"].startswith("python -m benchmarks.gpu.run --dry")
    assert {row["part"] for row in rows} == {"machine", "ceilings", "kernels", "step"}
    assert dry.result["gpu"]["torch"] == torch.__version__
    assert {row["what"] for row in rows if row["part"] == "ceilings"} == {"copy", "gemm", "attention"}
    runs = [row for row in rows if row["part"] == "step" and "tokens_per_second" in row]
    assert {row["who"] for row in runs} == {"megalite", "plain torch, compiled", "Hugging Face GPT-2"}
    assert {row["accumulation"] for row in runs if row["who"] == "megalite"} == {1, 2}
    assert all(math.isfinite(row["last_loss"]) for row in runs)


def test_dry_run_checks_each_kernel(dry: SimpleNamespace) -> None:
    """Also Triton's, interpreted: errors are within rounding, and two runs are bitwise equal."""
    kernels = [row for row in dry.result["rows"] if row["part"] == "kernels" and "ms" in row]
    assert {row["case"] for row in kernels} == TRIED
    assert {row["operation"] for row in kernels if row["backend"] == "triton"} == TRIED - {"weight_grad", "softmax"}
    for row in kernels:
        assert row["bitwise"], row
        # The interpreter truncates where a device rounds; on a CPU the weight gradient is rounded to bf16.
        assert row["error_steps"] < 1.0 or row["case"] in ("weight_grad", "fp8"), row


def test_dry_run_profiles_a_step(dry: SimpleNamespace) -> None:
    profile = [row for row in dry.result["rows"] if "profile" in row]
    assert [row["profile"] for row in profile] == list(gpu_profile.ROWS)
    assert sum(row["share"] for row in profile) == pytest.approx(1.0, abs=1e-6)
    assert {row["profile"] for row in profile if row["ms"] > 0} >= {"GEMM", "attention", "cross-entropy", "optimizer"}


def test_dry_run_prints_tables_and_writes_preferences(dry: SimpleNamespace) -> None:
    for title in ("Ceilings", "Kernels", "Profile: megalite", "Steps", "A dry run"):
        assert f"\n{title}" in f"\n{dry.text}"
    kernel = next(row for row in dry.result["rows"] if "copy_ms" in row)
    line = next(line for line in dry.text.splitlines() if line.startswith(kernel["case"]))
    assert line.split()[11] == f"{100 * kernel['copy_ms'] / kernel['ms']:.0f}"
    table = read_preferences(dry.preferences.read_text(), "written")
    order, because = table.order("adam", KernelUse("cpu", torch.float32, 10**6), CPU)
    assert order[0] == "torch" and because.startswith("measured on a dry run on")


def test_invalid_arguments_are_errors_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "no CUDA device; --dry" in capsys.readouterr().err
    assert gpu.main(["--dry", "--parts", "step", "--write-preferences", "x"]) == 2
    assert "add it to --parts" in capsys.readouterr().err


def test_every_operation_of_the_registry_has_a_case() -> None:
    assert gpu_kernels.without_case() == []


def test_legs_start_with_the_most_important_and_cover_all_parts() -> None:
    """Each task names a part that its process can import, and the flags of steps are valid."""
    legs = gpu.legs_of(gpu.parse(["--fp8"]), "cuda")
    assert [leg.name for leg in legs][:3] == ["ceilings", "megalite GPT 1.3B", "kernels"]
    assert {task["part"] for leg in legs for task in leg.tasks} == set(gpu_child.PARTS)
    flags = [task["flags"] for leg in legs for task in leg.tasks if "flags" in task]
    for extra in flags:
        if "--fp8" not in extra:  # validated only on a GPU that supports it
            gpu_step.config_of("GPT 1.3B", device="cpu", microbatch=8, accumulation=8, extra=extra)


@pytest.mark.parametrize("case", CASES)
def test_errors_do_not_depend_on_the_chunk_size(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain kernels have errors within rounding; an output with an error of 5 % is reported."""
    operation = flat.CASES[case]
    torch.manual_seed(0)
    size = 64 if case == "rope" else 20
    tensors = operation.make(Shape(24, size), operation.dtype, CPU)
    plain = operation.plain if operation.fused else gpu_kernels.IMPLEMENTATIONS[case]["torch"].load()
    found = operation.outputs(plain, tensors)
    error = gpu_kernels.errors(operation, tensors, found)
    # On a CPU torch rounds the product to bf16 before it adds it to the fp32 gradient.
    assert error.steps < 4.0 or case == "weight_grad"
    assert error.largest < 4 * torch.finfo(operation.dtype).eps
    monkeypatch.setattr(gpu_kernels, "CHUNK", 200)
    assert gpu_kernels.errors(operation, tensors, found).relative == pytest.approx(error.relative, rel=1e-6)
    for name, value in found.items():
        scaled = gpu_kernels.errors(operation, tensors, {**found, name: value * 1.05})
        assert scaled.worst == name
        assert scaled.relative == pytest.approx(0.05, rel=0.2)


def test_nan_and_differing_runs_are_rejected() -> None:
    row, of_torch = {"error_steps": float("nan"), "bitwise": True}, {"error_steps": 0.3}
    assert gpu_kernels.acceptable(row, of_torch) is not None
    assert gpu_kernels.acceptable({**row, "error_steps": 0.72}, of_torch) is None
    assert gpu_kernels.acceptable({**row, "error_steps": 0.73}, of_torch) is not None
    assert gpu_kernels.acceptable({**row, "error_steps": 0.1, "bitwise": False}, None) == "two runs differ"


def kernel_row(backend: str, size: int, ms: float, **more: Any) -> Row:
    row = {"case": "swiglu", "operation": "swiglu", "backend": backend, "rows": 64, "size": size, "dtype": "bfloat16"}
    return {**row, "ms": ms, "error_steps": 0.3, "bitwise": True, **more}


def test_rules_prefer_fast_kernels_and_reject_wrong_kernels(tmp_path: Path) -> None:
    rows = [
        *(kernel_row("torch", 1024, 1.0), kernel_row("triton", 1024, 0.99)),  # not clearly faster
        *(kernel_row("torch", 2048, 2.0), kernel_row("triton", 2048, 0.5), kernel_row("triton", 2048, 0.5)),
        *(kernel_row("torch", 4096, 2.0), kernel_row("triton", 4096, 0.5)),  # the same order: no second rule
        *(kernel_row("torch", 8192, 2.0), kernel_row("triton", 8192, 0.5, bitwise=False)),
        {"operation": "swiglu", "case": "swiglu", "backend": "apex", "size": 8192, "failed": "none"},
        {"part": "kernels", "case": "swiglu", "size": 16384, "failed": "not run: the leg's time is spent"},
    ]
    found = rules(rows, device="sm_90", measured_on="a GPU")
    assert [(rule.get("from_size"), rule["order"]) for rule in found] == [
        (None, ["torch", "triton"]),
        (2048, ["triton", "torch"]),
        (8192, ["torch"]),
    ]
    assert found[1]["because"] == "measured on a GPU: 64 x 2048: triton 1.000 ms, torch 2.000 ms"
    assert found[2]["because"].endswith("torch 2.000 ms; triton refused: two runs differ")
    write(tmp_path / "new.yaml", found)
    table = read_preferences((tmp_path / "new.yaml").read_text(), "new.yaml")
    assert [rule.order for rule in table.rules if rule.operation == "swiglu" and rule.device == "sm_90"] == [
        ("torch", "triton"),
        ("triton", "torch"),
        ("torch",),
    ]
    assert any(rule.operation == "adam" and rule.device == "cuda" for rule in table.rules), "shipped rules stay"


def test_device_time_decides_only_for_large_work() -> None:
    def first(moved: int, **of_torch: float) -> str:
        rows = [kernel_row("torch", 1024, 0.2, bytes=moved, **of_torch)]
        rows.append(kernel_row("triton", 1024, 0.3, bytes=moved, graph_ms=0.1))
        return str(rules(rows, device="sm_90", measured_on="a GPU")[0]["order"][0])

    assert first(1 << 25, graph_ms=0.2) == "triton"
    assert first(1 << 24, graph_ms=0.2) == first(1 << 25) == "torch"


def test_failed_step_has_a_row_but_no_profile() -> None:
    """The step's task requested a profile."""
    row = {"part": "step", "who": "megalite", "model": "GPT 1.3B", "precision": "fp8", "microbatch": 8, "profile": True}
    assert profiles_table([{**row, "failed": "late"}]) == []
    assert steps_table([{**row, "failed": "late"}])[-1].endswith("- late")


def test_every_triton_module_has_a_profile_row() -> None:
    """A kernel without a row would count as other."""
    known = {name for names in gpu_profile.OURS for name in names.split()}
    assert known == {module.name for module in pkgutil.iter_modules(triton.__path__)}
    assert set(gpu_profile.triton_kernels().values()) == set(gpu_profile.OURS.values())
