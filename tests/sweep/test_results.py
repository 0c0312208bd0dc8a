"""The folder of a sweep: what is written stays, whatever happens, and belongs to one sweep."""

import csv
import io
import json
import os
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.sweep.results import FAILED, REFUSED, Store, table
from tests.sweep.sweeps import MODEL, measured, read_runs, write_sweep


def test_results_outlive_the_process_and_a_line_cut_off(tmp_path: Path) -> None:
    spec, runs = read_runs(write_sweep(tmp_path))
    folder = tmp_path / "out"
    store = Store.open(folder, spec, "local")
    store.append(measured(runs[0], 0.5))
    store.append(measured(runs[1], 0.25))
    store.close()
    path = folder / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-30])  # as a machine that dies leaves it
    again = Store.open(folder, spec, "local")
    assert list(again.results.values()) == [measured(runs[0], 0.5)]
    assert again.is_done(runs[0].key)
    assert not again.is_done(runs[1].key)
    again.append(measured(runs[1], 0.3))
    again.close()
    third = Store.open(folder, spec, "local")
    assert [result.step_seconds for result in third.results.values()] == [0.5, 0.3]
    third.close()
    assert len(path.read_text().splitlines()) == 3, "nothing that was written is touched"


def test_each_line_is_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, runs = read_runs(write_sweep(tmp_path))
    store = Store.open(tmp_path / "out", spec, "local")
    synced: list[str] = []
    path = tmp_path / "out" / "results.jsonl"
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.read_text()), fsync(descriptor)))
    store.append(measured(runs[0], 0.5))
    assert json.loads(synced[0])["key"] == runs[0].key
    store.append(measured(runs[0], 0.5))
    assert len(synced) == 1, "the same result is one line"
    store.close()


def test_done_and_not_done(tmp_path: Path) -> None:
    spec, runs = read_runs(write_sweep(tmp_path))
    store = Store.open(tmp_path / "out", spec, "local")
    store.append(measured(runs[0], 0.5))
    store.append(measured(runs[1], 0.5, status=FAILED))
    store.append(measured(runs[2], 0.5, status=REFUSED, launched=False))
    assert [store.is_done(run.key) for run in runs] == [True, True, False, False]
    assert [store.is_done(run.key, retry=True) for run in runs] == [True, False, False, False]
    store.close()


def test_a_folder_belongs_to_one_sweep_and_one_process(tmp_path: Path) -> None:
    spec, _ = read_runs(write_sweep(tmp_path))
    folder = tmp_path / "out"
    store = Store.open(folder, spec, "local")
    with pytest.raises(ConfigError, match="another sweep is at work in"):
        Store.open(folder, spec, "local")
    store.close()
    longer, _ = read_runs(write_sweep(tmp_path, steps=9))
    with pytest.raises(ConfigError, match="has a sweep with steps 3, not 9; change --output"):
        Store.open(folder, longer, "local")
    with pytest.raises(ConfigError, match="has a sweep with launcher local, not sbatch"):
        Store.open(folder, spec, "sbatch")
    wider, _ = read_runs(write_sweep(tmp_path, settings=MODEL | {"hidden_size": 64}))
    with pytest.raises(ConfigError, match="has a sweep with settings"):
        Store.open(folder, wider, "local")
    more, _ = read_runs(write_sweep(tmp_path, grid={"tp": [1, 2, 4]}, timeout=7))
    Store.open(folder, more, "local").close()  # a sweep may grow
    (folder / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match=r"sweep.json is damaged"):
        Store.open(folder, spec, "local")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files and no sweep"):
        Store.open(tmp_path / "other", spec, "local")
    with pytest.raises(ConfigError, match=r"cannot write .*thesis.txt"):
        Store.open(tmp_path / "other" / "thesis.txt", spec, "local")


def test_table(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, grid={"tp": [1, 2], "pipeline_layers": [None, [4]]})
    _, runs = read_runs(path)
    results = {runs[0].key: measured(runs[0], 0.5), runs[2].key: measured(runs[2], 0.5, error="a, b")}
    rows = list(csv.DictReader(io.StringIO(table(runs, results))))
    assert [row["tp"] for row in rows] == ["1", "1", "2", "2"]
    assert [row["pipeline_layers"] for row in rows] == ["", "[4]", "", "[4]"]
    assert [row["status"] for row in rows] == ["ok", "", "ok", ""]
    assert [row["step_seconds"] for row in rows] == ["0.5", "", "0.5", ""]
    assert rows[2]["error"] == "a, b"
    assert float(rows[1]["predicted_memory_bytes"]) > 0
