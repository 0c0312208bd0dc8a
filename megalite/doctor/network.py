"""Checks host names, interfaces and adapters that gloo and NCCL use between nodes."""

import fcntl
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from megalite.doctor.host import Finding, finding, read

_found = partial(finding, "network")
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SHOWN = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_", "FI_")  # prefixes of variables that affect the network
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, kw_only=True)
class Interface:
    name: str
    address: str | None  # IPv4; None if it has none
    is_up: bool
    megabits: int | None  # per second; None if the driver does not report it

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo" or (self.address or "").startswith("127.")

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gbit/s" if self.megabits else ""
        return f"{self.name} ({self.address or 'no IPv4 address'}{'' if self.is_up else ', down'}{speed})"


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on the host's name, its interfaces, the variables that choose among them, and adapters."""
    found = interfaces()
    usable = [each for each in found if each.is_up and each.address and not each.is_loopback]
    yield _found("interfaces", ", ".join(map(str, found)) or "none", {"interfaces": [vars(each) for each in found]})
    yield host_name(socket.gethostname(), usable, environment)
    for variable in (GLOO, NCCL):
        if variable in environment:
            yield chosen(variable, environment[variable], found)
    if environment.get("MASTER_ADDR"):
        yield master(environment["MASTER_ADDR"])
    variables = {name: value for name, value in sorted(environment.items()) if name.startswith(SHOWN)}
    if variables:
        yield _found("variables", ", ".join(f"{name}={value}" for name, value in variables.items()), variables)
    yield adapters(Path("/sys/class/infiniband"))


def interfaces(folder: Path = Path("/sys/class/net")) -> list[Interface]:
    found = []
    for _, name in socket.if_nameindex():
        state, speed = read(folder / name / "operstate"), read(folder / name / "speed")
        address = _address_of(name)
        found.append(
            Interface(
                name=name,
                address=address,
                # Loopback and tunnels report `unknown`; they are in use if they have an address.
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
    """Check the address of the host's name, to which gloo binds: a loopback address works only within this node.
    `usable`: interfaces to other hosts. `resolve`: name -> IPv4 address."""
    address: str | None
    try:
        address = resolve(name)
    except OSError:
        address = None
    text = f"{name} is {address}" if address else f"{name} has no address"
    leads_nowhere = (address is None or ip_address(address).is_loopback) and not environment.get(GLOO)
    remedy = None
    if leads_nowhere and usable:
        text += ": gloo would bind to loopback, and other nodes could not reach it"
        remedy = f"for several nodes: export {GLOO}={usable[0].name}, or give {name} its address in /etc/hosts"
    elif leads_nowhere:
        text += ", and no interface leads to other hosts: only one node can train"
    return _found("host name", text, {"name": name, "address": address}, remedy)


def chosen(variable: str, value: str, found: Sequence[Interface]) -> Finding:
    """Report which of this host's interfaces a variable chooses. `variable`: GLOO with whole names, or NCCL with
    prefixes. `value`: names separated by commas; NCCL's may begin with `^` (all but these) or `=` (whole names)."""
    names = [interface.name for interface in found]
    excludes, exact = value.startswith("^"), variable == GLOO or value.startswith(("=", "^="))
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    missing = [word for word in words if word not in names] if variable == GLOO and not excludes else []
    fit = [name for name in names if any(name == word or (not exact and name.startswith(word)) for word in words)]
    if excludes:
        fit = [name for name in names if name not in fit]
    text, remedy = f"{value}: {', '.join(fit)}", None
    if missing or not fit:
        text = f"{value}, and this host has no {', '.join(missing) or value} (it has {', '.join(names)})"
        other = next((each.name for each in found if not each.is_loopback and each.is_up), "lo")
        remedy = f"export {variable}={other}, or unset it"
    elif not any(interface.is_up for interface in found if interface.name in fit):
        text, remedy = f"{value}, which is down", f"bring it up, or choose another with {variable}"
    return _found(variable, text, {"value": value, "interfaces": fit}, remedy, "error")


def master(address: str, *, resolve: Callable[[str], str] = socket.gethostbyname) -> Finding:
    """Check that MASTER_ADDR resolves to an address."""
    found, remedy = None, None
    try:
        found = resolve(address)
        text = address if found == address else f"{address} is {found}"
    except OSError as error:
        text = f"{address} has no address ({error.strerror or error})"
        remedy = "give the address of the first node, or correct its name in DNS or /etc/hosts"
    return _found("MASTER_ADDR", text, {"value": address, "address": found}, remedy, "error")


def adapters(folder: Path) -> Finding:
    ports = sorted(folder.glob("*/ports/*/state"))
    states = {f"{path.parts[-4]}:{path.parts[-2]}": read(path).partition(": ")[2] or "unknown" for path in ports}
    idle = [name for name, state in states.items() if state != "ACTIVE"]
    text = ", ".join(f"{name} {state}" for name, state in states.items())
    remedy = f"NCCL ignores or waits for {', '.join(idle)}: repair the link, or list the others in NCCL_IB_HCA"
    text = text or "none: NCCL and gloo use the interfaces above"
    return _found("infiniband", text, {"ports": states}, remedy if idle else None)


def _address_of(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
