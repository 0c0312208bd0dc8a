"""States of strategies and optimizers through save and load, between all layouts."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest
from megalite.config.errors import CheckpointError
from megalite.data_parallel.facts import Placement
from megalite.data_parallel.strategy import FlatState, TensorState
from megalite.data_parallel.wire import Channel
from megalite.data_parallel.zero import DistributedOptimizer
from megalite.optimizers.adam import AdamW
from megalite.optimizers.schedules import Progress
from megalite.topology.layout import ShardSpec
from megalite.training.replica import Replica, _flat_parameter
from megalite.training.resume import load
from megalite.training.saving import save
from tests.checkpoint.samples import edit_manifest
from tests.support.ranks import RankContext, run_ranks
from tests.support.state import silent
from tests.support.tiny import LLAMA, Runner, build, tiny_config

Settings = dict[str, Any]
Wanted = dict[str, tuple[str, str]]
"""Placement and default of each state of the strategy."""

STATES: Wanted = {"alike": ("replicated", "required"), "owned": ("sharded", "required"), "own": ("private", "required")}
SMALL: Settings = {"num_layers": 2, "hidden_size": 16, "precision": "bf16", "ddp_bucket_size": 1000}
EXPERTS: Settings = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 8, "moe_first_dense_layers": 1}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "one": (1, {}),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 dp2": (4, {"pp": 2, "dp": 2}),
    "dp2": (2, {"dp": 2}),
    "dp4": (4, {"dp": 4}),
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"dp": 2, "ep": 2, **EXPERTS}),
    "ep1": (2, {"dp": 2, **EXPERTS}),
}


def numbers(state: str, spec: ShardSpec, replica: float = 0.0) -> torch.Tensor:
    """Return a state's values on a slice: a different number for each element, exact in fp32."""
    total = torch.arange(float(torch.Size(spec.global_shape).numel())).view(spec.global_shape)
    index = tuple(slice(start, stop) for start, stop in spec.slice)
    return total[index] + 0.125 * (len(state) + 8 * replica)


class AllKindsOfStates(DistributedOptimizer):
    """A strategy with a state of each kind."""

    def __init__(self, replica: Replica, wanted: Wanted) -> None:
        known = replica.strategy
        options = dataclasses.replace(known.options, overlap_param_gather=False)
        super().__init__(replica.stages, groups=known.groups, options=options)
        self._flat: list[FlatState] = []
        for shard in self.shards:
            for name, (placement, default) in wanted.items():
                kind = Placement(placement)
                start, stop = 0, shard.bucket.data.numel()
                if kind is Placement.SHARDED:
                    start, stop = shard.start, shard.stop
                values = torch.full((stop - start,), -1.0)
                self._flat.append(FlatState(name, shard.bucket, values, kind, start, default))
        self._of_tensors = [
            TensorState(name, bucket, placed, torch.full(shape, -1.0), per_slice=name == "of_slice")
            for bucket in self.all_buckets()
            for placed in bucket.placed
            for name, shape in (("of_tensor", ()), ("of_slice", (3, 2)))
        ]

    def states(self) -> list[FlatState]:
        return self._flat

    def tensor_states(self) -> list[TensorState]:
        return self._of_tensors

    def pairs(self, state: FlatState, replica: float) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, local elements and the values of `fill` for each tensor."""
        for placed in state.bucket.placed:
            spec = placed.parameter.info.spec
            start, stop = max(placed.start, state.start), min(placed.stop, state.stop)
            if start < stop:
                expected = numbers(state.name, spec, replica).flatten()[start - placed.start : stop - placed.start]
                yield spec.name, state.values[start - state.start : stop - state.start], expected

    def fill(self) -> None:
        for state in self._flat:
            group = self.groups.replicas(state.bucket.kind)
            for _, values, expected in self.pairs(state, group.rank if state.placement is Placement.PRIVATE else 0):
                values.copy_(expected)
        for whole in self._of_tensors:
            whole.values.copy_(tensor_numbers(whole))


def tensor_numbers(state: TensorState) -> torch.Tensor:
    spec = state.placed.parameter.info.spec
    first = float(sum(start for start, _ in spec.slice)) if state.per_slice else 0.0
    return torch.arange(float(max(state.values.numel(), 1))).view(state.values.shape) + first + len(spec.name)


class TensorStates(AdamW):
    """An optimizer with a number for each tensor."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica.optimizer.parameters, replica.config.optimizer)
        names = {segment.name for flat in self.parameters for segment in flat.segments}
        self.trust = {("trust", name): torch.zeros(1) for name in sorted(names)}

    def tensor_state(self) -> Mapping[tuple[str, str], torch.Tensor]:
        return self.trust


