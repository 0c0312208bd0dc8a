"""Names, interfaces and adapters: what gloo and NCCL would use between nodes."""

import fcntl
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from megalite.doctor.host import Finding

TOPIC = "network"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SHOWN = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_", "FI_")
"""Beginnings of variables that change how ranks reach each other."""
_ADDRESS_OF = 0x8915
"""SIOCGIFADDR."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of this host."""

    name: str
    address: str | None
    """IPv4; None if it has none."""
    is_up: bool
    megabits: int | None
    """Per second, where the driver says it."""

    @property
    def is_loopback(self) -> bool:
        """It leads to this host alone."""
        return self.name == "lo" or (self.address or "").startswith("127.")

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gbit/s" if self.megabits else ""
        return f"{self.name} ({self.address or 'no IPv4 address'}{'' if self.is_up else ', down'}{speed})"


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on the host's name, its interfaces, the variables that choose among them, and adapters.

    Args:
        environment: of the process.
    """
    found = interfaces()
    usable = [each for each in found if each.is_up and each.address and not each.is_loopback]
    names = ", ".join(map(str, found)) or "none"
    data = {"interfaces": [vars(each) for each in found]}
    yield Finding(topic=TOPIC, name="interfaces", text=names, data=data)
    yield host_name(socket.gethostname(), usable, environment)
    if GLOO in environment:
        yield chosen(GLOO, environment[GLOO], found, exact=True)
    if NCCL in environment:
        yield chosen(NCCL, environment[NCCL], found, exact=False)
    if environment.get("MASTER_ADDR"):
        yield master(environment["MASTER_ADDR"])
    given = {name: value for name, value in sorted(environment.items()) if name.startswith(SHOWN)}
    if given:
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        yield Finding(topic=TOPIC, name="variables", text=text, data=given)
    yield adapters(Path("/sys/class/infiniband"))


def interfaces(folder: Path = Path("/sys/class/net")) -> list[Interface]:
    """Of this host, in the system's order."""
    found = []
    for _, name in socket.if_nameindex():
        state, speed = _read(folder / name / "operstate"), _read(folder / name / "speed")
        address = _address_of(name)
        found.append(
            Interface(
                name=name,
                address=address,
                # Loopback and tunnels say `unknown`; an address tells that they are in use.
                is_up=state == "up" or (state != "down" and address is not None),
                megabits=int(speed) if speed.isdecimal() and int(speed) < 1 << 31 else None,
            )
        )
    return found


def host_name(
    name: str,
    usable: Sequence[Interface],
    environment: Mapping[str, str],
    *,
    resolve: Callable[[str], str] = socket.gethostbyname,
) -> Finding:
    """gloo binds to the address that the host's own name stands for: one of loopback works within this node alone.

    Args:
        name: of this host.
        usable: its interfaces that lead elsewhere.
        environment: of the process.
        resolve: name -> IPv4 address.
    """
    address: str | None
    try:
        address = resolve(name)
    except OSError:
        address = None
    data = {"name": name, "address": address}
    text = f"{name} is {address}" if address else f"{name} stands for no address"
    leads_nowhere = address is None or ip_address(address).is_loopback
    if not leads_nowhere or environment.get(GLOO):
        return Finding(topic=TOPIC, name="host name", text=text, data=data)
    if not usable:
        text += ", and no interface leads to other hosts: one node alone"
        return Finding(topic=TOPIC, name="host name", text=text, data=data)
    return Finding(
        topic=TOPIC,
        name="host name",
        level="warning",
        text=f"{text}: gloo would bind to loopback, and other nodes could not reach it",
        remedy=f"for several nodes: export {GLOO}={usable[0].name}, or give {name} its address in /etc/hosts",
        data=data,
    )


def chosen(variable: str, value: str, found: Sequence[Interface], *, exact: bool) -> Finding:
    """Which interfaces a variable chooses.

    Args:
        variable: GLOO or NCCL.
        value: names with commas between; NCCL's may begin with `^` (all but these) or `=` (whole names).
        found: those of this host.
        exact: names are whole; else beginnings of names.
    """
    names = [interface.name for interface in found]
    excludes, rest = value.startswith("^"), value.lstrip("^=")
    exact = exact or value.startswith(("=", "^="))
    words = [word.strip() for word in rest.split(",") if word.strip()]
    if exact and not excludes and variable == GLOO:
        missing = [word for word in words if word not in names]
    else:
        missing = []
    fit = [name for name in names if any(name == word or (not exact and name.startswith(word)) for word in words)]
    if excludes:
        fit = [name for name in names if name not in fit]
    data = {"value": value, "interfaces": fit}
    if missing or not fit:
        what = ", ".join(missing) or value
        return Finding(
            topic=TOPIC,
            name=variable,
            level="error",
            text=f"{value}, and this host has no {what} (it has {', '.join(names)})",
            remedy=f"export {variable}={next((i.name for i in found if not i.is_loopback and i.is_up), 'lo')}, or unset it",
            data=data,
        )
    down = [interface.name for interface in found if interface.name in fit and not interface.is_up]
    if len(down) == len(fit):
        remedy = f"bring it up, or choose another with {variable}"
        text = f"{value}, which is down"
        return Finding(topic=TOPIC, name=variable, level="error", text=text, remedy=remedy, data=data)
    return Finding(topic=TOPIC, name=variable, text=f"{value}: {', '.join(fit)}", data=data)


def master(address: str, *, resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    """Whether the name where the ranks are to meet stands for an address."""
    try:
        found = resolve(address)
    except OSError as error:
        return Finding(
            topic=TOPIC,
            name="MASTER_ADDR",
            level="error",
            text=f"{address} stands for no address ({error.strerror or error})",
            remedy="give the address of the first node, or mend its name in DNS or /etc/hosts",
            data={"value": address, "address": None},
        )
    text = address if found == address else f"{address} is {found}"
    return Finding(topic=TOPIC, name="MASTER_ADDR", text=text, data={"value": address, "address": found})


def adapters(folder: Path) -> Finding:
    """InfiniBand and RoCE adapters, and ports of them that are not up."""
    try:
        ports = sorted(folder.glob("*/ports/*/state"))
    except OSError:
        ports = []
    states = {f"{path.parts[-4]}:{path.parts[-2]}": _read(path).partition(": ")[2] or "unknown" for path in ports}
    if not states:
        text = "none: NCCL and gloo use the interfaces above"
        return Finding(topic=TOPIC, name="infiniband", text=text, data={"ports": {}})
    idle = [name for name, state in states.items() if state != "ACTIVE"]
    text = ", ".join(f"{name} {state}" for name, state in states.items())
    if idle:
        remedy = f"NCCL leaves out or waits for {', '.join(idle)}: mend the link, or name the others in NCCL_IB_HCA"
        return Finding(
            topic=TOPIC, name="infiniband", level="warning", text=text, remedy=remedy, data={"ports": states}
        )
    return Finding(topic=TOPIC, name="infiniband", text=text, data={"ports": states})


def _address_of(name: str) -> str | None:
    """IPv4 address of an interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
