"""The HTML report: well formed, alone, and with every run in it."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

from megalite.sweep.candidates import read_machine
from megalite.sweep.report import report, summary, write_report
from megalite.sweep.results import OOM, Result
from tests.sweep.sweeps import measured, read_runs, write_sweep

VOID = {"meta"}


class Page(HTMLParser):
    """Checks that tags close in order; keeps rows, texts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: dict[str, list[str]] = {}
        self.counts: dict[str, int] = {}
        self.addresses: list[str] = []
        self._row: list[str] | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens."""
        self.counts[tag] = self.counts.get(tag, 0) + 1
        given = dict(attrs)
        self.addresses += [str(given[name]) for name in ("src", "href") if name in given]
        if tag == "tr" and given.get("id"):
            self._row = self.rows[str(given["id"])] = []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens and closes."""
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        """Closes what was opened last."""
        assert self.open.pop() == tag
        if tag == "tr":
            self._row = None

    def handle_data(self, data: str) -> None:
        """A cell."""
        if self._row is not None:
            self._row.append(data)


def test_every_run_is_in_it(tmp_path: Path) -> None:
    machine = read_machine("cpu-box", "fused")
    path = write_sweep(tmp_path, ranks=4, grid={"tp": [1, 2, 3], "pp": [1, 2]})
    _, runs = read_runs(path, machine=machine)
    good = [run for run in runs if run.refused is None]
    results: dict[str, Result] = {run.key: measured(run, 0.5 - 0.1 * n) for n, run in enumerate(good)}
    broken = good[-1]
    results[broken.key] = dataclasses.replace(
        results[broken.key], status=OOM, error="CUDA <out> & done", step_seconds=None, tokens_per_second=None
    )
    text = report('Sweep "a<b".yaml', runs, results)
    page = Page(text)
    assert set(page.rows) == {run.key for run in runs}
    assert page.rows[broken.key][-1] == "oom: CUDA <out> & done"
    assert page.rows[next(run.key for run in runs if run.refused)][-1] == "not run yet"
    assert page.counts["svg"] == 2
    assert page.counts["circle"] == 2 * (len(good) - 1)
    assert page.addresses == []
    for word in ("http:", "https:", "//", "<script "):
        assert word not in text
    fastest = good[-2]
    assert next(iter(page.rows)) == fastest.key, "fastest first"
    assert f"Fastest: {fastest.label} with" in text
    assert "regret" in text
    assert "Rank correlation (Spearman)" in text


def test_a_sweep_that_has_only_begun(tmp_path: Path) -> None:
    _, runs = read_runs(write_sweep(tmp_path))
    page = Page(report("Sweep", runs, {}))
    assert set(page.rows) == {run.key for run in runs}
    assert "svg" not in page.counts
    refused = sum(run.refused is not None for run in runs)
    assert refused == 1
    assert summary(runs, {}) == ["4 configurations: 4 not run yet."]
    one = {runs[0].key: measured(runs[0], 0.5)}
    assert "svg" in Page(report("Sweep", runs, one)).counts
    write_report(tmp_path / "report.html", "Sweep", runs, one)
    assert (tmp_path / "report.html").read_text() == report("Sweep", runs, one)