def remembering(context: RankContext, layout: str, wanted: Wanted, **more: Any) -> tuple[Replica, AllKindsOfStates]:
    world, settings = LAYOUTS[layout]
    replica = build(context, tiny_config(world, **SMALL, **settings, **more))
    strategy = AllKindsOfStates(replica, wanted)
    from_shards = dataclasses.replace(replica, strategy=strategy)
    adam = AdamW([_flat_parameter(shard) for shard in strategy.shards], replica.config.optimizer)
    optimizer = TensorStates(dataclasses.replace(from_shards, optimizer=adam))
    return dataclasses.replace(from_shards, optimizer=optimizer), strategy


def write(context: RankContext, layout: str, folder: str) -> None:
    replica, strategy = remembering(context, layout, STATES)
    strategy.fill()
    assert isinstance(replica.optimizer, TensorStates)
    for (_, name), values in replica.optimizer.trust.items():
        values.fill_(float(len(name)))
    save(replica, Path(folder), Progress(4, 32), tokenizer=None)


def read(
    context: RankContext, layout: str, folder: str, wanted: Wanted, replicas: int, more: Settings
) -> tuple[list[str], list[str], list[str]]:
    """Return log lines, states that differ from the written ones, and states that the load did not change.

    Args:
        replicas: number of replicas of the dense layers in the checkpoint."""
    replica, strategy = remembering(context, layout, wanted, load=folder, **more)
    lines: list[str] = []
    load(replica, Path(folder), tokenizer=None, log=lines.append)
    wrong, untouched = [], []
    for state in strategy.states():
        group = strategy.groups.replicas(state.bucket.kind)
        mean = 0.0
        if STATES.get(state.name, ("", ""))[0] == "private":
            count = replicas if not state.bucket.kind.expert else group.size
            private = state.placement is Placement.PRIVATE and group.size == count
            mean = group.rank if private else (count - 1) / 2
        for name, values, expected in strategy.pairs(state, mean):
            if values.eq(-1.0).all():
                untouched.append(state.name)
            elif not torch.equal(values, expected):
                wrong.append(f"{state.name} of {name}")
    for whole in strategy.tensor_states():
        if whole.values.eq(-1.0).all():
            untouched.append(whole.name)
        elif not torch.equal(whole.values, tensor_numbers(whole)):
            wrong.append(f"{whole.name} of {whole.placed.parameter.info.spec.name}")
    assert isinstance(replica.optimizer, TensorStates)
    for (_, name), values in replica.optimizer.trust.items():
        if values.item() != len(name):
            (untouched if values.item() == 0.0 else wrong).append(f"trust of {name}")
    return lines[1:], wrong, sorted(set(untouched))


