"""`Trainer` from Python: without a launcher, with a user's parts, and with callbacks."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite import BLOCKS, DATASETS, OPTIMIZERS, Callback, ConfigError, Optimizer, RunConfig, Trainer, configure
from megalite.checkpoint.files import lock_folder
from megalite.config.model import ModelConfig
from megalite.config.training import WRITERS
from megalite.models.block import Block
from megalite.optimizers.base import Exchange, Update
from megalite.training.callbacks import CallbackError
from megalite.training.stopping import Ending, RunFolder
from tests.e2e.forked import train_forked
from tests.support.plugins import registered
from tests.support.tiny import words

SIZES: dict[str, Any] = words(
    "num_layers=2 hidden_size=32 num_attention_heads=4 seq_length=16 vocab_size=64 global_batch_size=4 "
    "train_iters=4 device=cpu log_interval=1"
)


def mock(**changes: Any) -> RunConfig:
    return configure(**{**SIZES, "mock_data": True, **changes})


class RecordingCallback(Callback):
    """Records the called hooks and their arguments."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stop_at = stop_at
        self.records: list[dict[str, Any]] = []

    def on_start(self, trainer: Trainer) -> None:
        self.calls.append(("start", trainer.progress.step))

    def on_step_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.calls.append(("step", record["step"]))
        self.records.append(record)
        if record["step"] == self.stop_at:
            trainer.stop("the test wants it")

    def on_evaluation(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.calls.append((record["kind"], record["step"]))

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        self.calls.append(("checkpoint", path.name))

    def on_end(self, trainer: Trainer, ending: Ending) -> None:
        self.calls.append(("end", ending.status))


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    noted, other = RecordingCallback(), RecordingCallback()
    config = mock(run_dir=str(tmp_path), save_interval=2, train_iters=2, eval_interval=2, eval_iters=1)
    assert Trainer(config, callbacks=[noted, other], log=lambda line: None).fit().status == "finished"
    assert (
        noted.calls
        == other.calls
        == [
            *(("start", 0), ("valid", 0), ("step", 1), ("step", 2), ("valid", 2)),
            *(("checkpoint", "step-0000002"), ("end", "finished")),
        ]
    )
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert noted.records == [record for record in written if record["kind"] == "train"]


def test_callback_can_stop_the_run_and_it_resumes(tmp_path: Path) -> None:
    whole, first, rest = RecordingCallback(), RecordingCallback(stop_at=2), RecordingCallback()
    Trainer(mock(), callbacks=[whole], log=lambda line: None).fit()
    folder = {"save": str(tmp_path), "load": str(tmp_path), "fresh_if_missing": True}
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"does not exist.* or add --fresh-if-missing to start from step 0"):
        Trainer(mock(**folder | {"load": "missing", "fresh_if_missing": False}), log=said.append).fit()
    assert said == []  # before the model is built
    ending = Trainer(mock(**folder), callbacks=[first], log=said.append).fit()
    assert (ending.status, ending.exit_code, ending.step) == ("stopped", 0, 2)
    assert any("the test wants it" in line for line in said)
    assert first.calls[-2:] == [("checkpoint", "step-0000002"), ("end", "stopped")]
    Trainer(mock(**folder), callbacks=[rest], log=lambda line: None).fit()
    assert rest.calls[0] == ("start", 2)
    assert [r["loss"] for r in first.records + rest.records] == [r["loss"] for r in whole.records]


def lost(config: RunConfig, *, step: int) -> None:
    raise RuntimeError("no server")


def test_refused_start_releases_the_folder(tmp_path: Path) -> None:
    """In a notebook the process remains: after a fix the same folder can be used again."""
    folder: dict[str, Any] = {"run_dir": str(tmp_path), "save_interval": 2}
    saved = {"load": str(tmp_path / "checkpoints")}
    Trainer(mock(**folder), log=lambda line: None).fit()
    for _ in range(4):  # more often than a step may fail
        with pytest.raises(ConfigError, match="leave out --ckpt-step to continue from the newest"):
            Trainer(mock(**folder, **saved, ckpt_step=2), log=lambda line: None).fit()
        with registered(WRITERS, "lost", lost), pytest.raises(ConfigError, match="metrics lost does not start"):
            Trainer(mock(**folder, **saved, train_iters=6, metrics=["lost"]), log=lambda line: None).fit()
    assert Trainer(mock(**folder, **saved, train_iters=6), log=lambda line: None).fit().step == 6


