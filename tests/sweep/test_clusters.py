"""Kubernetes jobs with a kubectl of a few shell lines, and Ray tasks on a cluster of this host."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config.errors import ConfigError
from megalite.sweep.candidates import Run
from megalite.sweep.clusters import KubernetesLauncher, RayLauncher
from megalite.sweep.results import FAILED, OK, OOM, TIMEOUT
from megalite.sweep.spec import KubernetesSpec, RaySpec, read_spec
from tests.sweep.sweeps import MODEL, put_programs, read_runs, results_of, write_sweep


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, ...]:
    """Two runs of two ranks each."""
    return read_runs(write_sweep(tmp_path, grid={"tp": [1, 2]}))[1]


KUBECTL = """
echo "$@" >> $PODS/asked
case $1 in
create) echo made > $PODS/$(basename $(dirname "$3"));;
get) cat $PODS/status;;
delete) rm -f $PODS/$(basename $(dirname "${@: -1}"));;
esac"""
Cluster = Callable[[str], Path]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Put a kubectl on the path that reports a status for all jobs; return the folder in which it logs its arguments."""
    pods, programs = tmp_path / "pods", tmp_path / "bin"
    pods.mkdir()
    programs.mkdir()
    monkeypatch.setenv("PODS", str(pods))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def put(status: str) -> Path:
        (pods / "status").write_text(status)
        put_programs(programs, {"kubectl": KUBECTL})
        return pods

    return put


def spec_of(tmp_path: Path, **changes: Any) -> KubernetesSpec:
    keys = {"image": "registry/megalite:1", "claim": "shared", "mount": tmp_path, "gpus_per_node": 1}
    return KubernetesSpec(**{**keys, "poll_seconds": 0.01, **changes})


ODD = "a 'b' \"c\" $(JOB_COMPLETION_INDEX) $HOME `id` \\ # %d: {e}\nf"


