"""What a plan leaves behind: plan.yaml for training, the other layouts for a sweep, and the lines that start it."""

import math
from pathlib import Path
from typing import Any

import yaml

from megalite.config.describe import settings, values_of
from megalite.config.errors import ConfigError
from megalite.planner.report.data import seconds_in_words
from megalite.planner.search.search import Candidate, Plan


def training_config(plan: Plan, tokens: float) -> dict[str, Any]:
    """Settings of the best layout, flat: `pretrain_gpt.py --config` runs it as it is, on that number of ranks only.

    dp is among them, so that another world size is refused. Without a length of its own the run gets that of `tokens`.
    """
    best = plan.candidates[0]
    found = {
        name: value
        for name, value in values_of(best.config).items()
        if value is not None and value != settings()[name].default
    }
    training = best.config.training
    if training.train_iters is None and training.train_samples is None:
        assert training.global_batch_size is not None
        found["train_iters"] = math.ceil(tokens / (training.global_batch_size * training.seq_length))
    return {**_chosen(best), **found}


def alternatives(plan: Plan) -> dict[str, Any]:
    """`plans:` the searched settings of all layouts, best first: what `megalite sweep` reads."""
    return {"plans": [_chosen(candidate) for candidate in plan.candidates]}


def _chosen(candidate: Candidate) -> dict[str, Any]:
    """The searched settings without what would have no effect there."""
    found = dict(candidate.settings)
    for name in ("shard_gradients", "sequence_parallel"):
        if not found[name]:
            del found[name]
    return found


def write_files(plan: Plan, path: Path, tokens: float) -> list[Path]:
    """Writes plan.yaml and, beside it, NAME-alternatives.yaml; returns both.

    Raises:
        ConfigError: a file cannot be written.
    """
    best = plan.candidates[0].prediction
    head = (
        f"# For {plan.request.world_size} ranks of {plan.cluster.name}, stack {plan.stack.name}: predicted "
        f"{seconds_in_words(best.step_seconds)} a step, MFU {best.mfu:.1%}.\n"
    )
    others = path.with_name(f"{path.stem}-alternatives{path.suffix or '.yaml'}")
    # A line a setting; a layout a line or two.
    written = ((path, training_config(plan, tokens), False), (others, alternatives(plan), None))
    for target, tree, flow in written:
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=flow)
        write_text(target, head + text)
    return [path, others]


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give a path in a folder that exists"
        ) from None


def launch_lines(plan: Plan, path: Path) -> list[str]:
    """How to start plan.yaml: with torchrun on each node, and with sbatch."""
    config, world = plan.candidates[0].config, plan.request.world_size
    most = plan.cluster.node.accelerators
    each = next(count for count in range(min(most, world), 0, -1) if world % count == 0)
    nodes = world // each
    data = config.data
    given = data.data_path or data.train_data_path or data.mock_data
    program = f"pretrain_gpt.py --config {path}" + ("" if given else " --data-path PREFIX")
    if nodes == 1:
        local = f"torchrun --standalone --nproc-per-node {each} {program}"
        return [local, f"sbatch --nodes 1 --gpus-per-node {each} --wrap '{local}'"]
    shape = f"--nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d"
    first = '"$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500"'
    return [
        f"torchrun {shape} --rdzv-endpoint HOST:29500 {program}",
        f"sbatch --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {each} --wrap 'srun torchrun {shape} "
        f"--rdzv-endpoint {first} {program}'",
    ]
