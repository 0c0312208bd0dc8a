"""The training loop: when it evaluates, and that it reads batches ahead."""

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.data.loader import BatchLoader, Microbatch
from megalite.optimizers.schedules import LossScaler, Progress
from megalite.training.evaluation import ReadAhead, read_batches
from megalite.training.records import read_sessions
from megalite.training.step import Stepper, StepResult
from megalite.training.trainer import Trainer
from tests.data.token_files import write_by_layout
from tests.e2e.programs import records
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import TINY, build, tiny_config
from tests.support.trainer import ReplicaTrainer, fit


class Broken:
    """A dataset that cannot be read."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    def sample(self, k: int) -> np.ndarray:
        raise self.fault


FOUR_STEPS = {"train_iters": 4, "eval_interval": 2, "eval_iters": 2, "split": "8,1,1", "eod_mask_loss": False}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    generator = np.random.default_rng(5)
    documents = [generator.integers(1, 90, size=length).tolist() for length in generator.integers(2, 60, size=120)]
    write_by_layout(tmp_path / "d", documents)
    return str(tmp_path / "d")


def run(prefix: str, folder: Path, **changes: Any) -> list[str]:
    return fit(**{**TINY, "data_path": [prefix], "run_dir": str(folder), **FOUR_STEPS, **changes})


def test_test_split_is_evaluated_once_at_the_end(prefix: str, tmp_path: Path) -> None:
    lines = run(prefix, tmp_path / "run")
    assert [record["step"] for record in records(tmp_path / "run", "valid")] == [0, 2, 4]
    (test,) = records(tmp_path / "run", "test")
    assert test["step"] == 4 and test["test_loss"] > 0
    assert lines[-2].startswith(f"step 4/4  test loss {test['test_loss']:.4f}  perplexity ")
    # An interrupted run has not ended.
    lines = run(prefix, tmp_path / "half", exit_interval=3)
    assert not records(tmp_path / "half", "test") and not any("test loss" in line for line in lines)


def test_missing_token_files_are_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.training.trainer.build_modules", None)
    (tmp_path / "a.csv").write_text("text")
    for name, said in (
        ("none", "has no .idx file"),
        ("a.csv", "a text file is named .jsonl, .ndjson, .json, .txt, .parquet"),
    ):
        with pytest.raises(ConfigError, match=f"do not exist; .*{re.escape(said)}"):
            run(str(tmp_path / name), tmp_path / "run")


WHOLE = {"full_validation": True, "packing": "best-fit", "split": "7,2,1"}
WHOLE |= {"train_iters": 1, "lr_warmup_iters": 0, "eval_interval": 1}


def test_full_validation_reads_each_sample_once(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the mean over all tokens, however they are divided into batches."""
    counted: list[int] = []
    read = BatchLoader.microbatch

    def noted(self: BatchLoader, ids: tuple[int, ...], length: int | None = None) -> Microbatch:
        found = read(self, ids, length)
        if self.samples is not None:
            counted.extend(k for k, mask in zip(ids, found.loss_mask, strict=True) if mask.any())
        return found

    monkeypatch.setattr(BatchLoader, "microbatch", noted)
    losses = []
    for size in (1, 4, 6):
        run(prefix, tmp_path / str(size), **WHOLE, global_batch_size=size)
        losses.append(records(tmp_path / str(size), "valid")[0]["valid_loss"])
        assert sorted(counted) == [k for k in range(len(counted) // 2) for _ in range(2)]  # in two evaluations
        assert size == 1 or len(counted) // 2 % size
        counted.clear()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    run(prefix, tmp_path / "without test", **WHOLE, eval_iters=0)
    assert records(tmp_path / "without test", "valid") and not records(tmp_path / "without test", "test")


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "dp": 2}, {"pp": 4}], ids=str)
def test_full_validation_does_not_depend_on_the_layout(layout: dict[str, int], prefix: str, tmp_path: Path) -> None:
    ranks, changes = math.prod(layout.values()), {**WHOLE, "packing": "stream", "global_batch_size": 4}
    run(prefix, tmp_path / "one", **changes)
    run_ranks(ranks, trains, ranks, {**changes, **layout, "data_path": [prefix], "run_dir": str(tmp_path / "ranks")})
    one, more = ([each["valid_loss"] for each in records(tmp_path / name, "valid")] for name in ("one", "ranks"))
    assert len(one) == 2 and more == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"dp": 2, "dp_strategy": "fully-sharded"}], ids=str)
