"""metrics.jsonl and TensorBoard contain all records, also NaN, and also after a kill."""

import csv
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.training.records import BestEffort, JsonLines
from megalite.training.writers import (
    COLUMNS,
    TENSORBOARD_TAGS,
    Comet,
    CSVFile,
    MLflow,
    TensorBoard,
    Wandb,
    open_writers,
)


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "consumed_samples": 8 * step, "loss": 1.0 / step, **more}


def lines(path: Path) -> list[dict[str, Any]]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=no_constants) for line in path.read_text().splitlines()]


def test_each_record_is_written_immediately(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", step=0)
    for step in (1, 2):
        sink.write(record(step, mfu=None, skipped=False))
        assert lines(tmp_path / "metrics.jsonl")[-1] == record(step, mfu=None, skipped=False)
    sink.write(record(3, loss=math.nan, grad_norm=math.inf, lr=-math.inf))
    sink.close()
    line = lines(tmp_path / "metrics.jsonl")[-1]
    assert (line["loss"], line["grad_norm"], line["lr"]) == ("nan", "inf", "-inf")


# Possible ends of the file after a crash of the machine.
@pytest.mark.parametrize(
    "cut", ["", '{"kind": "train", "step": 1, "lo', '{"step": 1}\n', "[1]\n", "\0\0\0\n", '{"kind": "train", "st\n']
)
def test_resumed_run_drops_repeated_lines(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path, step=0)
    for step in (1, 2, 3):
        first.write(record(step))
    first.write({"kind": "valid", "step": 3, "consumed_samples": 24, "valid_loss": 2.0})
    first.close()
    path.write_text(path.read_text() + cut)
    second = JsonLines(path, step=2)
    second.write(record(3, loss=0.25))
    second.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 1.0), (2, 0.5), (3, 0.25)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_megatron_tags_and_keeps_curves_on_resume(tmp_path: Path) -> None:
    """The repeated step 2 appears again, and no earlier point is lost, over steps or samples."""
    numbers = {name: float(index + 1) for index, name in enumerate(TENSORBOARD_TAGS)}
    for steps in ((1, 2), (2, 3)):
        sink = TensorBoard(tmp_path)
        for step in steps:
            sink.write({**record(step), **numbers, "ms_per_step": 1500.0})
        sink.close()
    sink = TensorBoard(tmp_path)
    sink.write(record(4, mfu=None, grad_norm=math.nan))
    sink.close()
    found = scalars(tmp_path)
    assert math.isnan(found["grad-norm"][-1][1]) and found["mfu"][-1][0] == 3, (
        "unknown values are omitted, NaN is shown"
    )
    megatrons = {
        *("lm loss", "learning-rate", "grad-norm", "loss-scale", "batch-size"),
        *("iteration-time", "throughput", "lm loss validation", "lm loss validation ppl"),
        "load_balancing_loss",
    }
    assert megatrons <= set(found)
    assert set(found) == {tag + end for tag in TENSORBOARD_TAGS.values() for end in ("", " vs samples")}
    assert dict(found["lm loss"]) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 0.25}
    assert {samples for samples, _ in found["lm loss vs samples"]} == {8, 16, 24, 32}
    assert dict(found["iteration-time"]) == dict.fromkeys((1, 2, 3), 1.5), "in seconds, as Megatron-LM logs it"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_csv_row_is_written_immediately(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,kind,loss,gone\n1,train,2.5,x\n2,train,2.25,x\n")
    sink = CSVFile(path, step=1)  # the file has an older header
    sink.write(record(2, mfu=None, skipped=False, something_new=1))
    assert rows(path)[-1]["step"] == "2"
    sink.write({"kind": "valid", "step": 2, "consumed_samples": 16, "valid_loss": math.nan})
    sink.close()
    first, second, valid = rows(path)
    assert list(first) == list(COLUMNS)
    assert set(TENSORBOARD_TAGS) <= set(COLUMNS), "every metric has a column"
    assert (first["loss"], second["loss"], first["mfu"], first["valid_loss"]) == ("2.5", "0.5", "", "")
    assert (valid["kind"], valid["valid_loss"], valid["loss"]) == ("valid", "nan", "")


@pytest.mark.parametrize("cut", ["", "train,3,2", "train,x\n", "\0\0\n", "train\xff"])
def test_resumed_run_drops_repeated_csv_rows(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "metrics.csv"
    for step, more in ((0, (1, 2, 3)), (2, (3, 4))):
        sinks = (CSVFile(path, step=step), JsonLines(tmp_path / "metrics.jsonl", step=step))
        for sink in sinks:
            for number in more:
                sink.write(record(number, loss=float(10 * step + number)))
            sink.close()
        if not step:
            path.write_bytes(path.read_bytes() + cut.encode("latin-1"))
    expected = [(row["step"], row["loss"]) for row in lines(tmp_path / "metrics.jsonl")]
    assert [(int(row["step"]), float(row["loss"])) for row in rows(path)] == expected
    assert expected == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]


class Stub:
    """The used part of `wandb`, with the package's arguments only."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self.axes: list[tuple[str, str | None]] = []

    def init(
        self,
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str | None = None,
        save_code: bool | None = None,
        settings: dict[str, Any] | None = None,
    ) -> "Stub":
        self.started.append({name: value for name, value in locals().items() if name != "self"})
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is None
        self.logged.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub, module = Stub(), types.ModuleType("wandb")
    vars(module)["init"] = stub.init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return stub


def config_of(folder: Path, **more: Any) -> RunConfig:
    return replace(RunConfig(), **{"run_dir": str(folder), "metrics": ["wandb"], "wandb_project": "tiny", **more})


def test_wandb_gets_numbers_by_tag(tmp_path: Path, wandb: Stub) -> None:
    """wandb continues the curves of a resumed run, and receives no credentials."""
    sink = Wandb(config_of(tmp_path, data_path=["s3://me:hunter2@host/x"]), step=0)
    sink.write(record(1, ms_per_step=1500.0, forward_ms=250.0, mfu=None, grad_norm=math.inf))
    sink.close()
    (started,) = wandb.started
    assert (started["project"], started["name"], started["dir"]) == ("tiny", tmp_path.name, str(tmp_path))
    assert started["settings"]["x_disable_meta"] and started["settings"]["console"] == "off"
    assert "hunter2" not in str(started) and "s3://***@host/x" in str(started["config"])
    assert wandb.axes == [("*", "step")]
    numbers = {"lm loss": 1.0, "iteration-time": 1.5, "forward-compute-time": 0.25, "grad-norm": math.inf}
    assert wandb.logged == [{**numbers, "step": 1, "consumed_samples": 8}]
    assert wandb.finished == 1
    for load in ("x", None):
        Wandb(config_of(tmp_path, load=load), step=0)
    first, second, third = (started["id"] for started in wandb.started)
    assert first == second != third


@pytest.mark.parametrize(("service", "package"), [("mlflow", "mlflow"), ("wandb", "wandb"), ("comet", "comet_ml")])
def test_missing_package_of_a_service_is_an_error(
    service: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"^metrics has {service} in it but .*; pip install {package}, or leave"):
        open_writers(config_of(tmp_path, metrics=[service]), step=0)


def test_wandb_errors_at_the_start_and_later(tmp_path: Path, wandb: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any, **named: Any) -> None:
        raise RuntimeError("no key for https://me:hunter2@host,\ncall login")

    said: list[str] = []
    sink = BestEffort(open_writers(config_of(tmp_path), step=0)[0]["wandb"], "wandb", said.append)
    for name in ("log", "finish"):
        monkeypatch.setattr(wandb, name, refuse)
    sink.write(record(1))
    sink.close()
    assert said[0].startswith(
        "warning: cannot write wandb: no key for https://***@host, call login; training continues"
    )
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match=r"wandb does not start: .*no key for https://\*\*\*@host, call login; run"):
        open_writers(config_of(tmp_path), step=0)


def test_prometheus_file_has_the_newest_numbers(tmp_path: Path) -> None:
    folder = tmp_path / 'a"b'
    folder.mkdir()
    sinks, _ = open_writers(replace(RunConfig(), run_dir=str(folder), metrics=["prometheus"]), step=0)
    sink = sinks[str(folder / "metrics.prom")]
    sink.write(record(1, skipped=False, dp_phase="gradients"))
    sink.write(record(2, loss=math.nan, skipped=True, mfu=None))
    sink.write({"kind": "valid", "step": 2, "consumed_samples": 16, "valid_loss": math.inf})
    sink.close()
    rows = (folder / "metrics.prom").read_text().splitlines()
    assert rows[::2] == [f"# TYPE {row.partition('{')[0]} gauge" for row in rows[1::2]]
    found = dict(row.rsplit(" ", 1) for row in rows[1::2])
    label = '{run="a\\"b"}'
    assert found == {
        f"megalite_{name}{label}": value
        for name, value in {
            "step": "2.0",
            "consumed_samples": "16.0",
            "loss": "NaN",
            "skipped": "1.0",
            "valid_loss": "+Inf",
        }.items()
    }
    assert [path.name for path in folder.glob("metrics*")] == ["metrics.prom"]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_mlflow_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("sqlalchemy")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    config = replace(RunConfig(), run_dir=str(tmp_path), metrics=["mlflow"], data_path=["s3://me:hunter2@host/x"])
    for resumes, steps in ((False, (1, 2)), (True, (3,))):
        sink = MLflow(replace(config, load="x" if resumes else None), step=0)
        for step in steps:
            sink.write(record(step))
        sink.close()
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.run_id == (tmp_path / "mlflow-run-id").read_text().strip() and run.info.status == "FINISHED"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "lm loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert run.data.params["hidden_size"] == str(config.model.hidden_size) and "hunter2" not in str(run.data.params)


class CometStub(types.ModuleType):
    """The used part of `comet_ml`, with the package's arguments only."""

    def __init__(self) -> None:
        super().__init__("comet_ml")
        self.started: list[tuple[str | None, dict[str, Any]]] = []
        self.calls: list[tuple[str, Any]] = []

    SETTINGS = (
        "log_code log_graph parse_args log_git_metadata log_git_patch log_env_details log_env_host auto_output_logging "
        "auto_param_logging auto_metric_logging auto_log_co2 offline_directory name"
    )

    def ExperimentConfig(self, **given: Any) -> dict[str, Any]:
        assert given.keys() == set(self.SETTINGS.split()), "omitted settings would be logged, others do not exist"
        return given

    def start(self, *, experiment_key: str | None = None, experiment_config: dict[str, Any]) -> "CometStub":
        self.started.append((experiment_key, experiment_config))
        return self

    def get_key(self) -> str:
        return self.started[-1][0] or "0123456789abcdef" * 2

    def log_parameters(self, parameters: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("parameters", parameters))

    def log_metrics(self, dic: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("metrics", (step, dic)))

    def end(self) -> None:
        self.calls.append(("end", None))


def test_comet_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers by tag, the config once and without credentials, and nothing that Comet collects itself."""
    comet = CometStub()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    config = replace(RunConfig(), run_dir=str(tmp_path), metrics=["comet"], data_path=["s3://me:hunter2@host/x"])
    for resumes in (False, True):
        sink = Comet(replace(config, load="x" if resumes else None), step=0)
        sink.write(record(1, ms_per_step=1500.0, mfu=None))
        sink.close()
    (first, settings), (second, _) = comet.started
    assert first is None and second == (tmp_path / "comet-run-id").read_text().strip()
    assert settings.pop("name") == tmp_path.name and settings.pop("offline_directory") == str(tmp_path / "comet")
    assert set(settings.values()) == {False}
    written = ("metrics", (1, {"lm loss": 1.0, "iteration-time": 1.5}))
    (_, parameters), *rest = comet.calls
    assert rest == [written, ("end", None)] * 2
    assert parameters["hidden_size"] == str(config.model.hidden_size) and "hunter2" not in str(parameters)
