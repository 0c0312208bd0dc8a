"""Each launcher of examples/multi_node, with recorded starts: the ranks, their rendezvous, and that the training flags are
valid."""

import importlib.util
import os
import socket
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from megalite.config.flags import Invocation, parse_arguments
from megalite.config.validate import require_startable, validate

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/multi_node"
FLAGS = ["--config", "examples/multi_node/run.yaml"]

RECORD = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORDED/${0##*/}"
env > "$RECORDED/${0##*/}.env"
"""
PROGRAMS = {
    "torchrun": RECORD + '[ -z "${SAYS:-}" ] || echo "$SAYS" > "$RUN_DIR/exit.json"\nexit "${ENDS:-0}"\n',
    "srun": '#!/bin/bash\n"$@"\n',
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then printf "node17\\nnode18\\n"; else\n'
    + RECORD.partition("\n")[2]
    + "fi\n",
}
"""Programs of clusters, or replacements."""


@dataclass(frozen=True)
class Started:
    """Recorded actions of a launcher."""

    status: int
    said: str
    folder: Path

    def words(self, program: str) -> list[str] | None:
        """Arguments of a program's call; None if it was not called."""
        path = self.folder / program
        return path.read_text().splitlines() if path.exists() else None

    def variables(self, program: str) -> dict[str, str]:
        """Environment variables of the call."""
        lines = (self.folder / f"{program}.env").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    @property
    def is_host(self) -> bool:
        """Whether torchrun hosts the store here."""
        return "is_host=1" in self.torchrun.rdzv_conf

    @property
    def torchrun(self) -> Any:
        """torchrun's arguments, by its own parser."""
        words = self.words("torchrun")
        assert words is not None, self.said
        return get_args_parser().parse_args(words)

    @property
    def training(self) -> Invocation:
        """The config of pretrain_gpt.py, valid on the ranks that torchrun starts."""
        launch = self.torchrun
        assert Path(launch.training_script) == ROOT / "pretrain_gpt.py"
        invocation = parse_arguments(launch.training_script_args)
        ranks = int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node)
        require_startable(validate(invocation.config, ranks, invocation.explicit))
        return invocation


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Run a launcher's command with the programs above first in PATH."""
    programs, recorded = tmp_path / "bin", tmp_path / "recorded"
    programs.mkdir()
    recorded.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(*command: str, **variables: str) -> Started:
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RECORDED": str(recorded),
            "RUN_DIR": str(tmp_path / "run"),
            **variables,
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=30
        )
        return Started(done.returncode, done.stdout + done.stderr, recorded)

    return run


HAND = ("bash", "examples/multi_node/launch.sh")


def test_manual_start(start: Any, tmp_path: Path) -> None:
    variables = {"NODES": "1:2", "HEAD": "10.0.0.1", "GPUS": "8", "IFNAME": "eth1", "LOCAL_ADDR": "10.0.0.2"}
    done = start(*HAND, *FLAGS, "--elastic", "--data-path", "a b", **variables)
    assert done.status == 0, done.said
    torchrun, config = done.torchrun, done.training.config
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.max_restarts) == ("1:2", "8", 3)
    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
    assert torchrun.local_addr == "10.0.0.2"
    assert "a b" in torchrun.training_script_args, "each argument stays one word"
    assert config.parallel.elastic
    assert config.logging.run_dir == str(tmp_path / "run")
    assert config.checkpoint.load == str(tmp_path / "run/checkpoints")
    assert config.checkpoint.fresh_if_missing
    seen = done.variables("torchrun")
    assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == "eth1"
    assert seen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"
    assert list((tmp_path / "run").iterdir()) == [], "no file is left"
    missing = start(*HAND, *FLAGS, NODES="2")
    assert missing.status != 0 and "HEAD: the host where all meet" in missing.said


