"""The contenders of the step benchmark train the same model, and its driver compares them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import run as step_vs_peers
from benchmarks.peers import worker
from benchmarks.peers.case import GPT2, LAYOUTS, Case, batch_of
from benchmarks.peers.rounds import Disagreement, Measured, compete, quartiles, row_of, table
from megalite.parity.pool import RankContext, RankFailure
from tests.support.ranks import forked_pools, run_ranks

HERE = [name for name, entry in worker.CONTENDERS.items() if entry.needs is None]
"""Contenders that need no packages beyond those of the tests."""
LAYOUT_NAMES = list(LAYOUTS)
STEPS = 2


def case_of(layout: str) -> Case:
    return Case(size=step_vs_peers.TINY, layout=LAYOUTS[layout])


@pytest.mark.parametrize("layout", [name for name in LAYOUT_NAMES if name != "1.2threads"])
def test_contenders_train_the_same_model(layout: str) -> None:
    case = case_of(layout)
    losses = {}
    for name in HERE:
        if layout not in worker.CONTENDERS[name].layouts:
            continue
        if layout == "1" and name != worker.MEGALITE:  # needs no ranks
            contender = worker.make(RankContext(0), name, case)
            losses[name] = [contender.step(batch_of(case.size, step)) for step in range(STEPS)]
        else:
            run_ranks(case.layout.ranks, worker.build, name, case)
            parts = run_ranks(case.layout.ranks, worker.train, STEPS)
            run_ranks(case.layout.ranks, worker.leave)
            losses[name] = [sum(step) for step in zip(*parts)]
    assert len(losses) >= 2
    for name, found in losses.items():
        assert found == pytest.approx(losses[worker.MEGALITE], abs=3e-6), name
    ours = losses[worker.MEGALITE]
    assert len({round(loss, 3) for loss in ours}) == len(ours), "the batches differ"


def test_every_layout_and_model_has_peers() -> None:
    for name, model in step_vs_peers.MODELS.items():
        arguments = step_vs_peers.parse(["--models", name])
        cases = step_vs_peers.cases_of(name, LAYOUT_NAMES, arguments)
        assert [layout for case, layout in cases if not case.bf16] == list(model.layouts)
        for case, layout in cases:
            contenders = step_vs_peers.contenders_of(case, layout, list(worker.CONTENDERS))
            assert contenders[0] == worker.MEGALITE
            assert len(contenders) >= 2, (name, layout)
            assert case.family == GPT2 or set(contenders) <= {worker.MEGALITE, "megalite, zb-h2", "picotron"}


class FakePool:
    """Return the given losses and step times, as two ranks would."""

    def __init__(self, losses: list[float], seconds: list[float]) -> None:
        self.losses, self.seconds = losses, iter(seconds)
        self.clock, self.turns = 0.0, 0

    def run(self, size: int, fn: Any, *args: Any, **_: Any) -> list[Any]:
        if fn is worker.train:
            return [[loss / size for loss in self.losses]] * size
        if fn is worker.gemm_rate:
            return [1e9] * size
        if fn is not worker.turn:
            return [None] * size
        self.turns += 1
        start, took = self.clock, next(self.seconds)
        # The second rank starts and ends later: the step lasts from the first start to the last end.
        return [
            {"start": start, "end": start + took * 0.75, "cpu": took / 4},
            {"start": start + took / 4, "end": start + took, "cpu": took / 2},
        ]


class BrokenPool(FakePool):
    def run(self, size: int, fn: Any, *args: Any, **_: Any) -> list[Any]:
        raise RankFailure("rank 1 of 2 failed first:\nTraceback ...\nValueError: no CUDA")


def competed(limit: float = 1e-4) -> Measured:
    pools = {
        worker.MEGALITE: FakePool([2.0, 1.5], [4.0, 2.0, 8.0]),
        "torch DDP": FakePool([2.0, 1.50005], [6.0, 4.0, 8.0]),
        "torch DDP, ZeRO-1": BrokenPool([], []),
    }
    settings = {"checks": 2, "rounds": 3, "steps": 2, "gemm": 8, "seed": 0}
    return compete(pools, case_of("dp2"), limit=limit, **settings)  # type: ignore[arg-type]


def test_ratios_are_medians_over_rounds() -> None:
    found = competed()
    assert found.seconds[worker.MEGALITE] == [2.0, 1.0, 4.0]
    assert found.cpu[worker.MEGALITE] == [1.5, 0.75, 3.0]
    row = row_of("torch DDP", found, case_of("dp2"))
    assert row["ours_over_theirs"] == {"wall": 1.5, "cpu": 1.5}, "1.5, 2 and 1 in the rounds"
    tokens = step_vs_peers.TINY.batch * step_vs_peers.TINY.seq
    assert row["tokens_per_second"] == pytest.approx(tokens / 3.0, abs=0.05)
    assert row["loss_difference"] == pytest.approx(5e-5)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]


def test_failed_contender_is_reported_and_others_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    found, case = competed(), case_of("dp2")
    rows = [row_of(name, found, case) for name in (worker.MEGALITE, "torch DDP", "torch DDP, ZeRO-1")]
    result = {"model": "small", "layout": "dp2", "precision": "fp32", "rounds": 3, "rows": rows}
    text = table(result)
    assert "| torch DDP, ZeRO-1 | failed: ValueError: no CUDA |" in text
    assert "megalite over the best peer (torch DDP): 1.50 (CPU time 1.50)" in text
    assert "no CUDA" in capsys.readouterr().err


def test_no_timing_if_losses_differ() -> None:
    with pytest.raises(Disagreement, match=r"torch DDP differ from megalite's by 5.00e-05, more than 1e-05"):
        competed(limit=1e-5)
    nan = {worker.MEGALITE: FakePool([2.0], [1.0]), "torch DDP": FakePool([float("nan")], [1.0])}
    settings = {"checks": 1, "rounds": 1, "steps": 1, "gemm": 8, "seed": 0}
    with pytest.raises(Disagreement):
        compete(nan, case_of("dp2"), limit=1e-4, **settings)  # type: ignore[arg-type]
    assert all(pool.turns == 0 for pool in nan.values())


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the program with its own processes."""
    output = tmp_path / "found.json"
    words = ["--smoke", "--models", "small", "--layouts", "1", "--no-bf16", "--json", str(output)]
    with forked_pools():
        assert step_vs_peers.main([*words, "--contenders", "megalite", "plain torch", "megatron-core"]) == 0
    (result,) = json.loads(output.read_text())["results"]
    ours, plain, missing = result["rows"]
    assert (ours["contender"], plain["contender"]) == (worker.MEGALITE, "plain torch")
    assert ours["loss_difference"] == 0.0
    assert plain["loss_difference"] < 1e-5
    assert missing == {"contender": "megatron-core", "note": "not given"}
    assert "megalite over the best peer (plain torch)" in capsys.readouterr().out
