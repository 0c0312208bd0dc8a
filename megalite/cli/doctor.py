"""`megalite doctor` and `megalite kernels`: test this machine or all hosts of a job and list what to fix; list all kernels."""

import os
import platform
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megalite.cli.display import table
from megalite.cli.output import json_text, notify, show, visible
from megalite.cli.tool_commands import DOCTOR_SECONDS
from megalite.config.compute import ALL_OPERATIONS, OPERATIONS, kernel_requests, unknown_kernels
from megalite.config.errors import ConfigError
from megalite.doctor import devices, host, ranks
from megalite.doctor.host import Finding, worst
from megalite.kernels.registry import Kernels, KernelUse, backends_of, kernel_of, why_not, why_not_backend
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed
from megalite.watchdog.processes import usable_cores

HEALTHY, SICK = 0, 1  # exit statuses without and with an error

_PRODUCTS_SHARE = 0.2  # matrix products' share of the test time
_MAX_RANKS = 4  # ranks started on a CPU
_TIMEOUT_MINUTES = 2.0  # timeout of collectives in a job


def run(flags: Namespace) -> int:
    """Examine, test and report. Return 0 without an error, else 1."""
    if flags.seconds is not None and not 0.5 <= flags.seconds <= 600:
        raise ConfigError(f"--seconds is {flags.seconds:g}; the tests take from 0.5 to 600 s, and 5 are good")
    launch = Launch.from_environment()
    device = launch.device(flags.device)
    agreed = False
    try:
        findings = _job_findings(flags, launch, device) if launch.world_size > 1 else _local_findings(flags, device)
        status = _report(findings, as_json=flags.json, say=show if launch.rank == 0 else lambda text: None)
        agreed = True
        return status
    except ranks.ExchangeFailed as failure:
        # Every rank that detects the failure prints it: the rank that stays silent is the faulty one.
        notify(f"error: {visible(str(failure))}")
        return SICK
    finally:
        stop_distributed(agreed=agreed)


def _local_findings(flags: Namespace, device: torch.device) -> Iterator[Finding]:
    yield from _host_findings(flags, device)
    if flags.no_self_test:
        return
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    count = gpus if gpus > 1 else max(2, min(_MAX_RANKS, usable_cores()))
    yield from ranks.examine(
        ranks=count,
        device_type="cuda" if gpus > 1 else "cpu",
        host=platform.node(),
        seconds=(1 - _PRODUCTS_SHARE) * (flags.seconds or DOCTOR_SECONDS),
    )


def _job_findings(flags: Namespace, launch: Launch, device: torch.device) -> Iterator[Finding]:
    own: list[Finding] = []
    if launch.local_rank == 0:
        for finding in _host_findings(flags, device):
            own.append(finding)
            yield finding
    if flags.no_self_test:
        return
    start_distributed(launch, device, backend="auto", timeout_minutes=_TIMEOUT_MINUTES)
    layout = ParallelLayout(dp=launch.world_size)
    world = Topology.create(layout, rank=launch.rank, device=device, timeout_minutes=_TIMEOUT_MINUTES).world
    seconds = (1 - _PRODUCTS_SHARE) * (flags.seconds or DOCTOR_SECONDS)
    yield from ranks.examine_job(world, own, host=platform.node(), seconds=seconds)


def _host_findings(flags: Namespace, device: torch.device) -> Iterator[Finding]:
    yield from host.examine_versions()
    yield from host.examine(os.environ, gpus=torch.cuda.device_count())
    yield from devices.examine()
    yield from devices.kernel_backends(device)
    yield _chosen(device)
    yield from host.examine_network(os.environ)
    yield from host.examine_disk(flags.run_dir)
    if not flags.no_self_test:
        yield from devices.examine_products(device, seconds=_PRODUCTS_SHARE * (flags.seconds or DOCTOR_SECONDS))


def _chosen(device: torch.device) -> Finding:
    """Return the chosen kernels in one finding: backend -> operations."""
    serves: dict[str, list[str]] = {}
    for choice in chosen_kernels(device):
        operations = serves.setdefault(choice["backend"], [])
        if choice["operation"] not in operations:
            operations.append(choice["operation"])
    text = "; ".join(f"{backend}: {', '.join(operations)}" for backend, operations in serves.items())
    return Finding(topic=devices.KERNELS, name="chosen", text=text, data=serves)


def _report(findings: Iterable[Finding], *, as_json: bool, say: Callable[[str], None]) -> int:
    """Print each finding at once, or all of them at the end as JSON. Return the exit status."""
    found: list[Finding] = []
    for finding in findings:
        if not as_json:
            say(visible(_line(finding, under=found[-1].topic if found else None)))
        found.append(finding)
    level = worst(found)
    if as_json:
        say(json_text({"verdict": level, "findings": [asdict(finding) for finding in found]}))
    else:
        say(visible(_summary(found)))
    return SICK if level == "error" else HEALTHY


