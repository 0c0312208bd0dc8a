"""Processor, memory and limits, on Linux's files as a test writes them."""

import resource
from pathlib import Path

import pytest
import torch

from megalite.doctor.host import Finding, Places, examine


def looked_at(folder: Path, *, gpus: int = 0, **files: str) -> dict[str, Finding]:
    """Findings where Linux says what `files` hold."""
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


def test_a_container_with_the_time_of_few_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    row = looked_at(tmp_path / "a", cpu_max="250000 100000\n")["processor"]
    assert row.level == "warning" and row.remedy is not None and row.remedy.endswith("OMP_NUM_THREADS=2")
    assert "the time of 2.5 cores" in row.text
    assert looked_at(tmp_path / "b", cpu_max="max 100000\n")["processor"].level == "ok"
    assert looked_at(tmp_path / "c", cpu_max="400000 100000\n")["processor"].level == "ok"


def test_instructions(tmp_path: Path) -> None:
    flags = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nprocessor : 1\nflags : fpu\n"
    row = looked_at(tmp_path / "a", processor=flags)["instructions"]
    assert row.data["instructions"] == ["avx2", "avx512f", "avx512_bf16"] and row.data["bf16"]
    plain = looked_at(tmp_path / "b", processor="flags : fpu avx2\n")["instructions"]
    assert not plain.data["bf16"] and "fp32 is faster" in plain.text


def test_memory(tmp_path: Path) -> None:
    whole = "MemTotal:       67108864 kB\nMemFree: 5 kB\nMemAvailable:   33554432 kB\n"
    row = looked_at(tmp_path / "a", memory=whole)["memory"]
    assert (row.level, row.text) == ("ok", "64.00 GiB, 32.00 GiB available")
    row = looked_at(tmp_path / "b", memory=whole, memory_max=f"{4 << 30}\n", memory_current=f"{3.5 * 2**30:.0f}")[
        "memory"
    ]
    assert (row.level, row.text) == ("warning", "4.00 GiB for this container, 512.00 MiB available")
    assert looked_at(tmp_path / "c", memory=whole, memory_max="max\n")["memory"].data["limit"] is None


def test_shared_memory_matters_between_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = type("Usage", (), {"total": 64 << 20, "free": 64 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: size)
    assert looked_at(tmp_path / "a", gpus=1)["shared memory"].level == "ok"
    row = looked_at(tmp_path / "b", gpus=8)["shared memory"]
    assert row.level == "warning" and row.remedy is not None and "--shm-size" in row.remedy


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
