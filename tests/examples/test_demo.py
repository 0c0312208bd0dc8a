"""The demo's table and checks, on synthetic metrics."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.e2e.commands import Command, check
from tests.e2e.programs import REPOSITORY


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """examples/quickstart/demo.py with its run folder in the test's folder, on a machine without GPUs."""
    path = REPOSITORY / "examples" / "quickstart" / "demo.py"
    spec = importlib.util.spec_from_file_location("quickstart_demo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RUN", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


def made_up(demo: ModuleType, *, jump: float = 0.0, fall: float = 3.0) -> list[dict[str, Any]]:
    """Metrics of a demo run: the loss falls evenly by `fall` in total, and validation jumps at the switch.

    The second half is twice as fast."""
    records: list[dict[str, Any]] = []
    for step in range(demo.STEPS + 1):
        loss = 8.0 - fall * step / demo.STEPS
        if step:
            rate = 1000.0 if step <= demo.SWITCH else 2000.0
            records.append({"kind": "train", "step": step, "loss": loss, "tokens_per_second": rate})
        evaluated = [loss] * (step % 50 == 0) + [loss + jump] * (step == demo.SWITCH)
        records += [
            {"kind": "valid", "step": step, "consumed_samples": 32 * step, "valid_loss": each} for each in evaluated
        ]
    return records


def test_summary_of_the_demo(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, the named files, and suggested commands, which work."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made_up(demo, jump=1e-5)))
    text = demo.summary(123.4)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[:5]]
    assert rows == [
        ["step", "train loss", "validation loss", "tokens/s"],
        ["start", "0", "7.9900", "8.0000"],
        ["before the switch", "150", "6.5000", "6.5000", "1000"],
        ["after the switch", "150", "6.4900", "6.5000"],
        ["end", "300", "5.0000", "5.0000", "2000"],
    ]
    assert "layouts: --tp 2 --pp 2 --vpp 2  ->  --tp 1 --pp 2 --dp 2; 123 s in all" in text
    for name in ("tensorboard", "metrics.jsonl", "loss.png", "checkpoints", "config.yaml"):
        assert f"{tmp_path}/{name}" in text
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = [line.strip() for line in text.splitlines()]
    suggested = [line for line in lines if line.startswith("megalite ")]
    suggested += [line[line.index("tools/") :] for line in lines if "--prompt" in line]
    assert len(suggested) == 3
    monkeypatch.chdir(REPOSITORY)
    for line in suggested:
        check(Command("demo.py", line))


def test_checks_of_a_run(demo: ModuleType) -> None:
    demo.check(made_up(demo, jump=5e-5))
    for jump in (1e-3, -1e-3):
        with pytest.raises(SystemExit, match=r"jumped by 1\.00e-03 at the switch"):
            demo.check(made_up(demo, jump=jump))
    for fall in (0.9, -1.0, float("nan")):
        with pytest.raises(SystemExit, match=r"validation loss fell from \S+ to \S+ only"):
            demo.check(made_up(demo, fall=fall))
    records = made_up(demo)
    once = [row for row in records if row["kind"] == "valid" and row["step"] == demo.SWITCH][1]
    with pytest.raises(SystemExit, match="before and after the switch"):
        demo.check([row for row in records if row is not once])


@pytest.mark.parametrize(
    ("gpus", "processes", "first", "second"),
    [
        (0, 4, "--tp 2 --pp 2 --vpp 2", "--tp 1 --pp 2 --dp 2"),
        (1, 1, "--bf16", "--bf16 --dp-strategy distributed-optimizer"),
        (2, 2, "--tp 2 --bf16", "--tp 1 --pp 2 --bf16"),
        (3, 2, "--tp 2 --bf16", "--tp 1 --pp 2 --bf16"),
        (8, 4, "--tp 2 --pp 2 --vpp 2 --bf16", "--tp 1 --pp 2 --dp 2 --bf16"),
    ],
)
def test_layouts_are_valid(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, first: str, second: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.chdir(REPOSITORY)
    assert demo.layouts() == (processes, first.split(), second.split())
    for flags in (first, second):
        launch = f"torchrun --nproc-per-node {processes} pretrain_gpt.py --config {demo.CONFIG} {flags}"
        check(Command("demo.py", launch))