def _line(finding: Finding, *, under: str | None) -> str:
    """Return the line of a finding, below a title if its topic differs from `under`, the previous topic."""
    title = "" if finding.topic == under else f"{finding.topic}\n" if under is None else f"\n{finding.topic}\n"
    return f"{title}  {finding.level:<8} {finding.name:<15} {finding.text}"


def _summary(found: Sequence[Finding]) -> str:
    """Return the problems with their remedies, errors first."""
    bad = [finding for level in ("error", "warning") for finding in found if finding.level == level]
    if not bad:
        return "\nwhat to fix: nothing"
    lines = ["", "what to fix"]
    for finding in bad:
        lines.append(f"  {finding.level:<8} {finding.topic}, {finding.name}: {finding.text}")
        lines.append(f"  {'':<8} {finding.remedy}")
    return "\n".join(lines)


_SIZES: Mapping[str, int] = {
    "bias_gelu": 16384,
    "swiglu": 11008,
    "geglu": 11008,
    "rope": 128,
    "cross_entropy": 50304,
    **dict.fromkeys(("adam", "lamb", "l2norm"), 1 << 24),
}
"""Operation -> size of the last dimension or flat buffer in a model of hidden size 4096, if it is not 4096."""

_FLAT = ("adam", "lamb")  # operations on the fp32 state of the optimizer


@dataclass(frozen=True)
class KernelRow:
    operation: str
    backend: str
    reason: str | None  # why the backend cannot run on this device; None if it can
    not_for: Mapping[str, str]  # dtype that the backend does not support -> reason


def run_kernels(flags: Namespace) -> int:
    device = _device(flags.device)
    rows = [row for operation in OPERATIONS for row in _kernel_rows(operation, device.type)]
    chosen = chosen_kernels(device, [flags.kernels] if flags.kernels else [])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if flags.json:
        lists = {"kernels": [asdict(row) for row in rows], "chosen": chosen}
        show(json_text({"device": name, "torch": torch.__version__, **lists}))
    else:
        show(f"device {name}, torch {torch.__version__}\n\n{_kernel_table(rows)}\n\n{_chosen_table(chosen)}")
    return 0


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _uses(operation: str, device: str) -> list[KernelUse]:
    """Return the uses of an operation in a model of hidden size 4096."""
    dtypes = (torch.float32,) if operation in _FLAT else (torch.bfloat16, torch.float32)
    return [KernelUse(device, dtype, _SIZES.get(operation, 4096)) for dtype in dtypes]


def _kernel_rows(operation: str, device: str) -> list[KernelRow]:
    rows = []
    for backend in backends_of(operation):
        unusable = why_not_backend(backend, device) or kernel_of(operation, backend).why_not_here()
        refused = {}
        if unusable is None:
            reasons = {str(use.dtype): why_not(operation, backend, use) for use in _uses(operation, device)}
            refused = {dtype: reason for dtype, reason in reasons.items() if reason is not None}
        rows.append(KernelRow(operation, backend, unusable, refused))
    return rows


def chosen_kernels(device: torch.device, kernels_setting: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return operation, size, dtype, backend and reason of each choice, under a setting of `kernels`."""
    requests = kernel_requests([*kernels_setting])
    for problem in unknown_kernels(requests):
        raise ConfigError(problem)
    kernels = Kernels(requests)
    kernels.check(device)
    for operation in OPERATIONS:
        for use in _uses(operation, device.type):
            kernels.get(operation, device=device, dtype=use.dtype, size=use.size)
    found = []
    for choice in kernels.chosen:
        why = choice.why
        if choice.why_not_requested is not None:
            why += f"; {requests[ALL_OPERATIONS]}: {choice.why_not_requested}"
        at = {"size": choice.use.size, "dtype": str(choice.use.dtype)}
        found.append({"operation": choice.operation, **at, "backend": choice.backend, "why": why})
    return found


def _kernel_table(rows: Sequence[KernelRow]) -> str:
    cells = [("operation", "backend", "status")]
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].operation != row.operation
        refused = "; ".join(f"not {dtype.removeprefix('torch.')}: {reason}" for dtype, reason in row.not_for.items())
        status = row.reason or ("ready" if not refused else f"ready; {refused}")
        cells.append((row.operation if first else "", row.backend, status))
    return "\n".join(table(cells))


def _chosen_table(chosen: Sequence[Mapping[str, Any]]) -> str:
    cells = [["chosen for", "size", "type", "backend", "because"]]
    cells += [[str(value).removeprefix("torch.") for value in choice.values()] for choice in chosen]
    return "\n".join(table(cells, right={1}))