@pytest.mark.parametrize("head", ["127.0.0.1", socket.gethostname(), "203.0.113.7", "no-such-host.invalid"])
def test_head_recognizes_each_of_its_names(start: Any, head: str) -> None:
    done = start(*HAND, *FLAGS, NODES="2", HEAD=head, GPUS="8", RDZV_CONF="join_timeout=9")
    assert done.is_host == (head not in ("203.0.113.7", "no-such-host.invalid")), done.said
    assert "join_timeout=9" in done.torchrun.rdzv_conf


@pytest.mark.parametrize(
    ("says", "ends", "status"),
    [
        ("", "1", 1),
        ('{"status": "requeue", "exit_code": 75}', "0", 75),
        ('{\n "status": "failed",\n "step": 2,\n "exit_code": 2\n}', "1", 2),
        ("{}", "1", 1),
    ],
)
def test_status_is_that_of_the_run(start: Any, says: str, ends: str, status: int) -> None:
    assert start(*HAND, *FLAGS, NODES="2", HEAD="a", GPUS="8", SAYS=says, ENDS=ends).status == status


def test_files_of_an_earlier_start_are_ignored(start: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    old = tmp_path / "run/exit.json"
    old.write_text('{"exit_code": 75}')
    os.utime(old, (1.0, 1.0))
    assert start(*HAND, *FLAGS, NODES="2", HEAD="a", GPUS="8", ENDS="1").status == 1


def test_signal_reaches_torchrun_as_sigterm(tmp_path: Path, start: Any) -> None:
    waits = "#!/bin/bash\ntrap 'echo stopped; exit 7' TERM\ntouch \"$RECORDED/ready\"\nwhile :; do sleep 0.05; done\n"
    (tmp_path / "bin/torchrun").write_text(waits)
    when_ready = f'(until [ -e "$RECORDED/ready" ]; do sleep 0.05; done; kill -USR1 $$) & exec bash {HAND[1]} --x'
    done = start("bash", "-c", when_ready, NODES="2", HEAD="a")
    assert (done.status, done.said) == (7, "stopped\n")


SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NAME": "megalite",
    "SLURM_JOB_NODELIST": "node[17-18]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
}
JOB = ("bash", "examples/multi_node/slurm.sbatch", *FLAGS)


def test_slurm_job(start: Any) -> None:
    done = start(*JOB, **SLURM)
    assert done.status == 0, done.said
    torchrun = done.torchrun
    assert (torchrun.nnodes, torchrun.nproc_per_node) == ("2", "8")
    assert (torchrun.rdzv_endpoint, torchrun.rdzv_id) == ("node17:29500", "41-0")
    assert done.training.config.parallel.tp == 4
    assert done.words("scontrol") is None
    lines = (EXAMPLE / "slurm.sbatch").read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert options["signal"] == "B:USR1@300" and "requeue" in options
    assert options["open-mode"] == "append", "the log of the previous start must be kept"
    assert int(next(line for line in lines if "SAVE_SECONDS" in line).partition("=")[2]) < 300


@pytest.mark.parametrize(
    ("says", "ends", "restarts", "requeued"),
    [
        ('{"exit_code": 75}', "1", "9", True),
        ('{"exit_code": 2}', "1", "0", False),
        ("", "137", "0", True),
        ("", "1", "5", False),
    ],
)
def test_slurm_job_is_requeued(start: Any, says: str, ends: str, restarts: str, requeued: bool) -> None:
    done = start(*JOB, **SLURM, SAYS=says, ENDS=ends, SLURM_RESTART_COUNT=restarts)
    assert done.words("scontrol") == (["requeue", "41"] if requeued else None), done.said


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLE / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents("kubernetes.yaml") if each["kind"] == kind)
    return found


