"""Every Triton kernel, compiled for a Hopper GPU at the sizes of real models: no spills, and wide loads."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.compiled import widths
from tests.kernels.triton.real_sizes import CALLS

ROOT = Path(__file__).parents[3]
NARROW_LOADS = ("cross_entropy._merge", "elementwise.dropout_mask_kernel")
"""Kernels without wide loads: one reads few numbers per row, the other only row positions."""

FEW_PROGRAMS = ("delta_scan._scan_kernel",)
"""Kernels with one or two programs per multiprocessor, which wait for products rather than memory."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run the program with an empty cache and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiled"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def total_bits(accesses: Mapping[str, int]) -> int:
    return sum(int(width) * count for width, count in accesses.items())


SPILLED = {"add_norm 2048 layer dropout": 96}
"""Bytes per thread that may be spilled: Triton 3.7 spills 88, or 8 without prefetching; 3.6 spills none."""


@pytest.mark.parametrize("call", CALLS)
def test_kernels_do_not_spill_and_use_wide_loads(lines: list[Any], call: str) -> None:
    kernels = [kernel for kernel in lines[:-1] if kernel["call"] == call]
    assert kernels, "this call compiles no new kernel: give it another size"
    for kernel in kernels:
        assert kernel["stack"] <= SPILLED.get(call, 0) and not kernel["local"], kernel
        # A multiprocessor has 65,536 registers; fewer than four warps per scheduler do not keep the memory busy.
        assert 65536 // kernel["registers"] >= 16 * 32 or kernel["kernel"].endswith(FEW_PROGRAMS), kernel
        # Loads of 16 bytes, except for one or two numbers per row.
        if not kernel["kernel"].endswith(NARROW_LOADS):
            assert 3 * kernel["loads"].get("128", 0) * 128 >= 2 * total_bits(kernel["loads"]), kernel


def test_every_kernel_is_compiled(lines: list[Any]) -> None:
    assert lines[-1]
    assert {kernel["kernel"] for kernel in lines[:-1]} == set(lines[-1])


def test_load_widths_are_parsed() -> None:
    ptx = (
        "@%p1 ld.global.v4.b32 { %r1 };\n ld.global.L1::evict_first.v2.b64 {};\nld.global.b16 a;\nst.global.v4.b32 [x];"
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\ncp.async.ca.shared.global [ %r1 ], [ %rd1 ], 0x4;"
    )
    assert widths("ld.global", ptx) == {128: 3, 16: 1, 32: 1}
    assert widths("st.global", ptx) == {128: 1}
