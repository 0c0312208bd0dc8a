"""Launch runs of a sweep as Indexed Jobs of Kubernetes or as tasks of Ray, with torchrun on each node."""

import contextlib
import json
import math
import os
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megalite.config.errors import ConfigError
from megalite.config.registry import optional
from megalite.sweep.candidates import Run
from megalite.sweep.execute import Launched, LocalRun, NodesLauncher, call, nodes_of, training_command, try_call
from megalite.sweep.results import LOG
from megalite.sweep.spec import KubernetesSpec, RaySpec
from megalite.watchdog.processes import END_SECONDS

MANIFEST = "job.yaml"
_PORT = 29400  # a pod has its own ports
_LATE_SECONDS = 60  # extra time after which pods end if the sweep has not ended their job
_FAILED = 1  # exit status if the cluster reports no other


def _torchrun(nodes: int, per_node: int, rank: str, address: str, port: str) -> list[str]:
    ranks = ["--nnodes", str(nodes), "--node-rank", rank, "--nproc-per-node", str(per_node)]
    return ["-m", "torch.distributed.run", *ranks, "--master-addr", address, "--master-port", port]


def job_name(run: Run, folder: Path) -> str:
    """Return a name that differs for the same configuration in another sweep."""
    return f"sweep-{run.key}-{zlib.crc32(str(folder).encode()):08x}"


def _literal(word: str) -> str:
    """Escape `$`, as Kubernetes would expand $(NAME)."""
    return word.replace("$", "$$")


class KubernetesLauncher(NodesLauncher):
    """Starts runs with `kubectl`, in its current context and namespace."""

    _spec: KubernetesSpec

    def __init__(self, spec: KubernetesSpec, *, environment: Mapping[str, str], program: Path | None = None) -> None:
        super().__init__(spec, environment=environment, program=program)
        for name in ("image", "claim"):
            if getattr(spec, name) is None:
                raise ConfigError(f"--launcher kubernetes requires kubernetes: {name}; add e.g. {name}: megalite")

    def manifest(self, run: Run, folder: Path, *, timeout: float) -> str:
        """Return an Indexed Job with one pod per node, and the headless Service that names pod 0. No shell evaluates
        words from outside this method, and Kubernetes expands only the pod's index."""
        spec, (nodes, per_node), name = self._spec, nodes_of(run, self._spec), job_name(run, folder)
        torchrun = _torchrun(nodes, per_node, "INDEX", f"{name}-0.{name}", str(_PORT))
        words = ["timeout", str(math.ceil(timeout) + _LATE_SECONDS), "python", *torchrun]
        words = [_literal(word) for word in (*words, *training_command(folder, self._program))]
        words[words.index("INDEX")] = "$(JOB_COMPLETION_INDEX)"
        limits = {each: amount * per_node for each, amount in spec.resources.items()}
        container = {
            "name": "train",
            "image": spec.image,
            "workingDir": _literal(str(spec.mount)),
            "command": ["bash", "-c", 'exec "$@" >> "$0" 2>&1', _literal(str(folder / LOG))],
            "args": words,
            "env": [{"name": each, "value": _literal(value)} for each, value in self._environment.items()],
            "resources": {"limits": {each: f"{amount:.15g}" for each, amount in limits.items()}},
            "volumeMounts": [
                {"name": "runs", "mountPath": str(spec.mount)},
                # For NCCL's rings within a node: the default size is too small.
                {"name": "shared-memory", "mountPath": "/dev/shm"},
            ],
        }
        volumes = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": spec.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ]
        pod = {"restartPolicy": "Never", "subdomain": name, "containers": [container], "volumes": volumes}
        job = {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        }
        # Pods resolve each other's names before they are ready.
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": name}}
        return yaml.safe_dump_all(
            [
                {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job},
            ],
            sort_keys=False,
        )

    def start(self, run: Run, folder: Path, *, timeout: float) -> "KubernetesJob":
        folder = folder.resolve()
        if not folder.is_relative_to(self._spec.mount.resolve()):
            raise ConfigError(f"{folder} is not below kubernetes: mount {self._spec.mount}; pods could not access it")
        (folder / MANIFEST).write_text(self.manifest(run, folder, timeout=timeout))
        call("kubectl", "create", "-f", str(folder / MANIFEST))
        pods = nodes_of(run, self._spec)[0]
        return KubernetesJob(job_name(run, folder), folder, pods=pods, every=self._spec.poll_seconds)

    def clear(self, folder: Path) -> None:
        if (folder / MANIFEST).exists():
            try_call("kubectl", "delete", "--ignore-not-found", "-f", str(folder / MANIFEST))


