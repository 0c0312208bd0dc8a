"""Every layout follows a training run without megalite: twenty steps of plain torch, and their committed record."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.parity.trajectory import Runner
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.training.replica import Programs, build_modules, build_replica
from tests.anchors import plain_training as plain
from tests.models import plain_gpt
from tests.parity.factors import Settings, world_of
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Z1, tiny_config

SETTINGS: Settings = {
    "num_layers": plain.LAYERS,
    "hidden_size": plain.HIDDEN,
    "num_attention_heads": plain.HEADS,
    "vocab_size": plain.VOCABULARY,
    "make_vocab_size_divisible_by": plain.ROWS,
    "seq_length": plain.SEQUENCE,
    "global_batch_size": plain.BATCH,
    "micro_batch_size": 2,
    "train_iters": plain.STEPS,
    "lr": plain.LR,
    "min_lr": plain.MIN_LR,
    "lr_warmup_iters": plain.WARMUP,
    "clip_grad": plain.CLIP,
    "weight_decay": plain.WEIGHT_DECAY,
    "adam_beta1": plain.BETA1,
    "adam_beta2": plain.BETA2,
    "adam_eps": plain.EPS,
}
MODELS: dict[str, Settings] = {
    "gpt": {},
    "llama": {
        "position_embedding_type": "rope",
        "rotary_base": plain.ROPE_BASE,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "num_query_groups": 2,
        "ffn_hidden_size": 4 * plain.HIDDEN,
        "add_bias_linear": False,
        "tie_embeddings": False,
    },
}
SP: Settings = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, Settings]] = {
    "one": ("gpt", {}),
    "one-llama": ("llama", {}),
    "dp2": ("gpt", {"dp": 2}),
    "tp2": ("gpt", {"tp": 2}),
    "tp2-sp": ("gpt", SP),
    "pp2-1f1b": ("gpt", {"pp": 2}),
    "cp2": ("gpt", {"cp": 2}),
    "cp2-llama": ("llama", {"cp": 2}),
    "dp2-zero1": ("gpt", {"dp": 2, **Z1}),
    "dp2-zero2-llama": ("llama", {"dp": 2, **Z1, "shard_gradients": True}),
    "dp2-zero3": ("gpt", {"dp": 2, "dp_strategy": "fully-sharded"}),
    "tp2-sp-pp2-zero1": ("gpt", {**SP, "pp": 2, "dp": 2, **Z1}),
    "recompute-full-llama": ("llama", {"recompute_granularity": "full"}),
}
"""One layout per axis; tests/parity compares all others, schedules and strategies with one rank."""
SHARP = ("one", "one-llama")
"""Also in float64, where rounding hides no fault."""
TOLERANCES = {"fp32": 2e-6, "fp64": 1e-11}
SPLIT_STEPS = 7
"""Steps on several ranks: through the warm-up, clipped and not. tests/parity compares later steps with one rank."""


class Samples:
    """Samples of the plain run, as a `SampleSource`."""

    def sample(self, k: int) -> np.ndarray:
        """Sample k."""
        return plain.sample(k)


def trained(context: RankContext, model: str, world: int, settings: Settings, count: int) -> dict[str, list[float]]:
    """The record of a layout that starts from the plain run's weights."""
    config = tiny_config(world, **settings)
    topology, programs = context.topology_of(config), Programs(config)
    modules = build_modules(config, topology, programs)
    full = plain.initial_weights(plain.MODELS[model])
    for stage in modules[0].values():
        for parameter in stage.parameters():
            assert isinstance(parameter, ShardedParameter)
            spec = parameter.info.spec
            assert spec.global_shape == tuple(full[spec.name].shape), spec.name
            values = full[spec.name][tuple(slice(*bounds) for bounds in spec.slice)]
            if parameter.draw is None:
                parameter.data.copy_(values)
            else:
                parameter.draw = lambda data, values=values: data.copy_(values)
    runner = Runner(build_replica(config, topology, programs, modules))
    runner.loader.dataset, runner.loader.eod_token = Samples(), plain.END
    steps = [runner.step() for _ in range(count)]
    found = {"loss": [step.loss for step in steps], "grad_norm": [step.grad_norm for step in steps]}
    return found | ({"evaluation": [runner.evaluate()]} if count == plain.STEPS else {})


@pytest.fixture(scope="module")
def committed() -> Any:
    return json.loads(plain.COMMITTED.read_text())


def assert_follows(ours: dict[str, list[float]], theirs: dict[str, list[float]], tolerance: float) -> None:
    """Compare all numbers of a record to a relative tolerance."""
    assert ours.keys() == theirs.keys()
    for name, numbers in theirs.items():
        np.testing.assert_allclose(ours[name], numbers, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("model", plain.MODELS)
def test_committed_record_equals_the_plain_run(model: str, committed: Any) -> None:
    assert_follows(plain.train(plain.MODELS[model]), committed[model], 1e-10)
    losses = committed[model]["loss"]
    assert len(losses) == plain.STEPS and losses[-1] < losses[0] - 0.5
    norms = committed[model]["grad_norm"]
    assert min(norms) < plain.CLIP < max(norms), "only some steps are clipped"


def test_plain_run_does_not_import_megalite() -> None:
    for module in (plain, plain_gpt):
        assert module.__file__ is not None
        assert not re.search(r"^\s*(import|from) megalite", Path(module.__file__).read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *((layout, "fp64") for layout in SHARP),
        *((layout, "fp32") for layout in sorted(LAYOUTS, key=lambda name: world_of(LAYOUTS[name][1]))),
    ],
)
def test_layout_follows_the_plain_run(layout: str, precision: str, committed: Any) -> None:
    model, own = LAYOUTS[layout]
    settings = {**SETTINGS, **MODELS[model], "precision": precision, **own}
    world = world_of(settings)
    if world == 1:
        theirs, records = committed[model], [trained(RankContext(0), model, 1, settings, plain.STEPS)]
    else:
        theirs = {name: committed[model][name][:SPLIT_STEPS] for name in ("loss", "grad_norm")}
        assert min(theirs["grad_norm"]) < plain.CLIP < max(theirs["grad_norm"])
        records = run_ranks(world, trained, model, world, settings, SPLIT_STEPS)
    for record in records:
        assert_follows(record, theirs, TOLERANCES[precision])