def test_exit_file_of_a_live_run_stays_removed(tmp_path: Path) -> None:
    """exit.json is missing while that run is alive, and after it is killed: it must be restarted."""
    (tmp_path / "checkpoints").mkdir()
    lock = lock_folder(tmp_path / "checkpoints")
    assert lock is not None
    with pytest.raises(ConfigError, match="another run is saving into"):
        Trainer(mock(run_dir=str(tmp_path), save_interval=2), log=lambda line: None).fit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]
    os.close(lock)


def test_run_without_the_lock_changes_no_file(tmp_path: Path) -> None:
    """Start a second run beside a live one: with wrong settings, stopped, or able to train."""
    record = '{"kind": "train", "step": 9}\n'
    (tmp_path / "metrics.jsonl").write_text(record)
    lock = lock_folder(tmp_path)
    assert lock is not None
    folder = {"run_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="nccl"):
        Trainer(mock(**folder, distributed_backend="nccl"), log=lambda line: None).fit()
    with pytest.raises(ConfigError, match="another run is writing into"):
        Trainer(mock(**folder, tokenizer_model="nowhere.json"), log=lambda line: None).fit()  # before any file is read
    RunFolder(str(tmp_path)).leave(Ending.finished(1))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == record
    os.close(lock)
    assert Trainer(mock(**folder, train_iters=2), log=lambda line: None).fit().step == 2
    with pytest.raises(ConfigError, match="cannot be read"):
        Trainer(mock(**folder, tokenizer_model="nowhere.json"), log=lambda line: None).fit()
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("hook", ["on_start", "on_step_end", "on_end"])
def test_callback_error_ends_the_run_and_is_named(hook: str, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of ideas")

    bad = type("Bad", (Callback,), {hook: fail})()
    with pytest.raises(CallbackError, match=rf"{hook} of Bad has failed: RuntimeError: out of ideas") as error:
        Trainer(mock(run_dir=str(tmp_path)), callbacks=[bad], log=lambda line: None).fit()
    assert isinstance(error.value.__cause__, RuntimeError)
    ending = json.loads((tmp_path / "exit.json").read_text())
    assert ending["status"] == "failed" and "out of ideas" in ending["reason"]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (None, r"callbacks take instances of subclasses of megalite.Callback, got <class '.*Callback'>"),
        (("on_step",), "callback Mine: on_step is not a hook: did you mean on_step_end.*one of on_start, on_step_end"),
    ],
)
def test_callback_with_a_mistake_is_refused(members: tuple[str, ...] | None, says: str) -> None:
    given: Any = Callback if members is None else type("Mine", (Callback,), dict.fromkeys(members, print))()
    with pytest.raises(ConfigError, match=says):
        Trainer(mock(), callbacks=[given])


def script(words: list[str]) -> int:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 32}
    Trainer(configure(**sizes, mock_data=True, train_iters=2, log_interval=1, device="cpu")).fit()
    return 0


def test_script_needs_no_launcher_and_logs_to_stdout() -> None:
    done = train_forked(1, command=f"{__name__}:script").require_success()
    assert done.err == ""
    assert "megalite: 1 rank = tp 1" in done.out and "2/2" in done.out


class Counted:
    """A map-style dataset with samples that contain their number."""

    def __init__(self, count: int = 5, **odd: Any) -> None:
        self.count, self.odd, self.read = count, odd, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return self.odd.get("sample", np.full(17, i))


def fit(config: RunConfig, **parts: Any) -> list[dict[str, Any]]:
    noted = RecordingCallback()
    Trainer(config, callbacks=[noted], log=lambda line: None, **parts).fit()
    return noted.records


def test_map_dataset_is_shuffled_by_the_seed() -> None:
    config = configure(**SIZES)
    orders = []
    for seed in (1, 1, 2):
        data = Counted()
        fit(configure(**SIZES, seed=seed), dataset=data)
        orders.append(data.read[3:19])  # after three reads of the first sample
    assert orders[0] == orders[1] != orders[2]
    first, second = orders[0][:5], orders[0][5:10]
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4] and first != second, "each epoch has another order"
    kinds = [[17 * [3]], {"train": [17 * [3]]}, [{"input_ids": torch.full((17,), 3)}]]
    found = [[record["loss"] for record in fit(config, dataset=kind)] for kind in kinds]
    assert found[0] == found[1] == found[2]


class Endless:
    def sample(self, k: int) -> np.ndarray:
        return np.full(17, k % 7)


def test_dataset_of_numbered_samples_keeps_its_order() -> None:
    by_function = lambda split, config, tokenizer: Endless() if split == "train" else None  # noqa: E731
    with registered(DATASETS, "endless", by_function):
        named = fit(configure(**SIZES, dataset="endless"))
    assert [r["loss"] for r in fit(configure(**SIZES), dataset=Endless())] == [r["loss"] for r in named]


