"""Checks of the host on files written by the test, of a run's folder, package versions, host names and interfaces."""

import fcntl
import itertools
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalite.doctor import host
from megalite.doctor.host import (
    GLOO,
    NCCL,
    Finding,
    Interface,
    Package,
    Places,
    adapters,
    chosen,
    examine,
    examine_network,
    examine_versions,
    host_name,
    installed_version,
    interfaces,
    master,
    packages,
    worst,
)


def looked_at(folder: Path, *, gpus: int = 0, **files: str) -> dict[str, Finding]:
    """Return the findings on a host with these contents of Linux's files."""
    cgroup = folder / "cgroup"
    cgroup.mkdir(parents=True)
    paths = {
        "processor": folder / "cpuinfo",
        "memory": folder / "meminfo",
        "cpu_max": cgroup / "cpu.max",
        "memory_max": cgroup / "memory.max",
        "memory_current": cgroup / "memory.current",
    }
    for name, text in files.items():
        paths[name].write_text(text)
    places = Places(
        processor=paths["processor"],
        memory=paths["memory"],
        cgroup=cgroup,
        shared=folder,
        infiniband=folder / "infiniband",
    )
    return {finding.name: finding for finding in examine({}, gpus=gpus, places=places)}


def test_container_with_a_cpu_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    row = looked_at(tmp_path / "a", cpu_max="250000 100000\n")["processor"]
    assert row.level == "warning" and row.remedy is not None and row.remedy.endswith("OMP_NUM_THREADS=2")
    assert "the time of 2.5 cores" in row.text
    assert looked_at(tmp_path / "b", cpu_max="max 100000\n")["processor"].level == "ok"
    assert looked_at(tmp_path / "c", cpu_max="400000 100000\n")["processor"].level == "ok"


def test_cpu_instructions(tmp_path: Path) -> None:
    flags = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nprocessor : 1\nflags : fpu\n"
    row = looked_at(tmp_path / "a", processor=flags)["instructions"]
    assert row.data["instructions"] == ["avx2", "avx512f", "avx512_bf16"] and row.data["bf16"]
    plain = looked_at(tmp_path / "b", processor="flags : fpu avx2\n")["instructions"]
    assert not plain.data["bf16"] and "fp32 is faster" in plain.text


def test_host_memory(tmp_path: Path) -> None:
    whole = "MemTotal:       67108864 kB\nMemFree: 5 kB\nMemAvailable:   33554432 kB\n"
    row = looked_at(tmp_path / "a", memory=whole)["memory"]
    assert (row.level, row.text) == ("ok", "64.00 GiB, 32.00 GiB available")
    row = looked_at(tmp_path / "b", memory=whole, memory_max=f"{4 << 30}\n", memory_current=f"{3.5 * 2**30:.0f}")[
        "memory"
    ]
    assert (row.level, row.text) == ("warning", "4.00 GiB for this container, 512.00 MiB available")
    assert looked_at(tmp_path / "c", memory=whole, memory_max="max\n")["memory"].data["limit"] is None


def test_shared_memory_is_checked_with_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = type("Usage", (), {"total": 64 << 20, "free": 64 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: size)
    assert looked_at(tmp_path / "a", gpus=1)["shared memory"].level == "ok"
    row = looked_at(tmp_path / "b", gpus=8)["shared memory"]
    assert row.level == "warning" and row.remedy is not None and "--shm-size" in row.remedy


def test_process_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 1 << 20), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    rows = looked_at(tmp_path / "a", gpus=8)
    assert rows["open files"].remedy == "many ranks need more: ulimit -n 65536"
    assert (rows["locked memory"].level, rows["locked memory"].text) == ("ok", "64.00 KiB")
    (tmp_path / "b" / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert looked_at(tmp_path / "b", gpus=8)["locked memory"].level == "warning"
    limits[resource.RLIMIT_MEMLOCK] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits[resource.RLIMIT_NOFILE] = (1 << 20, 1 << 20)
    (tmp_path / "c" / "infiniband" / "mlx5_0").mkdir(parents=True)
    rows = looked_at(tmp_path / "c", gpus=8)
    assert {rows["locked memory"].level, rows["open files"].level} == {"ok"}


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the disk test to few bytes and syncs."""
    monkeypatch.setattr(host, "BYTES", 2 << 20)
    monkeypatch.setattr(host, "SYNCS", 3)


def looked_at_disk(folder: Path, **options: object) -> dict[str, Finding]:
    return {finding.name: finding for finding in host.examine_disk(folder, **options)}  # type: ignore[arg-type]


def test_folder_without_findings(tmp_path: Path) -> None:
    rows = looked_at_disk(tmp_path)
    assert {name: row.level for name, row in rows.items()} == dict.fromkeys(
        ("folder", "locks", "writing", "fsync"), "ok"
    )
    assert rows["writing"].data["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == [], "no file is left"


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**where: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    rows = looked_at_disk(tmp_path)
    assert rows["folder"].text == f"cannot write to {tmp_path}: Read-only file system"
    assert rows["folder"].level == "error" and len(rows) == 1


def test_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, block: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host, "write_all", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    findings = list(host.examine_disk(tmp_path))
    assert findings[-1].level == "error" and "No space left" in findings[-1].text
    assert list(tmp_path.iterdir()) == [] and len(list(Path("/proc/self/fd").iterdir())) == before


def test_slow_disk(tmp_path: Path) -> None:
    clock = itertools.count(0.0, 0.3)
    rows = looked_at_disk(tmp_path, clock=lambda: next(clock))
    assert rows["fsync"].level == "warning" and rows["fsync"].text.startswith("300.0 ms")


def test_little_space_and_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=1 << 20))
    rows = looked_at_disk(tmp_path)
    assert (rows["folder"].level, rows["locks"].level) == ("warning", "warning")
    assert "1.00 MiB free of 1.00 TiB" in rows["folder"].text


def found(**versions: str | None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine_versions(lambda name: versions.get(name, "99.0"))}


def test_installed_packages() -> None:
    assert installed_version("torch") is not None and installed_version("no-such-package") is None
    assert {Package("torch", "2.11", None), Package("zstandard", "0.19", "data")} <= set(packages())
    rows = {finding.name: finding for finding in examine_versions()}
    assert worst(rows.values()) == "ok"
    assert set(rows) == {"python", "megalite", *(package.name for package in packages())}


def test_missing_and_old_packages() -> None:
    rows = found(torch="2.9.1+cu128", safetensors=None, matplotlib=None, tokenizers="0.9", numpy="weird")
    assert (rows["torch"].level, rows["torch"].text) == ("error", "2.9.1+cu128, older than 2.11")
    assert rows["torch"].remedy == "pip install 'torch>=2.11'"
    assert (rows["safetensors"].level, rows["safetensors"].text) == ("error", "not installed")
    assert rows["matplotlib"].level == "ok"
    assert rows["matplotlib"].text == "not installed: pip install 'megalite[plot]'"
    assert (rows["tokenizers"].level, rows["tokenizers"].remedy) == ("warning", "pip install 'megalite[tokenizers]'")
    assert rows["numpy"].level == "ok"
    assert found(torch="2.11.0a0+git")["torch"].level == "ok"


def test_worst_finding_decides() -> None:
    assert worst([]) == "ok"
    levels = [Finding(topic="a", name="b", level=level, text="c", remedy="d") for level in ("error", "ok", "warning")]
    assert worst(levels) == "error" and worst(levels[1:]) == "warning"


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