class KubernetesJob(Launched):
    def __init__(self, name: str, folder: Path, *, pods: int, every: float) -> None:
        super().__init__(every)
        self._name, self._folder, self._pods = name, folder, pods

    def look(self) -> int | None:
        answer = try_call("kubectl", "get", "job", self._name, "-o", "json")
        if answer is None or (answer.returncode != 0 and "NotFound" not in answer.stderr):
            return None  # the API server is busy: retry
        if answer.returncode != 0:
            return _FAILED
        status = json.loads(answer.stdout).get("status", {})
        if status.get("ready", 0) >= self._pods:
            self.mark_started()
        ended = {each["type"] for each in status.get("conditions", ()) if each["status"] == "True"}
        if not ended & {"Complete", "Failed"}:
            return None
        self.end()
        return os.EX_OK if "Complete" in ended else _FAILED

    def end(self) -> None:
        try_call("kubectl", "delete", "--ignore-not-found", "-f", str(self._folder / MANIFEST))


class RayLauncher(NodesLauncher):
    """Starts runs as tasks in a placement group, one bundle per node. Ray ends all tasks with this process."""

    _spec: RaySpec

    def __init__(self, spec: RaySpec, *, environment: Mapping[str, str], program: Path | None = None) -> None:
        super().__init__(spec, environment=environment, program=program)
        ray = optional("ray", "--launcher ray requires the ray package; pip install ray, or use --launcher local")
        self._ray = ray
        if not ray.is_initialized():
            try:
                ray.init(address=spec.address, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError) as error:
                where = f"ray: address {spec.address}" if spec.address else "Ray at RAY_ADDRESS, or on this host,"
                raise ConfigError(f"{where} does not answer: {' '.join(str(error).split())}") from None

    def start(self, run: Run, folder: Path, *, timeout: float) -> "RayRun":
        ray, (nodes, per_node), folder = self._ray, nodes_of(run, self._spec), folder.resolve()
        resources = {name: amount * per_node for name, amount in self._spec.resources.items()}
        strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
        group = ray.util.placement_group([resources] * nodes, strategy=strategy)

        def in_bundle(function: Any, index: int, **requirements: Any) -> Any:
            where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": where, **requirements}
            return ray.remote(function).options(**options).remote

        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
        requirements = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
        requirements["runtime_env"] = {"env_vars": dict(self._environment)}
        address, training = in_bundle(_address, 0)(), training_command(folder, self._program)
        tasks = [
            in_bundle(_on_node, index, **requirements)(address, nodes, per_node, index, training, folder / LOG)
            for index in range(nodes)
        ]
        return RayRun(ray, group, tasks, folder / LOG)


class RayRun(Launched):
    """A run as `tasks`, one per node of the placement group."""

    def __init__(self, ray: Any, group: Any, tasks: list[Any], log: Path) -> None:
        super().__init__()
        self._ray, self._group, self._tasks, self._log = ray, group, tasks, log
        self._placed = group.ready()

    def look(self) -> int | None:
        """Return the first failed node's status, or success after all have ended."""
        if self._ray.wait([self._placed], timeout=0)[0]:
            self.mark_started()
        done, left = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)
        failed = next((status for status in map(self._status, done) if status != os.EX_OK), None)
        if failed is None and left:
            return None
        self.end()
        return failed or os.EX_OK

    def _status(self, task: Any) -> int:
        try:
            return int(self._ray.get(task))
        except self._ray.exceptions.RayError as error:
            with self._log.open("a") as file:
                file.write(f"{error}\n")
            return _FAILED

    def end(self) -> None:
        """Interrupt the tasks; they are killed if they do not stop their processes in time."""
        for task in self._tasks:
            self._ray.cancel(task)
        self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=3 * END_SECONDS)
        self._ray.util.remove_placement_group(self._group)


def _address() -> tuple[str, int]:
    """Return this node's address in Ray and a free port, where the ranks meet."""
    import ray

    with contextlib.closing(socket.socket()) as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), free.getsockname()[1]


def _on_node(address: tuple[str, int], nodes: int, per_node: int, index: int, training: list[str], log: Path) -> int:
    """Run torchrun on this node and return its exit status."""
    head, port = address
    run = LocalRun([sys.executable, *_torchrun(nodes, per_node, str(index), head, str(port)), *training], log)
    try:
        while (status := run.poll()) is None:
            time.sleep(0.05)
        return status
    finally:
        run.end()
