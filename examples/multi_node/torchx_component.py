"""A run over several hosts as a component of torchx, for any of its schedulers:

torchx run --scheduler slurm examples/multi_node/torchx_component.py:pretrain --hosts 2 -- --config examples/multi_node/run.yaml
"""

import shlex

import torchx.specs as specs


def pretrain(
    *arguments: str,
    hosts: int = 2,
    gpus: int = 8,
    cpus: int = 64,
    memory_mb: int = 500_000,
    image: str = "",
    run_dir: str = "runs/multi_node",
    retries: int = 3,
) -> specs.AppDef:
    """Pretrains a GPT with torchrun on each of some hosts.

    Args:
        arguments: for pretrain_gpt.py
        hosts: number of hosts
        gpus: GPUs of a host
        cpus: CPU cores of a host
        memory_mb: memory of a host
        image: container with a clone of megalite as its working directory, or the clone's folder
        run_dir: folder that all hosts share
        retries: times that the scheduler starts the run again

    """
    # The scheduler has the address of replica 0 in a variable; torchx replaces this macro by its name.
    first = f"$${{{specs.macros.rank0_env}:=localhost}}"
    launch = shlex.join(["bash", "examples/multi_node/launch.sh", *arguments])
    role = specs.Role(
        name="pretrain",
        image=image,
        entrypoint="bash",
        args=["-c", f'HEAD="{first}" exec {launch}'],
        env={"NODES": str(hosts), "GPUS": str(gpus), "RUN_DIR": run_dir, "RUN_ID": specs.macros.app_id},
        num_replicas=hosts,
        resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=memory_mb),
        port_map={"c10d": 29500},
        max_retries=retries,
    )
    return specs.AppDef(name="megalite", roles=[role])