PAIRS = [
    *(("tp2 dp2", to) for to in ("tp2 dp2", "pp2 dp2", "dp4", "one")),
    *(("pp2", "tp2"), ("dp2", "tp2 dp2"), ("ep2", "ep2"), ("ep2", "ep1")),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for layout in dict.fromkeys(pair[0] for pair in PAIRS):
        found[layout] = tmp_path_factory.mktemp("from")
        run_ranks(LAYOUTS[layout][0], write, layout, str(found[layout]))
    return found


@pytest.mark.parametrize("source, target", PAIRS)
def test_each_layout_loads_the_states_of_all_layouts(written: dict[str, Path], source: str, target: str) -> None:
    before, after = (LAYOUTS[layout][1].get("dp", 1) for layout in (source, target))
    for rank in run_ranks(LAYOUTS[target][0], read, target, str(written[source]), STATES, before, {}):
        lines, wrong, untouched = rank
        if target == "ep1":
            # Two replicas now have all experts; before, one rank had each half.
            wrong = [name for name in wrong if ".experts." not in name]
        assert wrong == []
        other_dp = before != after or target == "ep1"
        assert [line for line in lines if "replicas" in line] == (
            [f"{written[source]}/step-0000004 {mean_line(before if target != 'ep1' else 1, after)}"] if other_dp else []
        )
        cut = {LAYOUTS[layout][1].get("tp", 1) for layout in (source, target)}
        assert set(untouched) <= ({"of_slice"} if len(cut) == 2 or target == "ep1" else set())
        assert any("of_slice" in line for line in lines) == bool(untouched)


def mean_line(before: int, after: int) -> str:
    return f"has own of {before} replicas, this run has {after}: it takes their mean"


def test_load_with_another_strategy(written: dict[str, Path]) -> None:
    """One log line each for states with another placement, missing states and unknown states."""
    wanted: Wanted = {
        "own": ("replicated", "required"),
        "alike": ("private", "required"),
        "error": ("private", "zeros"),
        "anchor": ("sharded", "parameter"),
    }
    checkpoint = f"{written['dp2']}/step-0000004"
    for rank in run_ranks(2, read, "dp2", str(written["dp2"]), wanted, 2, {}):
        lines, wrong, untouched = rank
        assert {name.split(" of ")[0] for name in wrong} == {"error", "anchor"}
        assert untouched == []
        assert sorted(lines) == sorted(
            [
                f"{checkpoint} has own of 2 replicas, this run has one for all: it takes their mean",
                f"{checkpoint} has no error for this run: it starts from 0",
                f"{checkpoint} has no anchor for this run: it starts from the parameters",
            ]
        )


def initial_states(context: RankContext, folder: str, more: Settings) -> tuple[float, float]:
    """Return, after a load, how far a missing state is from 0, and one from the main parameters."""
    wanted: Wanted = {"error": ("private", "zeros"), "anchor": ("private", "parameter")}
    replica, strategy = remembering(context, "dp2", wanted, load=folder, **more)
    load(replica, Path(folder), tokenizer=None, log=silent)
    shard_of = {shard.bucket: shard for shard in strategy.shards}
    errors, anchors = [0.0], [0.0]
    for state in strategy.states():
        shard = shard_of[state.bucket]
        for placed in state.bucket.placed:
            values = state.values[placed.start : placed.stop]
            if state.name == "error":
                errors.append(values.abs().max().item())
            else:
                whole = strategy.gather(shard, shard.main_param.data)[placed.start : placed.stop]
                anchors.append((values - whole).abs().max().item())
    return max(errors), max(anchors)


def test_missing_states_start_from_zero_or_the_parameters(written: dict[str, Path]) -> None:
    assert run_ranks(2, initial_states, str(written["tp2 dp2"]), {}) == [(0.0, 0.0)] * 2
    # With finetune too, but states that start from 0 keep their initial values.
    assert run_ranks(2, initial_states, str(written["tp2 dp2"]), {"finetune": True}) == [(1.0, 0.0)] * 2


def refused(context: RankContext, folder: str, wanted: Wanted) -> str:
    replica, _ = remembering(context, "one", wanted, load=folder)
    with pytest.raises(CheckpointError) as caught:
        load(replica, Path(folder), tokenizer=None, log=silent)
    return str(caught.value)


def test_missing_required_state_is_named(written: dict[str, Path]) -> None:
    message = refused(RankContext(0), str(written["pp2"]), {"owner": ("sharded", "required")})
    assert "there is no optimizer.owner:" in message and "the nearest is optimizer.own" in message


def test_rounding_of_another_precision_is_logged(written: dict[str, Path]) -> None:
    """exp_avg saved in fp32, loaded in bf16: rounded, with one log line; bf16 to fp32 loses nothing."""
    bf16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "adam_beta2": 0.95}
    folder = written["pp2"]
    lines: list[str] = []
    replica = build(RankContext(0), tiny_config(1, **SMALL, **bf16, load=str(folder)))
    load(replica, folder, tokenizer=None, log=lines.append)
    checkpoint = f"{folder}/step-0000004"
    assert lines[1:] == [
        f"{checkpoint} has exp_avg in F32, this run in BF16: it is rounded",
        f"{checkpoint} has exp_avg_sq in F32, this run in BF16: it is rounded",
        "other settings than the checkpoint's run had: adam_beta2 0.999 -> 0.95",
    ]