def test_manifest_is_an_indexed_job_with_exact_words(runs: tuple[Run, ...], tmp_path: Path) -> None:
    folder = tmp_path / "odd $(HOME) 'run'"
    launcher = KubernetesLauncher(spec_of(tmp_path), environment={"ODD": ODD, "N": "1"})
    text = launcher.manifest(runs[0], folder, timeout=90.5)
    service, job = yaml.safe_load_all(text)
    name = job["metadata"]["name"]
    assert (service["kind"], job["kind"], service["metadata"]["name"]) == ("Service", "Job", name)
    assert len(name) < 64 and name.replace("-", "").isalnum() and name.islower()
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        "Indexed",
        2,
        2,
        0,
    )
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", name)
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    (train,) = pod["containers"]
    assert train["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in train["volumeMounts"]}
    words, environment = as_the_pod_sees(train, index="1")
    assert environment == {"ODD": ODD, "N": "1"}
    assert words[:3] == ["timeout", "151", "python"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == f"{name}-0.{name}"
    assert words[-2:] == ["--config", f"{folder}/config.yaml"]
    assert train["command"][-1].replace("$$", "$") == f"{folder}/log.txt"


def as_the_pod_sees(container: dict[str, Any], *, index: str) -> tuple[list[str], dict[str, str]]:
    """The container's arguments and variables, expanded as by Kubernetes: $$ is a dollar, $(NAME) a variable."""

    def seen(word: str) -> str:
        parts = [part.replace("$(JOB_COMPLETION_INDEX)", index) for part in word.split("$$")]
        return "$".join(parts)

    return [seen(word) for word in container["args"]], {each["name"]: seen(each["value"]) for each in container["env"]}


def test_container_output_goes_to_the_log(runs: tuple[Run, ...], tmp_path: Path) -> None:
    text = KubernetesLauncher(spec_of(tmp_path), environment={}).manifest(runs[0], tmp_path, timeout=1)
    command = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]["command"]
    for word in ("one; two", "$HOME"):
        assert subprocess.run([*command, "echo", word], check=False).returncode == 0
    assert (tmp_path / "log.txt").read_text() == "one; two\n$HOME\n"


def test_jobs_are_created_watched_and_deleted(cluster: Cluster, runs: tuple[Run, ...], tmp_path: Path) -> None:
    pods = cluster('{"status": {"ready": 2, "conditions": [{"type": "Complete", "status": "True"}]}}')
    results = results_of(tmp_path, runs, KubernetesLauncher(spec_of(tmp_path), environment={}), timeout=240.0)
    assert [results[run.key].status for run in runs] == [FAILED, FAILED]
    assert results[runs[0].key].error == "exited with status 0 but wrote no step after the first 1"
    asked = [line.split()[0] for line in (pods / "asked").read_text().splitlines()]
    assert asked == 2 * ["create", "get", "delete"]
    assert {path.name for path in pods.iterdir()} == {"asked", "status"}, "no process is left"


def test_failed_and_timed_out_jobs(cluster: Cluster, runs: tuple[Run, ...], tmp_path: Path) -> None:
    pods = cluster('{"status": {"ready": 1, "conditions": [{"type": "Failed", "status": "True"}]}}')
    launcher = KubernetesLauncher(spec_of(tmp_path), environment={})
    assert results_of(tmp_path, runs[:1], launcher, timeout=240.0)[runs[0].key].status == FAILED
    cluster('{"status": {"ready": 2, "conditions": [{"type": "Complete", "status": "False"}]}}')
    assert results_of(tmp_path, runs, launcher, timeout=0.3)[runs[1].key].status == TIMEOUT
    assert {path.name for path in pods.iterdir()} == {"asked", "status"}


def test_waiting_for_a_node_does_not_count(cluster: Cluster, runs: tuple[Run, ...], tmp_path: Path) -> None:
    cluster('{"status": {"ready": 1, "active": 2}}')
    job = KubernetesLauncher(spec_of(tmp_path, poll_seconds=1e-6), environment={}).start(runs[0], tmp_path, timeout=60)
    assert (job.poll(), job.seconds()) == (None, 0.0)
    cluster('{"status": {"ready": 2}}')
    assert job.poll() is None
    assert job.seconds() > 0.0


def test_requirements_of_kubernetes(runs: tuple[Run, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="requires kubernetes: image"):
        KubernetesLauncher(KubernetesSpec(), environment={})
    with pytest.raises(ConfigError, match=r"is not below kubernetes: mount /runs"):
        KubernetesLauncher(spec_of(Path("/runs")), environment={}).start(runs[0], tmp_path, timeout=1)
    with pytest.raises(ConfigError, match="cannot start kubectl"):
        KubernetesLauncher(spec_of(tmp_path), environment={}).start(runs[0], tmp_path, timeout=1)
    with pytest.raises(ConfigError, match=r"resources: GPU is 'all'; use a number"):
        read_spec(write_sweep(tmp_path, ray={"resources": {"GPU": "all"}}))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


def launcher_of(program: Path | None = None) -> RayLauncher:
    spec = RaySpec(gpus_per_node=2, at_once=2, resources={"CPU": 1.0})
    return RayLauncher(spec, environment={"OMP_NUM_THREADS": "1"}, program=program)


@pytest.mark.e2e
def test_ray_task_trains(ray: Any, tmp_path: Path) -> None:
    """torchrun with two ranks as a task."""
    path = write_sweep(tmp_path, grid={"tp": [1, 2]}, settings=MODEL | {"hang_timeout_minutes": 0})
    _, runs = read_runs(path)
    results = results_of(tmp_path, runs, launcher_of(), timeout=240.0)
    assert [results[run.key].status for run in runs] == [OK, OK], results
    assert all(results[run.key].steps == 2 for run in runs)
    assert ray.available_resources()["CPU"] == 2.0


PROGRAM = """import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[2]).parent
if os.environ["RANK"] == "0":
    (folder / "pid").write_text(str(os.getpid()))
if "tp_1" in str(folder):
    raise MemoryError("as there is none")
time.sleep(600)
"""


def test_failed_and_timed_out_ray_tasks_leave_no_process(ray: Any, runs: tuple[Run, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    results = results_of(tmp_path, runs[:1], launcher_of(program), timeout=240.0)
    assert results[runs[0].key].status == OOM, results
    results = results_of(tmp_path, runs, launcher_of(program), timeout=20.0)
    assert results[runs[1].key].status == TIMEOUT, results
    for pid in tmp_path.glob("out/runs/*/pid"):
        assert not (Path("/proc") / pid.read_text()).exists()
