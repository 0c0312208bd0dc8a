"""Checkpoints of models that several ranks have trained."""

from pathlib import Path
from typing import Any

from megalite.data.tokenizers.build import build_tokenizer
from megalite.training.saving import save
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, assemble, build, local_parts, tiny_config


def _train(context: RankContext, world: int, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(world, **settings)))
    for _ in range(3):
        runner.step()
    tokenizer = build_tokenizer(runner.replica.config.data, None)
    fingerprint = None if tokenizer is None else tokenizer.fingerprint()
    save(runner.replica, Path(folder), runner.progress, tokenizer=fingerprint)
    return {kind: local_parts(runner.replica, kind) for kind in ("weight", "main_param")}


def train(folder: Path, world: int, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Train three steps on `world` ranks and save; the whole tensors of each kind, as numpy."""
    ranks = run_ranks(world, _train, world, settings, str(folder))
    return {kind: assemble([rank[kind] for rank in ranks]) for kind in ("weight", "main_param")}
