"""Ranks in separate network namespaces, connected by links of a given rate: a slow network on one machine.

Each rank's namespace has one interface, `eth0`, a veth connected to a bridge in another namespace. Token buckets (tbf) at
both ends of each link limit both directions. Sent and received bytes are the interface's counters. Latency and loss
cannot be added without the kernel's netem."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common

_SUBNET = "10.77.0"


def unavailable() -> str | None:
    """Reason why such links cannot be created on this machine, or None."""
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no {program} here (package iproute2)"
    probe = _name("probe")
    try:
        _run("ip", "netns", "add", probe)
        _inside(probe, "tc", *_tbf("lo", 100.0))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        _remove()
    return None


class ShapedLinks:
    """Namespaces of `ranks` ranks, as a context manager; removes them at the end, and namespaces of ended processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._switch = ranks, _name("switch")

    def __enter__(self) -> "ShapedLinks":
        _remove()
        _run("ip", "netns", "add", self._switch)
        _inside(self._switch, "ip", "link", "add", "br0", "type", "bridge")
        _inside(self._switch, "ip", "link", "set", "br0", "up")
        for rank in range(self.ranks):
            name = _name(f"rank{rank}")
            _run("ip", "netns", "add", name)
            _run(
                *("ip", "link", "add", "eth0", "netns", name, "type", "veth"),
                *("peer", "name", f"port{rank}", "netns", self._switch),
            )
            _inside(self._switch, "ip", "link", "set", f"port{rank}", "master", "br0", "up")
            _inside(name, "ip", "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _inside(name, "ip", "link", "set", interface, "up")
        return self

    def __exit__(self, *_: object) -> None:
        _remove()

    def set_rate(self, megabits: float | None) -> None:
        """Limit the rate of each link in each direction; None removes the limit."""
        for rank in range(self.ranks):
            for namespace, device in ((_name(f"rank{rank}"), "eth0"), (self._switch, f"port{rank}")):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _inside(namespace, "tc", "qdisc", "del", "dev", device, "root")
                if megabits is not None:
                    _inside(namespace, "tc", *_tbf(device, megabits))

    def start(self, rank: int, argv: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a process in the namespace of one rank with torchrun's environment variables."""
        number, network = (str(rank), {"MASTER_ADDR": address(0), "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"})
        environment = common.environment(RANK=number, LOCAL_RANK=number, WORLD_SIZE=str(self.ranks), **network)
        return subprocess.Popen(["ip", "netns", "exec", _name(f"rank{rank}"), *argv], env=environment, text=True)


def sent_and_received(interface: str = "eth0") -> tuple[int, int]:
    """Bytes sent and received on an interface of this process's namespace, including headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise ValueError(f"there is no interface {interface} here")


def address(rank: int) -> str:
    return f"{_SUBNET}.{rank + 1}"


def _tbf(device: str, megabits: float) -> tuple[str, ...]:
    rate = ("rate", f"{megabits:g}mbit", "burst", "128kb", "latency", "100ms")
    return ("qdisc", "add", "dev", device, "root", "tbf", *rate)


def _name(what: str) -> str:
    """Name of a namespace; includes the process id, as several benchmarks may run at a time."""
    return f"mgl-{os.getpid()}-{what}"


def _remove() -> None:
    """Remove namespaces of this process and of ended ones, and kill ranks in them: they survive a killed benchmark."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    for name, owner in re.findall(r"^(mgl-(\d+)-\w+)", listed, re.MULTILINE):
        if int(owner) != os.getpid() and Path("/proc", owner).exists():
            continue
        inside = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True).stdout
        for number in map(int, inside.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _inside(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