def test_skipped_steps_read_their_data_and_do_nothing_else(
    layout: dict[str, Any], prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning rates lag and samples do not, as in Megatron-LM, in one run or two and on any layout. Times exclude them."""
    trained: list[tuple[float, Progress]] = []
    step, skip, skipped_seconds = Stepper.step, LossScaler.skip, 0.0

    def noted(self: Stepper, *microbatches: Any, before: Progress, **more: Any) -> StepResult:
        found = step(self, *microbatches, before=before, **more)
        trained.append((found.lr, before))
        return found

    def slow(self: LossScaler, samples: int) -> None:
        nonlocal skipped_seconds
        skipped_seconds += 1e6
        skip(self, samples)

    changes: dict[str, Any] = {"train_iters": 6, "lr_warmup_iters": 4, "global_batch_size": 4, "eval_interval": 6}
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", noted)
        patch.setattr(LossScaler, "skip", slow)
        clock = SimpleNamespace(perf_counter=lambda: skipped_seconds + time.perf_counter())
        patch.setattr("megalite.training.reporter.time", clock)
        run(prefix, tmp_path / "all", **changes)
        lines = run(prefix, tmp_path / "one", **changes, iterations_to_skip=[2, 3, 6], log_interval=3)
    whole, some = trained[:6], trained[6:]
    assert [before for _, before in some] == [Progress(n, 4 * n) for n in (0, 3, 4)]
    assert [lr for lr, _ in some] == [lr for lr, _ in whole[:3]] and len({lr for lr, _ in some}) == 3
    assert "step 3: skipped with its 4 samples, as iterations_to_skip says" in lines
    assert [line.split()[1] for line in lines if " lr " in line] == ["4/6", "5/6"]  # 3 and 6 have none
    assert skipped_seconds == 3e6 and max(row["ms_per_step"] for row in records(tmp_path / "one", "train")) < 1e9
    ranks = math.prod(size for size in layout.values() if isinstance(size, int))
    changes |= {"iterations_to_skip": [2, 3, 6], "data_path": [prefix], "run_dir": str(tmp_path / "more")}
    changes["save"] = str(tmp_path / "saved")
    run_ranks(ranks, trains, ranks, {**changes, **layout, "save_interval": 2, "exit_interval": 2})
    run_ranks(ranks, trains, ranks, {**changes, **layout, "load": changes["save"]})
    one, more = ([each["loss"] for each in records(tmp_path / name, "train")] for name in ("one", "more"))
    assert [each.last_step for each in read_sessions(tmp_path / "more")] == [2, 6]
    assert len(one) == 3 and more == pytest.approx(one, rel=1e-9)
    assert one[1] != pytest.approx(records(tmp_path / "all", "train")[3]["loss"], rel=1e-9)


def test_exit_without_a_folder_saves_nothing(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = fit(**{**TINY, "data_path": [prefix], **FOUR_STEPS, "exit_interval": 3})
    assert "stopping at step 3: exit_interval is 3" in lines and not list(tmp_path.rglob("step-*"))
    assert any(line.startswith("no checkpoint will be saved") for line in lines)


def trains(context: RankContext, ranks: int, changes: dict[str, Any]) -> None:
    config = tiny_config(ranks, **{**FOUR_STEPS, **changes})
    ReplicaTrainer(build(context, config)).fit()


def test_next_batch_is_read_during_a_step(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches are prefetched, from the first one on, across evaluations and saves."""
    unprepared: list[tuple[int, int]] = []
    load = BatchLoader.load

    def checked(self: BatchLoader, first: int, size: int, length: int | None = None) -> list[Microbatch]:
        if self._ahead is None or self._ahead.key != (first, size, length or self.seq_length):
            unprepared.append((first, size))
        return load(self, first, size, length)

    monkeypatch.setattr(BatchLoader, "load", checked)
    ramps = {"rampup_batch_size": [4, 4, 8], "seq_length_warmup": [4, 3]}
    lines = run(prefix, tmp_path / "run", save_interval=2, **ramps)
    assert unprepared == [] and lines[1].endswith("; ramp-up: 4, 8 sequences over 8 samples")
    assert len(records(tmp_path / "run", "train")) == 4


@pytest.mark.parametrize("slow", [False, True])
def test_prefetch_does_not_delay_kernel_launches(
    slow: bool, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading begins when it waits for the device, until three steps in a row have waited for their data."""
    order: list[str] = []
    prefetch, compute, wait = BatchLoader.prefetch, Stepper._run, read_batches

    def reading(loader: BatchLoader, *step: Any) -> None:
        before = loader._ahead
        prefetch(loader, *step)
        if loader._ahead is not before:
            order.append("read")

    def computing(*args: Any, **kwargs: Any) -> Any:
        order.append("compute")
        return compute(*args, **kwargs)

    monkeypatch.setattr(BatchLoader, "prefetch", reading)
    monkeypatch.setattr(Stepper, "_run", computing)
    monkeypatch.setattr("megalite.training.trainer.ReadAhead", lambda device: ReadAhead(torch.device("meta")))
    monkeypatch.setattr("megalite.training.trainer.read_batches", lambda *a, **k: (wait(*a, **k)[0], 1.0 * slow))
    run(prefix, tmp_path / "run", eval_interval=None, split="1,0,0", train_iters=5)
    late, early = ["compute", "read"], ["read", "compute"]
    assert order == ["read", *2 * late, *2 * (early if slow else late), "compute"]


def test_data_wait_is_that_of_the_slowest_rank(prefix: str, tmp_path: Path) -> None:
    lines, _ = run_ranks(2, second_rank_waits, prefix, str(tmp_path))
    assert [record["data_wait_ms"] for record in records(tmp_path, "train")] == [1000.0, 2000.0, 3000.0, 4000.0]
    assert [line.split("data wait ")[1] for line in lines if "data wait" in line] == [
        "1500.0 ms/step",
        "3500.0 ms/step",
    ]


def second_rank_waits(context: RankContext, prefix: str, folder: str) -> list[str]:
    load, lines = BatchLoader.load, list[str]()

    def waits(self: BatchLoader, first: int, size: int, length: int | None = None) -> list[Microbatch]:
        batches = load(self, first, size, length)
        self.waited = 0.125 * (first + size) * context.rank
        return batches

    changes = {"eval_interval": None, "log_interval": 2, "data_path": [prefix], "run_dir": folder}
    config = tiny_config(2, **{**FOUR_STEPS, **changes}, dp=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchLoader, "load", waits)
        ReplicaTrainer(build(context, config), lines.append).fit()
    return lines


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}], ids=str)
def test_bad_token_during_a_run_is_one_error_on_all_ranks(layout: dict[str, int], tmp_path: Path) -> None:
    tokens = np.random.default_rng(3).integers(1, 90, size=4000).tolist()
    write_by_layout(tmp_path / "d", [tokens])
    first, second = run_ranks(2, meets_bad_token, layout, str(tmp_path / "d"), str(tmp_path / "saved"))
    assert first == second
    kind, message, step = first
    assert (kind, step) == ("ConfigError", 1)
    assert message.startswith(f"rank {int('dp' in layout)}: {tmp_path}/d.bin: document 0 holds token id 60000")
    # The background save is complete.
    assert (tmp_path / "saved" / "latest").read_text().split()[0].endswith("1")


def meets_bad_token(context: RankContext, layout: dict[str, int], prefix: str, saved: str) -> tuple[str, str, int]:
    """Return (type, message, step) of the error after a file was damaged while open."""
    changes = {"eval_interval": None, "split": "1", "save": saved, "save_interval": 1, "async_save": True}
    config = tiny_config(2, **{**FOUR_STEPS, **changes}, **layout, data_path=[prefix])

    def spoil(run: ReplicaTrainer) -> None:
        assert run.loaders.train is not None
        tokens = np.fromfile(f"{prefix}.bin", "<u2")
        sample = run.loaders.train.dataset.sample(9)
        (place,) = (at for at in range(0, 3980, 16) if (tokens[at : at + 17] == sample).all())
        world = run.replica.topology.world
        world.gather_json(None)
        if context.rank == 0:
            with Path(f"{prefix}.bin").open("r+b") as file:
                file.seek(2 * (place + 8))
                file.write((60000).to_bytes(2, "little"))
        world.gather_json(None)

    run = ReplicaTrainer(build(context, config), on_open=spoil)
    with pytest.raises(ConfigError) as error:
        run.fit()
    return type(error.value).__name__, str(error.value), run.progress.step


def test_failed_evaluation_read_is_one_error_on_all_ranks(prefix: str) -> None:
    first, second = run_ranks(2, cannot_evaluate, prefix)
    assert first == second == ("ConfigError", "rank 1: [Errno 5] Input/output error: 'd.bin'")


def cannot_evaluate(context: RankContext, prefix: str) -> tuple[str, str]:
    config = tiny_config(2, **FOUR_STEPS, dp=2, data_path=[prefix])

    def spoil(run: ReplicaTrainer) -> None:
        if context.rank == 1:
            assert run.loaders.valid is not None
            run.loaders.valid.dataset = Broken(OSError(5, "Input/output error", "d.bin"))

    with pytest.raises(ConfigError) as error:
        ReplicaTrainer(build(context, config), on_open=spoil).fit()
    return type(error.value).__name__, str(error.value)


def test_changed_order_of_samples_is_reported(prefix: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "run" / "checkpoints")
    run(prefix, tmp_path / "run", save_interval=2, exit_interval=2, eval_interval=None)
    said = "the order of samples changes from here on: seed 1234 -> 99"
    for changes, lines in (({}, []), ({"seed": 99}, [said]), ({"seed": 99, "finetune": True}, [])):
        log = run(prefix, tmp_path / "more", load=saved, eval_interval=None, **changes)
        assert [line for line in log if "from here on" in line] == lines


def test_missed_test_evaluation_is_repeated_once(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        """The end of the process."""

    def killed(self: Trainer) -> None:
        raise Killed

    words = {"save_interval": 2, "load": str(tmp_path / "run" / "checkpoints"), "fresh_if_missing": True}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate_test", killed)
        with pytest.raises(Killed):
            run(prefix, tmp_path / "run", **words)
    assert not records(tmp_path / "run", "test")
    for _ in range(2):
        lines = run(prefix, tmp_path / "run", **words)
        assert lines[-2] == "the checkpoint is at step 4 of 4: nothing to do"
        assert lines[-1].startswith("step 4/4  test loss ")
        assert [record["step"] for record in records(tmp_path / "run", "test")] == [4]
    lines = run(prefix, tmp_path / "run", **{**words, "train_iters": 3})
    assert "the checkpoint is at step 4 of 3: nothing to do" in lines


def test_ranks_without_data_take_part_in_the_test_evaluation(prefix: str) -> None:
    one = logged(RankContext(0), 1, prefix)
    first, *rest = run_ranks(3, logged, 3, prefix)
    assert [line for line in first if "test loss" in line] == [line for line in one if "test loss" in line] != []
    assert rest == [[], []]


def logged(context: RankContext, world: int, prefix: str) -> list[str]:
    lines: list[str] = []
    config = tiny_config(world, **FOUR_STEPS, num_layers=3, pp=world, data_path=[prefix])
    ReplicaTrainer(build(context, config), lines.append if context.rank == 0 else lambda line: None).fit()
    return lines