class Inconsistent:
    def __init__(self) -> None:
        self.calls = 0

    def sample(self, k: int) -> np.ndarray:
        self.calls += 1
        return np.full(17, self.calls % 64)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (iter([1]), "has neither sample\\(k\\) nor a length and \\[i\\]; an iterable cannot resume"),
        ([], "the train split is empty"),
        (Counted(sample=np.zeros(16, dtype=int)), r"is int64 of shape \[16\], but must be 17 whole numbers"),
        (Counted(sample=np.zeros(17)), "is float64"),
        (Counted(sample=np.full(17, 64)), "holds token id 64, outside vocab_size 64; use --vocab-size 65"),
        (Counted(sample=np.full(17, -1)), "holds token id -1, outside vocab_size 64; ids are at least 0"),
        (Inconsistent(), "sample 0 has other tokens when it is read again"),
        (Counted(sample={"tokens": np.zeros(17, dtype=int)}), "sample 0 is a mapping without input_ids; it has tokens"),
        ({"valid": [17 * [1]]}, "has no split train"),
        ("nothing", "dataset is 'nothing'; it must be one of"),
    ],
)
def test_bad_dataset_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(configure(**SIZES), dataset=given, log=lambda line: None).fit()


def test_evaluation_needs_its_split() -> None:
    config = configure(**SIZES, eval_interval=2)
    both = {"train": Counted(), "validation": Counted()}
    assert fit(config, dataset=both)
    with pytest.raises(ConfigError, match=r"no validation data; add a split valid to dataset"):
        Trainer(config, dataset=Counted(), log=lambda line: None).fit()


class MissingState(Optimizer):
    """Has a state that is missing in its registration."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for states in self._states.values():
            states["more"] = torch.zeros(1)

    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        self.updates += 1


class Sign(Optimizer):
    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        for flat in self.parameters:
            flat.param.data.add_(flat.grad.sign(), alpha=-update.rate(flat))
        self.updates += 1


class MissingParameter(Block):
    """Has a parameter that is missing in its registration."""

    def __init__(self, index: int, config: ModelConfig, **settings: Any) -> None:
        super().__init__(index, config, **settings)
        self.scale = settings["factory"].parameter(f"layers.{index}.scale", (4,), value=1.0, decay=False)


class Plain(Block):
    def __init__(self, index: int, config: ModelConfig, **settings: Any) -> None:
        super().__init__(index, config, **settings)
        self.scale = torch.nn.Parameter(torch.ones(4))


def test_optimizer_and_model_by_class_or_name() -> None:
    with registered(OPTIMIZERS, "sign", Sign, states=(), settings=""):
        by_class, by_name = fit(mock(), optimizer=Sign), fit(mock(), optimizer="sign")
        assert [r["loss"] for r in by_class] == [r["loss"] for r in by_name]
        with pytest.raises(
            ConfigError, match="exp_avg_dtype bf16 has no effect with optimizer sign; use --optimizer adam"
        ):
            Trainer(mock(exp_avg_dtype="bf16"), optimizer=Sign, explicit=frozenset({"exp_avg_dtype"})).fit()
    with pytest.raises(ConfigError, match="optimizer: Sign is not registered"):
        Trainer(mock(), optimizer=Sign)
    model = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=64)
    assert fit(mock(), model=model)[0]["loss"] == fit(mock(num_layers=1))[0]["loss"]
    with pytest.raises(ConfigError, match="model is a Linear that is built already"):
        Trainer(mock(), model=torch.nn.Linear(2, 2))
    settings: Any = {"num_layers": 2}
    with pytest.raises(ConfigError, match=r"takes a RunConfig, not a dict; write Trainer\(configure\(\*\*settings\)\)"):
        Trainer(settings)


def test_class_unlike_its_registration_is_refused() -> None:
    with registered(OPTIMIZERS, "greedy", MissingState, states=("one",)):
        says = r"optimizer greedy keeps the states one .*, more .* is registered with one .*correct `states`"
        with pytest.raises(ConfigError, match=says):
            Trainer(mock(), optimizer=MissingState, log=lambda line: None).fit()
    with registered(BLOCKS, "wider", MissingParameter):
        says = r"layers.0.scale has the shape, .* \(\[4\], None, False\), but its registration says \(missing\)"
        with pytest.raises(ConfigError, match=says):
            Trainer(mock(), model=MissingParameter, log=lambda line: None).fit()
    with registered(BLOCKS, "plain", Plain), pytest.raises(ConfigError, match=r"layers\.0\.scale is a plain parameter"):
        Trainer(mock(), model="plain", log=lambda line: None).fit()
