"""Test `megalite schedule`: output, files and errors."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.tool_commands import SCHEDULE as main
from megalite.pipeline.ir.generators import SCHEDULES, build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule

Captured = pytest.CaptureFixture[str]
COSTS = {
    "unit": "ms",
    "forward": [2, 2, 3],
    "input_grad": 2,
    "weight_grad": 1,
    "memory": {"activation": 3 * 2**30, "deferred": 2**30},
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text(json.dumps(COSTS))


@pytest.fixture
def run(capsys: Captured) -> Any:
    """Run a command line that must succeed; return its output."""

    def run(line: str) -> str:
        status = main(line.split())
        said = capsys.readouterr()
        assert (status, said.err) == (0, "")
        return said.out

    return run


def test_grid_and_totals(run: Any) -> None:
    lines = run("--schedule 1f1b --pp 3 --microbatches 4").splitlines()
    assert lines[0] == "schedule 1f1b: 3 ranks, one stage each, 4 microbatches; one slot = 1"
    assert lines[2] == "rank 0 F0 F1 F2  .  .  .  . B0 -- F3 B1 --  . B2 --  . B3 --   33.3%     3"
    assert lines[7:] == [
        "makespan 18 (1.500 of the ideal 12), bubble 33.3%, without a barrier between steps 33.3%",
        "sends per step, by rank: 4 8 4",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_by_name_with_its_chunks(name: str, run: Any) -> None:
    data = json.loads(run(f"--schedule {name} --pp 3 --microbatches 6 --json --lowered"))
    chunks = data["num_stages"] // 3
    schedule = build_schedule(name, num_ranks=3, num_chunks=chunks, num_microbatches=6)
    assert [rank["actions"] for rank in data["ranks"]] == [list(map(str, row)) for row in schedule.actions]
    program = lower(schedule)
    assert [rank["program"] for rank in data["ranks"]] == [list(map(str, row)) for row in program.actions]
    assert [rank["sends"] for rank in data["ranks"]] == [
        sum("SEND" in action for action in rank["program"]) for rank in data["ranks"]
    ]
    # A rank's share costs 3 for each microbatch, however many stages it has.
    assert [rank["busy"] for rank in data["ranks"]] == pytest.approx([18.0] * 3)
    assert data["makespan"] == pytest.approx(max(event["end"] for event in data["events"]))
    for rank in data["ranks"]:
        assert rank["idle_fraction"] == pytest.approx(1 - 18.0 / data["makespan"])
    assert data["ideal"] == pytest.approx(18.0)
    assert 0 <= data["span_bubble_fraction"] <= data["bubble_fraction"] + 1e-9
    assert data["peak_shares"] * chunks == max(rank["peak_activations"] for rank in data["ranks"])


def test_default_schedule_and_options(run: Any) -> None:
    base = "--pp 2 --microbatches 6"
    assert run(base).startswith("schedule 1f1b")
    assert run(f"{base} --vpp 3").startswith("schedule interleaved: 2 ranks, 6 stages")
    assert run(f"{base} --vpp 2 --group 3") != run(f"{base} --vpp 2")
    deep = json.loads(run(f"{base} --warm-up pb --json"))
    assert [rank["peak_activations"] for rank in deep["ranks"]] == [3, 1]
    ahead = run(f"{base} --recompute-ahead")
    assert " R0 " in ahead and "R its forward again" in ahead
    early = run(f"{base} --lowered --recv-prefetch 3")
    assert early != run(f"{base} --lowered") and early.split("program:")[1].count("RECV") == 12
    # Messages take longer than the computations: with a wider window ranks wait less for their sends.
    Path("slow.json").write_text('{"forward": 1, "p2p": 5}')
    slow = "--schedule gpipe --pp 3 --microbatches 6 --costs slow.json --json --send-window"
    narrow, wide = (json.loads(run(f"{slow} {window}"))["makespan"] for window in (1, 4))
    assert wide < narrow


@pytest.mark.parametrize(("name", "placement"), [("1f1b", [0, 1, 2]), ("zb-v", [0, 1, 2, 2, 1, 0])])
def test_forward_only_schedule(name: str, placement: list[int], run: Any) -> None:
    data = json.loads(run(f"--schedule {name} --pp 3 --microbatches 4 --forward-only --json"))
    assert data["placement"] == placement and data["forward_only"]
    assert {action[1] for rank in data["ranks"] for action in rank["actions"]} == {"F"}


def test_memory_in_bytes(run: Any) -> None:
    line = "--schedule zb-h1 --pp 3 --microbatches 6 --costs costs.json"
    lines = run(line).splitlines()
    assert lines[1].endswith("bubble  peak  for W    memory")
    assert lines[2].endswith(" 3      0  9.00 GiB")
    # At its peak rank 2 has one graph, and two microbatches that wait for their W.
    data = json.loads(run(f"{line} --json"))
    assert [rank["peak_bytes"] for rank in data["ranks"]] == [9 * 2**30, 7 * 2**30, 5 * 2**30]
    assert [rank["peak_deferred"] for rank in data["ranks"]] == [0, 2, 3]
    assert run(f"{line} --memory-limit 9GiB") == run(line)


def test_csv_round_trip(run: Any) -> None:
    said = run("--schedule zb-v --pp 2 --microbatches 4 --write-csv mine.csv")
    assert said.splitlines()[-1] == "wrote mine.csv"
    schedule = build_schedule("zb-v", num_ranks=2, num_chunks=2, num_microbatches=4)
    assert Schedule.from_csv(Path("mine.csv").read_text()).actions == schedule.actions
    again = run("--csv mine.csv")
    assert again.splitlines()[1:] == said.splitlines()[1:-1]
    assert again.startswith("schedule mine.csv: 2 ranks, 4 stages, 4 microbatches")


def test_compare_schedules(run: Any) -> None:
    text = run("--compare gpipe 1f1b interleaved zb-v dualpipe-v --pp 4 --microbatches 6 --vpp 3")
    rows = [line.split() for line in text.splitlines()]
    assert " ".join(rows[0]) == "schedule vpp makespan of ideal bubble no barrier peak for W sends"
    # Name, chunks, makespan m(F+B) + the bubble, ratio, bubble share, peak in whole shares, W waiting, sends.
    assert rows[1] == ["gpipe", "1", "27", "1.500", "33.3%", "33.3%", "6", "0", "12"]
    assert rows[2] == ["1f1b", "1", "27", "1.500", "33.3%", "33.3%", "4", "0", "12"]
    assert [row[:2] for row in rows[3:5]] == [["interleaved", "3"], ["zb-v", "2"]]
    reason = "dualpipe-v: not possible: schedule dualpipe-v with pp 4 needs 8 microbatches or more but has 6"
    assert text.splitlines()[-1].startswith(reason)


def test_compare_with_a_custom_schedule(run: Any) -> None:
    run("--schedule interleaved --pp 2 --microbatches 4 --vpp 3 --write-csv 1f1b.csv")
    files = "--svg all.svg --html all.html --trace all.json"
    found = json.loads(run(f"--csv 1f1b.csv --compare 1f1b looped-bfs --json {files}"))
    stages = {each["name"]: each["num_stages"] for each in found["schedules"]}
    assert stages == {"1f1b.csv": 6, "1f1b": 2, "looped-bfs": 6}
    assert found["written"] == ["all.svg", "all.html", "all.json"]
    report = Path("all.html").read_text()
    assert Path("all.svg").read_text().strip() in report, "one drawing: CSS classes of two would clash"
    assert report.count('<tr class="">') == 3 and "looped-bfs" in report
    titles = [text.text or "" for text in ET.parse("all.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert [title.split(":")[0] for title in titles if "ranks" in title] == ["1f1b.csv", "1f1b", "looped-bfs"]
    trace = json.loads(Path("all.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert names == ["1f1b.csv", "1f1b", "looped-bfs"]


def test_compare_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compare", "gpipe", "1f1b", "--pp", "4", "--microbatches", "8", "--memory-limit", "2"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: none of these schedules is possible"
    assert [text.split(":")[0] for text in said[1:]] == ["gpipe", "1f1b"]


@pytest.mark.parametrize(("costs", "scale"), [("", 1e3), ("--costs costs.json", 1e3), ("--costs s.json", 1e6)])
def test_traces_are_in_microseconds(costs: str, scale: float, run: Any) -> None:
    Path("s.json").write_text('{"forward": 1, "unit": "s"}')
    line = f"--schedule zb-h1 --pp 3 --microbatches 4 {costs}"
    makespan = json.loads(run(f"{line} --json"))["makespan"]
    run(f"{line} --trace trace.json")
    slices = [event for event in json.loads(Path("trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(each["ts"] + each["dur"] for each in slices) == pytest.approx(makespan * scale)


def test_grid_wraps_on_a_narrow_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("--schedule zb-v --pp 4 --microbatches 8").splitlines()
    grid = [line for line in lines if line.startswith("rank ")]
    assert len(grid) > 4 and max(map(len, grid)) <= 80
    assert sum(" 7F7" in line for line in grid) == 1


FAULTS = [
    ("missing", "0F0,0B0\n1F0\n", ("1B0 is missing",)),
    ("misplaced", "0F0,1F0,0B0\n1B0\n", ("stage 1 is on line 1 and on line 2 with 1B0",)),
    ("deadlock", "0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n", ("deadlocks", "1B1 on rank 1", "stuck at 2F0")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "says"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_bad_schedule_is_shown_with_its_cell(name: str, text: str, says: tuple[str, ...], capsys: Captured) -> None:
    path = Path(f"{name}.csv")
    path.write_text(text)
    assert main(["--csv", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: schedule {name}.csv")
    for part in says:
        assert part in said.err
    if name != "misplaced":
        assert "rank 0: " in said.err and "drawn until it blocks:" in said.err


@pytest.mark.parametrize(("costs", "limit", "says"), [
    ("", "2", ("holds 3", "limit of 2")),
    ("--costs costs.json", "8GiB", ("holds 9.00 GiB", "limit of 8.00 GiB")),
])  # fmt: skip
def test_memory_above_the_limit_is_an_error(costs: str, limit: str, says: tuple[str, ...], capsys: Captured) -> None:
    line = f"--schedule 1f1b --pp 3 --microbatches 5 {costs} --memory-limit {limit}"
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: schedule 1f1b: 0F2 (rank 0") and ">0F2<" in said
    for part in says:
        assert part in said


def test_auto_is_not_slower_than_named_schedules(run: Any) -> None:
    found = json.loads(run("--compare --pp 2 --microbatches 4 --json"))
    times = {each["name"]: each["makespan"] for each in found["schedules"]}
    assert list(times)[-1] == "auto" and times["auto"] <= min(times.values()) * (1 + 1e-9)
