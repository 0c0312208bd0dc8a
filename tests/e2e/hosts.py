"""Two "hosts" on one machine: network namespaces, each with an address, connected by a veth pair that can be cut."""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.programs import REPOSITORY

INTERFACE = "eth0"


def unavailable() -> str | None:
    """Reason why such hosts cannot be created on this machine, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip program here (package iproute2)"
    name = f"mgl-probe-{uuid.uuid4().hex[:6]}"
    made = _ip("netns", "add", name)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    pair = _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", "eth1")
    _ip("netns", "del", name)
    return f"no veth pair can be made here: {pair.stderr.strip()}" if pair.returncode else None


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    name: str
    address: str

    def start(self, command: Sequence[str | Path], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on this host; its output goes to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *map(str, command)],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def link(self, state: str) -> None:
        """Set this host's end of the link `down` or `up`."""
        done = _ip("-n", self.name, "link", "set", INTERFACE, state)
        assert done.returncode == 0, done.stderr

    def kill(self) -> None:
        """Simulate a power loss: kill all processes of the host."""
        for pid in _ip("netns", "pids", self.name).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create two hosts, and remove them at the end."""
    tag = uuid.uuid4().hex[:6]
    hosts = tuple(Host(f"mgl-{tag}-{letter}", f"10.78.0.{number}") for number, letter in enumerate("ab", 1))
    first, second = hosts
    try:
        for host in hosts:
            _must("netns", "add", host.name)
        _must(
            *("link", "add", INTERFACE, "netns", first.name, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", second.name),
        )
        for host in hosts:
            _must("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _must("-n", host.name, "link", "set", interface, "up")
        yield first, second
    finally:
        for host in hosts:
            _ip("netns", "del", host.name)


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def _must(*words: str) -> None:
    done = _ip(*words)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
