"""Names of experts do not depend on the layout that writes them, and each element is written once."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.models.shapes import stage_shapes
from megalite.training import state_tensors
from megalite.training.saving import save
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Z1, Runner, build, tiny_config, words

MOE: dict[str, Any] = LLAMA | words(
    "num_layers=2 num_experts=4 moe_first_dense_layers=1 moe_ffn_hidden_size=16 moe_shared_expert_intermediate_size=8 "
    "precision=bf16"
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ep2-edp2-zero": (4, {"dp": 4, "ep": 2, **Z1}),
    "edp4": (4, {"dp": 4}),
    "tp2-ep2": (4, {"tp": 2, "dp": 2, "ep": 2}),
}


def written(context: RankContext, world: int, settings: dict[str, Any], folder: str, split: int) -> None:
    """Make one step and save with parameters of `split` elements or more divided over ranks."""
    runner = Runner(build(context, tiny_config(world, **MOE, **settings)))
    runner.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_tensors, "SPLIT_ELEMENTS", split)
        save(runner.replica, Path(folder), runner.progress, tokenizer=None)


def test_expert_names_and_parts_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """Each of four ranks holds all four experts, or two ranks one expert each: large experts are divided over these ranks."""
    manifests = {}
    for name, (world, settings) in LAYOUTS.items():
        run_ranks(world, written, world, settings, str(tmp_path / name), 1)
        manifests[name] = json.loads((tmp_path / name / "step-0000001" / "manifest.json").read_text())["tensors"]
    shapes = [{key: entry["global_shape"] for key, entry in tensors.items()} for tensors in manifests.values()]
    assert all(other == shapes[0] for other in shapes)
    for row in stage_shapes(tiny_config(1, **MOE).model, 0, 2, True, True):
        assert tuple(shapes[0][f"weight:{row.name}"]) == row.shape
    for name in ("edp4", "ep2-edp2-zero"):
        assert len(manifests[name]["weight:layers.1.moe.experts.up.weight"]["parts"]) == 4
