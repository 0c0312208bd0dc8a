"""Compiles our Triton kernels for a Hopper GPU, on a machine without one, and reports registers, spills and loads.

The launchers run on meta tensors at the sizes of real models, so types, constants, warps and divisibility are those of a
real launch; only the launch is skipped. This is a separate program because its process must not interpret the kernels:
`python -m tests.kernels.triton.compiled`, in an environment without TRITON_INTERPRET. It prints one line of JSON per
kernel, then one line with the names of all kernels."""

import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import megalite.kernels.triton
from tests.kernels.triton.real_sizes import CALLS

MULTIPROCESSORS = 132  # of an H100


@dataclass(frozen=True)
class Compiled:
    """One kernel with the arguments of one launch."""

    call: str
    kernel: str
    warps: int
    registers: int  # per thread
    stack: int  # bytes per thread; spilled registers are stored here
    local: int
    loads: Mapping[int, int]  # loads from global memory: bits per thread -> number of instructions
    stores: Mapping[int, int]


class Hopper:
    """The part of a driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def entry_kernels() -> Iterator[str]:
    """Return the package's kernels: the jitted functions that no other kernel calls."""
    kernels: dict[str, Any] = {}
    for module in pkgutil.iter_modules(megalite.kernels.triton.__path__):
        loaded = importlib.import_module(f"megalite.kernels.triton.{module.name}")
        kernels |= {f"{k.__module__}.{k.__name__}": k for k in vars(loaded).values() if isinstance(k, JITFunction)}
    called = {
        f"{callee.__module__}.{callee.__name__}"
        for kernel in kernels.values()
        for name in kernel.fn.__code__.co_names
        if isinstance(callee := kernel.fn.__globals__.get(name), JITFunction)
    }
    templates = {name for name, kernel in kernels.items() if "UPDATE" in kernel.arg_names}
    yield from sorted(kernels.keys() - called - templates)


def describe(call: str, kernel: JITFunction, compiled: Any) -> Compiled:
    """Return the machine code's resources from cuobjdump, and the widths of memory accesses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    return Compiled(
        call=call,
        kernel=f"{kernel.__module__}.{kernel.__name__}",
        warps=compiled.metadata.num_warps,
        registers=used["REG"],
        stack=used["STACK"],
        local=used["LOCAL"],
        loads=widths("ld.global", compiled.asm["ptx"]),
        stores=widths("st.global", compiled.asm["ptx"]),
    )


def widths(instruction: str, ptx: str) -> dict[int, int]:
    """Return bits per thread -> number of such instructions; `ld.global.v4.b32` has 128 bits. Copies to shared memory are
    loads too."""
    found: Counter[int] = Counter()
    for count, bits in re.findall(rf"\b{re.escape(instruction)}\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx):
        found[int(count or 1) * int(bits)] += 1
    if instruction == "ld.global":
        copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global [^;]*?, 0x([0-9a-f]+)", ptx)
        found.update(8 * int(size, 16) for size in copies)
    return dict(found)


def compile_all(calls: Mapping[str, Callable[[], object]]) -> Iterator[Compiled]:
    """Yield every kernel that the calls launch, each variant once."""
    launched: list[tuple[JITFunction, Any]] = []

    def compile_only(kernel: JITFunction, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            launched.append((kwargs.get("UPDATE", kernel), kernel.warmup(*args, grid=grid, **kwargs)))

        return launch

    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    described: list[Any] = []
    for name, call in calls.items():
        launched.clear()
        call()
        for kernel, compiled in launched:
            if not any(compiled is known for known in described):
                described.append(compiled)
                yield describe(name, kernel, compiled)


if __name__ == "__main__":
    for kernel in compile_all(CALLS):
        print(json.dumps(asdict(kernel)), flush=True)
    print(json.dumps(list(entry_kernels())))
