"""`--elastic`: the layout of a run for the ranks that have come, before anything is built on it. The training loop is
given `take_layout`; it does not import the planner."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest
from megalite.config.describe import replace, settings
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable
from megalite.planner.hardware import Cluster, cluster_of_device, load_cluster, load_stack
from megalite.planner.search.relayout import LAYOUT, Former, ranks, relayout
from megalite.planner.search.request import USUAL_MEMORY, not_default
from megalite.tokenizers.build import build_tokenizer
from megalite.topology.group import Group


def take_layout(
    config: RunConfig,
    *,
    explicit: frozenset[str],
    fixed: frozenset[str],
    world: Group,
    device: torch.device,
    log: Callable[[str], None],
) -> tuple[RunConfig, frozenset[str]]:
    """The config with the layout that these ranks get, and what counts as given in it.

    Rank 0 looks at the newest checkpoint and plans; the others take what it says, so that none can differ.

    Args:
        explicit: settings that the user gave.
        fixed: those that stay: of the command line.
        log: called on rank 0.

    Raises ConfigError if these ranks can have no layout, or the cluster is not known; the same on every rank.

    Collectives: a gather and a broadcast over the world.
    """
    failed: Exception | None = None
    layout: Mapping[str, Any] = {}
    if world.rank == 0:
        try:
            layout, note = _find(config, explicit=explicit, fixed=fixed, world_size=world.size, device=device)
            log(note)
        except Exception as error:
            failed = error
    world.agree(failed, device)
    config = replace(config, **world.broadcast_json(dict(layout), device))
    return config, not_default(config)


def _find(
    config: RunConfig, *, explicit: frozenset[str], fixed: frozenset[str], world_size: int, device: torch.device
) -> tuple[Mapping[str, Any], str]:
    """The layout, and what the log says of it."""
    require_startable(config)
    if config.model.vocab_size is None:
        tokenizer = build_tokenizer(config.data, None)
        assert tokenizer is not None, "require_startable asks for one"
        config = replace(config, vocab_size=tokenizer.vocab_size)
    assert config.checkpoint.load is not None, "check_elastic asks for it"
    former = newest_layout(Path(config.checkpoint.load))
    cluster, memory = _machine(config, device)
    layout, why = relayout(
        config,
        world_size=world_size,
        explicit=explicit,
        fixed=fixed,
        former=former,
        cluster=cluster,
        stack=load_stack("fused"),
        memory_limit=memory * USUAL_MEMORY,
    )
    was = ""
    if former is not None and former.world_size != world_size:
        was = f"; the checkpoint of step {former.step} is of {ranks(former.world_size)} as {_in_words(former.layout)}"
    return layout, f"elastic: {ranks(world_size)}{was}; continuing as {_in_words(layout)} ({why})"


def newest_layout(folder: Path) -> Former | None:
    """What the newest checkpoint with a readable manifest says of its layout; None if there is none.

    Its files are not verified here. If they are damaged, loading says so and takes an older one; only the layout was
    then chosen by this one.
    """
    try:
        found = candidates(folder)
    except CheckpointError:
        return None  # loading says why
    for candidate in found:
        try:
            manifest = Manifest.from_json(read_text(folder / candidate.name / MANIFEST_NAME))
            layout = {name: _saved(manifest.config, name) for name in LAYOUT if name != "dp"}
            layout["dp"] = _saved({"parallel": manifest.layout}, "dp")  # as a rule derived: open in the config
        except CheckpointError:
            continue
        world_size = math.prod(layout[axis] for axis in ("tp", "cp", "dp", "pp"))
        return Former(manifest.step, world_size, layout)
    return None


def _saved(config: Mapping[str, Any], name: str) -> Any:
    """A setting as a checkpoint has it (one that came later had its default's meaning); raises CheckpointError if it is no
    value of that setting."""
    setting = settings()[name]
    section = config.get(setting.section)
    value = section.get(name, setting.default) if isinstance(section, dict) else setting.default
    elements = value if isinstance(value, list) and setting.is_list else [value]
    fits = value is None and (setting.optional or name == "dp")
    legal = fits or all(type(element) is setting.type for element in elements)
    if not legal or (name in ("tp", "cp", "dp", "pp") and (value is None or value < 1)):
        raise CheckpointError(f"{name} is {value!r} in the checkpoint's config")
    return value


def _machine(config: RunConfig, device: torch.device) -> tuple[Cluster, float]:
    """What the planner goes by, and the bytes that a rank has."""
    given = config.parallel.elastic_cluster
    if device.type != "cuda":
        cluster = load_cluster(given or "cpu-box")
        return cluster, cluster.accelerator.memory_bytes
    properties = torch.cuda.get_device_properties(device)
    known = given or cluster_of_device(properties.name)
    if known is None:
        raise ConfigError(
            f"elastic has no figures of {properties.name} for the planner; add --elastic-cluster FILE (megalite profile "
            "--output FILE measures this machine) or the name of a cluster like it, e.g. dgx-h100"
        )
    cluster = load_cluster(known)
    return cluster, min(float(properties.total_memory), cluster.accelerator.memory_bytes)


def _in_words(layout: Mapping[str, Any]) -> str:
    """`tp 2 x cp 1 x dp 2 x pp 2 (vpp 2), micro batch 1`, as the first lines of the log have it."""
    chunks = f" (vpp {layout['vpp']})" if layout["vpp"] > 1 else ""
    return (
        f"tp {layout['tp']} x cp {layout['cp']} x dp {layout['dp']} x pp {layout['pp']}{chunks}, micro batch "
        f"{layout['micro_batch_size']}, {layout['dp_strategy']}, recompute {layout['recompute_granularity']}"
    )
