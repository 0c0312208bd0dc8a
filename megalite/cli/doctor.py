"""`megalite doctor`: what is here, whether it works, and what to fix."""

import os
import platform
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

import torch

from megalite.cli.kernels import chosen_kernels
from megalite.cli.output import json_text, notify, show, visible
from megalite.cli.tool_commands import DOCTOR_SECONDS
from megalite.config.errors import ConfigError
from megalite.doctor import devices, host, network, ranks
from megalite.doctor.host import Finding, worst
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed
from megalite.watchdog.processes import usable_cores

HEALTHY, SICK = 0, 1  # exit statuses: no error was found, or one was

_SHARE_OF_PRODUCTS = 0.2
_MOST_RANKS = 4  # that are started on a CPU
_JOB_MINUTES = 2.0  # until a collective of a job is given up


def run(flags: Namespace) -> int:
    """Look, test and report; 0 if there is no error, 1 if there is one."""
    if flags.seconds is not None and not 0.5 <= flags.seconds <= 600:
        raise ConfigError(f"--seconds is {flags.seconds:g}; the tests take from 0.5 to 600 s, and 5 are good")
    launch = Launch.from_environment()
    device = launch.device(flags.device)
    agreed = False
    try:
        findings = _together(flags, launch, device) if launch.world_size > 1 else _alone(flags, device)
        status = _report(findings, as_json=flags.json, say=show if launch.rank == 0 else lambda text: None)
        agreed = True
        return status
    except ranks.ExchangeFailed as failure:
        # Each rank that noticed: the one that did not is the one to look at.
        notify(f"error: {visible(str(failure))}")
        return SICK
    finally:
        stop_distributed(agreed=agreed)


def _alone(flags: Namespace, device: torch.device) -> Iterator[Finding]:
    yield from _of_host(flags, device)
    if flags.no_self_test:
        return
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    count = gpus if gpus > 1 else max(2, min(_MOST_RANKS, usable_cores()))
    yield from ranks.examine(
        ranks=count,
        device_type="cuda" if gpus > 1 else "cpu",
        host=platform.node(),
        seconds=(1 - _SHARE_OF_PRODUCTS) * (flags.seconds or DOCTOR_SECONDS),
    )


def _together(flags: Namespace, launch: Launch, device: torch.device) -> Iterator[Finding]:
    own: list[Finding] = []
    if launch.local_rank == 0:
        for finding in _of_host(flags, device):
            own.append(finding)
            yield finding
    if flags.no_self_test:
        return
    start_distributed(launch, device, backend="auto", timeout_minutes=_JOB_MINUTES)
    layout = ParallelLayout(dp=launch.world_size)
    world = Topology.create(layout, rank=launch.rank, device=device, timeout_minutes=_JOB_MINUTES).world
    seconds = (1 - _SHARE_OF_PRODUCTS) * (flags.seconds or DOCTOR_SECONDS)
    yield from ranks.examine_job(world, own, host=platform.node(), seconds=seconds)


def _of_host(flags: Namespace, device: torch.device) -> Iterator[Finding]:
    yield from host.examine_versions()
    yield from host.examine(os.environ, gpus=torch.cuda.device_count())
    yield from devices.examine()
    yield from devices.kernel_backends(device)
    yield _chosen(device)
    yield from network.examine(os.environ)
    yield from host.examine_disk(flags.run_dir)
    if not flags.no_self_test:
        yield from devices.examine_products(device, seconds=_SHARE_OF_PRODUCTS * (flags.seconds or DOCTOR_SECONDS))


def _chosen(device: torch.device) -> Finding:
    """`megalite kernels` in a line: backend -> the operations that it would serve."""
    serves: dict[str, list[str]] = {}
    for choice in chosen_kernels(device):
        operations = serves.setdefault(choice.backend, [])
        if choice.operation not in operations:
            operations.append(choice.operation)
    text = "; ".join(f"{backend}: {', '.join(operations)}" for backend, operations in serves.items())
    return Finding(topic=devices.KERNELS, name="chosen", text=text, data=serves)


def _report(findings: Iterable[Finding], *, as_json: bool, say: Callable[[str], None]) -> int:
    """Print findings as they come, or all at the end as JSON; returns the exit status."""
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
    """One finding, below the name of its topic where that is new."""
    title = "" if finding.topic == under else f"{finding.topic}\n" if under is None else f"\n{finding.topic}\n"
    return f"{title}  {finding.level:<8} {finding.name:<15} {finding.text}"


def _summary(found: Sequence[Finding]) -> str:
    """What to fix, the worst first."""
    bad = [finding for level in ("error", "warning") for finding in found if finding.level == level]
    if not bad:
        return "\nwhat to fix: nothing"
    lines = ["", "what to fix"]
    for finding in bad:
        lines.append(f"  {finding.level:<8} {finding.topic}, {finding.name}: {finding.text}")
        lines.append(f"  {'':<8} {finding.remedy}")
    return "\n".join(lines)