def test_kubernetes_job(start: Any, tmp_path: Path) -> None:
    job, service, claim = map(of_kind, ("Job", "Service", "PersistentVolumeClaim"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    done = start(*container["command"], *container["args"], **variables | {"RUN_DIR": str(tmp_path)})
    torchrun = done.torchrun
    assert (job["apiVersion"], spec["completionMode"]) == ("batch/v1", "Indexed")
    assert spec["completions"] == spec["parallelism"] == int(torchrun.nnodes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(torchrun.nproc_per_node)
    assert done.training.config.parallel.pp == 2
    # Pod 0 of an Indexed Job is <job>-0, and resolves below the subdomain of a headless service that selects it.
    name = service["metadata"]["name"]
    assert torchrun.rdzv_endpoint == f"{job['metadata']['name']}-0.{name}:29500"
    assert pod["subdomain"] == name
    assert (service["apiVersion"], service["spec"]["clusterIP"]) == ("v1", "None")
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert [each["port"] for each in service["spec"]["ports"]] == [29500]
    # Pods come and go.
    assert pod["restartPolicy"] == "Never", "podFailurePolicy requires it"
    policy = spec["podFailurePolicy"]["rules"]
    rules = {
        code: rule["action"]
        for rule in policy
        for code in rule.get("onExitCodes", {}).get("values", [])
        if rule["onExitCodes"]["containerName"] == container["name"] and rule["onExitCodes"]["operator"] == "In"
    }
    assert rules == {75: "Ignore", 2: "FailJob", 3: "FailJob", 4: "FailJob", 5: "FailJob"}
    assert {"type": "DisruptionTarget"} in policy[0]["onPodConditions"]
    assert pod["terminationGracePeriodSeconds"] > 120, "longer than launch.sh waits for the last checkpoint"
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/runs"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_skypilot_task(start: Any, tmp_path: Path) -> None:
    (task,) = documents("skypilot.yaml")
    known = {"name", "num_nodes", "workdir", "resources", "volumes", "setup", "run"}
    assert set(task) <= known
    run = task["run"].replace("RUN_DIR=/runs", f"RUN_DIR={tmp_path}")
    done = start(
        *("bash", "-c", run),
        SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8",
        SKYPILOT_NUM_NODES=str(task["num_nodes"]),
        SKYPILOT_NUM_GPUS_PER_NODE=task["resources"]["accelerators"].partition(":")[2],
    )
    torchrun = done.torchrun
    assert (torchrun.nnodes, torchrun.nproc_per_node) == ("2", "8")
    assert torchrun.rdzv_endpoint == "10.0.0.7:29500"
    assert done.training.config.parallel.tp == 4
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert "/runs" in task["volumes"]


def torchx_specs() -> ModuleType | SimpleNamespace:
    """torchx's specs, or the part that the component uses, with the names of torchx's macros."""
    if importlib.util.find_spec("torchx"):
        return importlib.import_module("torchx.specs")
    macros = SimpleNamespace(rank0_env="${rank0_env}", app_id="${app_id}")
    return SimpleNamespace(macros=macros, Role=SimpleNamespace, AppDef=SimpleNamespace, Resource=SimpleNamespace)


def test_torchx_component(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = torchx_specs()
    monkeypatch.setitem(sys.modules, "torchx", SimpleNamespace(specs=specs))
    monkeypatch.setitem(sys.modules, "torchx.specs", specs)
    path = EXAMPLE / "torchx_component.py"
    found = importlib.util.spec_from_file_location("torchx_component", path)
    assert found is not None and found.loader is not None
    component = importlib.util.module_from_spec(found)
    found.loader.exec_module(component)
    (role,) = component.pretrain(*FLAGS, hosts=2, gpus=8).roles
    values: Mapping[str, str] = {"rank0_env": "TORCHX_RANK0_HOST", "app_id": "megalite-x1"}

    def filled(text: str) -> str:
        return string.Template(text).substitute(values)

    variables = {name: filled(text) for name, text in role.env.items()}
    done = start(
        role.entrypoint,
        *map(filled, role.args),
        **{**variables, "RUN_DIR": str(tmp_path), "TORCHX_RANK0_HOST": "node17"},
    )
    torchrun = done.torchrun
    assert int(torchrun.nnodes) == role.num_replicas == 2
    assert int(torchrun.nproc_per_node) == role.resource.gpu == 8
    assert (torchrun.rdzv_endpoint, torchrun.rdzv_id) == ("node17:29500", "megalite-x1")
    assert role.port_map == {"c10d": 29500}
    assert done.training.config.parallel.tp == 4
