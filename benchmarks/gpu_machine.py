"""What a result was measured on: device, driver, versions, clocks."""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from gpu_legs import Row, Task

CLOCKS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def describe(device: torch.device) -> dict[str, Any]:
    """For the JSON. `clocks` are those of this moment: describe at the beginning and again at the end."""
    found: dict[str, Any] = {
        "device": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in ("triton", "transformers", "numpy", "liger-kernel")},
        "apex": importlib.util.find_spec("apex") is not None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"sm_{properties.major}{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "l2_mib": properties.L2_cache_size / 2**20,
            "driver": query("driver_version").get("driver_version"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "clocks": clocks(),
        }
    else:
        found["device"] = f"{_processor()}, {os.cpu_count()} cores"
    return found


def rows(task: Task) -> Iterator[Row]:
    """What this machine is."""
    yield {"part": "machine", "when": task["when"], **describe(torch.device(task["device"]))}


def clocks() -> dict[str, str]:
    """Clocks, power and temperature at this moment, in nvidia-smi's units; empty where it is not there."""
    # The second is the older drivers' name of the first; a name that is not known would spoil the whole query.
    return query(*CLOCKS) | (query("clocks_event_reasons.active") or query("clocks_throttle_reasons.active"))


def query(*names: str) -> dict[str, str]:
    """nvidia-smi's fields of the first GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(names, values)) if done.returncode == 0 and len(values) == len(names) else {}


def short(machine: dict[str, Any]) -> str:
    """`NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11.0, triton 3.6.0`."""
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    return f"{machine['device']}{driver}, torch {machine['torch']}, triton {machine['packages']['triton']}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
