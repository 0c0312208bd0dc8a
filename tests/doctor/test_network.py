"""Checks of host names and interfaces."""

import socket
from pathlib import Path

import pytest

from megalite.doctor.host import GLOO, NCCL, Interface, adapters, chosen, examine_network, host_name, interfaces, master

LO = Interface(name="lo", address="127.0.0.1", is_up=True, megabits=None)
ETH = Interface(name="eth0", address="10.0.0.7", is_up=True, megabits=100_000)
ETH1 = Interface(name="eth1", address=None, is_up=False, megabits=None)
IB = Interface(name="ib0", address="10.1.0.7", is_up=True, megabits=400_000)
ALL = (LO, ETH, ETH1, IB)


def nowhere(name: str) -> str:
    raise socket.gaierror(-2, "Name or service not known")


def test_network_of_this_host() -> None:
    found = {each.name: each for each in interfaces()}
    assert found["lo"].address == "127.0.0.1" and found["lo"].is_loopback
    rows = {finding.name: finding for finding in examine_network({"NCCL_DEBUG": "INFO", "HOME": "/secret"})}
    assert rows["variables"].text == "NCCL_DEBUG=INFO"
    assert {"interfaces", "host name", "infiniband"} <= set(rows)
    assert GLOO not in rows and "MASTER_ADDR" not in rows


@pytest.mark.parametrize("resolve", [lambda name: "127.0.1.1", nowhere])
def test_host_name_that_resolves_to_loopback(resolve: object) -> None:
    row = host_name("box", [ETH, IB], {}, resolve=resolve)  # type: ignore[arg-type]
    assert row.level == "warning" and row.remedy is not None and f"export {GLOO}=eth0" in row.remedy
    # The variable chooses an interface, or there is none to choose.
    assert host_name("box", [ETH], {GLOO: "ib0"}, resolve=resolve).level == "ok"  # type: ignore[arg-type]
    assert host_name("box", [], {}, resolve=resolve).level == "ok"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "variable, value, fits",
    [
        (GLOO, "eth0", ["eth0"]),
        (GLOO, "eth0,ib0", ["eth0", "ib0"]),
        (NCCL, "eth", ["eth0", "eth1"]),
        (NCCL, "=ib0", ["ib0"]),
        (NCCL, "^lo,eth", ["ib0"]),
        (NCCL, "^=lo,eth0", ["eth1", "ib0"]),
    ],
)
def test_variables_that_select_an_interface(variable: str, value: str, fits: list[str]) -> None:
    row = chosen(variable, value, ALL)
    assert (row.level, row.data["interfaces"]) == ("ok", fits)


@pytest.mark.parametrize(
    "variable, value, says",
    [
        (GLOO, "eth", "this host has no eth "),
        (GLOO, "eth0,eth9", "this host has no eth9 "),
        (NCCL, "ens", "this host has no ens "),
        (NCCL, "=eth", "this host has no =eth "),
        (NCCL, "^l,e,i", "this host has no ^l,e,i "),
        (GLOO, "eth1", "which is down"),
    ],
)
def test_variables_that_select_no_interface(variable: str, value: str, says: str) -> None:
    row = chosen(variable, value, ALL)
    assert row.level == "error" and says in row.text and row.remedy is not None


def test_master_address() -> None:
    row = master("node-0", resolve=nowhere)
    assert (row.level, row.text) == ("error", "node-0 has no address (Name or service not known)")
    assert master("node-0", resolve=lambda name: "10.0.0.1").text == "node-0 is 10.0.0.1"
    assert master("127.0.0.1").text == "127.0.0.1"


def test_network_adapters(tmp_path: Path) -> None:
    assert adapters(tmp_path).text.startswith("none")
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    row = adapters(tmp_path)
    assert (row.level, row.text) == ("warning", "mlx5_0:1 ACTIVE, mlx5_1:1 DOWN")
    assert row.remedy is not None and "waits for mlx5_1:1:" in row.remedy