def test_bf16_moments_are_saved_in_bf16(tmp_path: Path) -> None:
    """fp32 runs load it without a log line."""
    folder = tmp_path
    bf16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "adam_beta2": 0.95}
    replica = build(RankContext(0), tiny_config(1, **SMALL, **bf16))
    moments = replica.optimizer.state(replica.strategy.shards[0].main_param)
    moments["exp_avg"].copy_(torch.randn(moments["exp_avg"].shape))
    placed = replica.strategy.shards[0].bucket.placed[0]
    kept = moments["exp_avg"][placed.start : placed.stop].float()
    path = save(replica, folder, Progress(1, 8), tokenizer=None)
    stored = Manifest.from_json((path / MANIFEST_NAME).read_text()).tensors
    key = f"optimizer.exp_avg:{placed.parameter.info.spec.name}"
    assert stored[key].dtype == "BF16"
    lines: list[str] = []
    other = build(RankContext(0), tiny_config(1, **SMALL, adam_beta2=0.95, load=str(folder)))
    load(other, folder, tokenizer=None, log=lines.append)
    values = other.optimizer.state(other.strategy.shards[0].main_param)["exp_avg"]
    assert values.dtype == torch.float32
    assert torch.equal(values[placed.start : placed.stop], kept)
    assert lines[1:] == []


@pytest.mark.parametrize(
    ("state", "shape"), [("own", []), ("own", [2, 8]), ("alike", [16, 1]), ("exp_avg", [8]), ("exp_avg", [1, 1, 16])]
)
def test_wrong_shape_in_a_manifest_is_an_error(
    written: dict[str, Path], tmp_path: Path, state: str, shape: list[int]
) -> None:
    """A valid checkpoint with a tensor of a wrong shape is refused by name."""
    key = f"optimizer.{state}:final_norm.weight"
    source = written["pp2"] / "step-0000004"
    target = shutil.copytree(source, tmp_path / source.name)

    def change_shape(body: dict[str, Any]) -> None:
        entry = body["tensors"][key]
        entry["global_shape"] = shape
        entry["parts"] = [{"file": entry["parts"][0]["file"], "slice": [[0, size] for size in shape]}]

    edit_manifest(target, change_shape)
    message = refused(RankContext(0), str(tmp_path), STATES)
    assert key in message and f"{shape}, but this run has [16]" in message


class Late:
    """A collective that happens only when a thread waits for it."""

    def __init__(self, collective: Callable[[], None]) -> None:
        self._collective = collective

    def wait(self) -> None:
        self._collective()


def load_during_gathers(context: RankContext, folder: str) -> list[str]:
    """Load while the last step's parameters are still being gathered; return the differences."""
    settings = {**SMALL, "dp": 2, "dp_strategy": "distributed-optimizer", "overlap_param_gather": True}
    runner = Runner(build(context, tiny_config(2, **settings)))
    save(runner.replica, Path(folder), Progress(0, 0), tokenizer=None)
    wanted = [bucket.data.clone() for bucket in runner.replica.strategy.all_buckets()]

    def late(channel: Channel, output: torch.Tensor, part: torch.Tensor) -> Late:
        sent = part.clone()
        return Late(lambda: channel.group.all_gather(output, sent))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "gather_raw_async", late)
        runner.step()
    load(runner.replica, Path(folder), tokenizer=None, log=silent)
    runner.replica.strategy.wait_for_parameters()
    buckets = list(runner.replica.strategy.all_buckets())
    return [f"bucket {index}" for index, values in enumerate(wanted) if not torch.equal(buckets[index].data, values)]


def test_pending_gathers_do_not_overwrite_loaded_parameters(tmp_path: Path) -> None:
    assert run_ranks(2, load_during_gathers, str(tmp_path)) == [[], []]
