"""`find`: the best layouts, refined; and the errors if there are none."""

from dataclasses import replace

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.planner.search import search
from megalite.planner.search.search import Plan, Survey, config_of, find, find_cheapest, survey
from megalite.planner.search.space import Request
from tests.planner.search.asking import TINY, asked

AHEAD = "--fix pp=4 --fix tp=1 --fix mbs=1 --fix recompute=full --fix schedule=1f1b"
GPT = "--preset gpt3-2.7b --cluster dgx-a100 --gpus 16 --global-batch-size 32"


def planned(flags: str, top: int = 3) -> Plan:
    request = asked(flags)
    return find(request.request, request.cluster, request.stack, top=top)


def test_candidates_equal_the_cost_model_and_fit() -> None:
    plan = planned(f"{GPT} --max-memory 30GB")
    seconds = [each.prediction.step_seconds for each in plan.candidates]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    for each, found in zip(plan.candidates, seconds, strict=True):
        assert each.fullest[1].total_bytes <= 30e9
        assert predict(each.config, plan.cluster, plan.stack).step_seconds == pytest.approx(found)
    kinds = {(each.layout.tp, each.layout.pipeline.pp, each.layout.pipeline.schedule) for each in plan.candidates}
    assert len(kinds) == 3


def test_refined_layouts_have_exact_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlimited(request: Request, cluster: Cluster, stack: SoftwareStack) -> Survey:
        return survey(replace(request, memory_limit=float("inf")), cluster, stack)

    monkeypatch.setattr(search, "survey", unlimited)
    flags = f"{TINY} --gpus 4 --fix mbs=1,8 --fix tp=1,4 --fix schedule=1f1b"
    held = planned(flags).candidates[0].fullest[1].total_bytes
    plan = planned(f"{flags} --max-memory {held - 1}B")
    assert plan.candidates
    assert all(each.fullest[1].total_bytes < held for each in plan.candidates)
    assert plan.survey.fitting == len(plan.survey.space)


def test_best_layout_of_a_small_space() -> None:
    flags = f"{TINY} --gpus 4 --fix recompute=none --fix strategy=all-reduce --fix mbs=1,2 --fix cp=1 --fix sp=false --fix tp=1,2"
    request = asked(flags)
    every = survey(request.request, request.cluster, request.stack)
    seconds = [
        predict(config_of(request.request, layout.settings()), request.cluster, request.stack).step_seconds
        for layout, _ in every.fastest()
    ]
    best = planned(flags, top=5).candidates[0].prediction.step_seconds
    assert best <= 1.02 * min(seconds)


def test_cut_by_predicted_time_is_never_slower() -> None:
    # With such a vocabulary the head weighs as much as several layers.
    flags = (
        "--num-layers 11 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 200000 "
        "--cluster dgx-a100 --gpus 4 --global-batch-size 32 --pp 4 --fix schedule=1f1b --fix mbs=4 --stack unfused"
    )
    plan = planned(flags, top=1)
    best = plan.candidates[0]
    layout = best.layout.settings()
    default = predict(config_of(plan.request, layout), plan.cluster, plan.stack).step_seconds
    assert best.prediction.step_seconds <= default
    if "pipeline_layers" in best.settings:
        assert sum(best.settings["pipeline_layers"]) == 11
        assert best.prediction.step_seconds < default


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (AHEAD, "recompute_ahead"),
        (f"{AHEAD} --max-memory 6GB --fix optimizer_cpu_offload=no", "cpu_offloading_num_layers"),
        ("--fix pp=4 --fix tp=1 --fix mbs=1 --fix recompute=none --fix vpp=1", "pipeline_schedule"),
    ],
)
def test_recompute_ahead_and_built_schedules_are_tried(
    flags: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(f"{GPT} {flags}")
    (varied,) = (each for each in plan.candidates if each.settings.get(setting) in (True, "auto"))
    seconds = predict(varied.config, plan.cluster, plan.stack).step_seconds
    assert seconds == pytest.approx(varied.prediction.step_seconds)
    monkeypatch.setattr(search._Refiner, "varied", lambda self, candidate: candidate)
    plain = planned(f"{GPT} {flags}").candidates
    assert plan.candidates[0].prediction.step_seconds <= plain[0].prediction.step_seconds
    assert sum(each.prediction.step_seconds > seconds for each in plain) > 0


ONE = "--preset gpt3-6.7b --cluster dgx-a100 --gpus 1 --global-batch-size 8"


def test_more_memory_is_never_slower() -> None:
    request, cluster, stack = asked(GPT)
    seconds = []
    for limit in (6e9, 12e9, 24e9, 48e9):
        found = survey(replace(request, memory_limit=limit), cluster, stack)
        seconds.append(next(found.fastest(), (None, np.inf))[1])
    assert seconds == sorted(seconds, reverse=True)
    assert np.inf > seconds[-2] > 0 and seconds[0] > seconds[-1]


def test_layouts_that_do_not_fit_use_host_memory() -> None:
    plan = planned(ONE, top=1)
    best, memory = plan.candidates[0], plan.candidates[0].fullest[1]
    assert best.settings["optimizer_cpu_offload"]
    assert memory.total_bytes <= plan.request.memory_limit < memory.total_bytes + memory.host_bytes
    assert best.prediction.step_seconds == pytest.approx(best.estimate, rel=0.1)
    assert 0 < plan.survey.by_host_memory == plan.survey.fitting
    with pytest.raises(ConfigError, match=r"fits into .* the least takes .*; use --max-memory"):
        planned(f"{ONE} --fix optimizer_cpu_offload=no")


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ("", r"none of .* fits into"),
        ("--fix optimizer_cpu_offload=yes", r"keep more than 18\.63 GiB in host memory: .*; use more --gpus, or"),
    ],
)
def test_host_memory_is_limited(fixed: str, message: str) -> None:
    request, cluster, stack = asked(f"{ONE} {fixed}")
    assert request.host_limit == pytest.approx(0.9 * 2e12 / 8)
    used = find(request, cluster, stack, top=1).candidates[0].fullest[1].host_bytes
    enough = find(replace(request, host_limit=1.01 * used), cluster, stack, top=1).candidates[0]
    assert enough.fullest[1].host_bytes <= 1.01 * used
    with pytest.raises(ConfigError, match=message):
        find(replace(request, host_limit=20e9), cluster, stack)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_activations_are_offloaded_if_faster_than_recompute(schedule: str) -> None:
    """As many offloaded layers as needed before the stages are cut by seconds, in closed form and in the simulator."""
    flags = f"{GPT} --fix tp=2 --fix dp=2 --fix mbs=2 --fix schedule={schedule} --fix recompute=none --fix sp=true "
    flags += "--fix strategy=all-reduce --fix vpp=1,2"
    none, every = (
        survey(*asked(f"{flags} --max-memory 10TB --fix cpu_offloading_num_layers={count}")).leanest()[1]
        for count in (0, 8)
    )
    limit = int(0.5 * (none + every))
    plan = planned(f"{flags} --max-memory {limit}B --fix optimizer_cpu_offload=no", top=1)
    best = plan.candidates[0]
    assert best.fullest[1].total_bytes <= limit
    layout = next(layout for layout, seconds in plan.survey.fastest() if seconds == best.estimate)
    layers, even = (
        layout.pipeline.offloaded,
        predict(config_of(plan.request, layout.settings()), plan.cluster, plan.stack),
    )
    assert best.settings["cpu_offloading_num_layers"] <= layers
    assert even.step_seconds == pytest.approx(best.estimate, rel=0.12 if schedule == "zb-v" else 0.1)
    fewer = config_of(
        plan.request, {**best.settings, "pipeline_layers": None, "cpu_offloading_num_layers": layers // 2}
    )
    assert max(rank.total_bytes for rank in predict(fewer, plan.cluster, plan.stack).memory) > limit


def test_offloaded_layers_follow_the_chosen_stages() -> None:
    """With the even cut the fullest stage needs 6 layers in host memory, with the cut by seconds 4."""
    flags = f"{GPT} --fix tp=2 --fix dp=2 --fix mbs=2 --fix schedule=1f1b --fix recompute=none --fix sp=true "
    flags += "--fix strategy=all-reduce --fix vpp=1"
    none, every = (
        survey(*asked(f"{flags} --max-memory 10TB --fix cpu_offloading_num_layers={count}")).leanest()[1]
        for count in (0, 8)
    )
    limit = int(0.3 * none + 0.7 * every)
    plan = planned(f"{flags} --max-memory {limit}B --fix optimizer_cpu_offload=no", top=1)
    best = plan.candidates[0]
    assert best.settings["pipeline_layers"] == [8, 9, 8, 7]
    assert best.settings["cpu_offloading_num_layers"] == best.layout.pipeline.offloaded == 4
    for cut, fits in ((None, 6), ([8, 9, 8, 7], 4)):
        for count in (fits - 1, fits):
            config = config_of(
                plan.request, {**best.settings, "pipeline_layers": cut, "cpu_offloading_num_layers": count}
            )
            held = max(rank.total_bytes for rank in predict(config, plan.cluster, plan.stack).memory)
            assert (held <= limit) == (count == fits)
    asks = planned(
        f"{flags} --max-memory {limit}B --fix optimizer_cpu_offload=no --fix cpu_offloading_num_layers=6", top=1
    )
    assert asks.candidates[0].settings["cpu_offloading_num_layers"] == 6


def test_host_memory_is_not_used_if_an_equal_layout_fits() -> None:
    flags = "--preset gpt3-6.7b --cluster dgx-a100 --gpus 4 --global-batch-size 256 --max-memory 40GB"
    request = asked(flags)
    found = survey(*request)
    alone = survey(replace(request.request, host=()), request.cluster, request.stack)
    fastest = next(alone.fastest())[1]
    gained = np.isfinite(found.all_seconds) & ~np.isfinite(alone.all_seconds)
    assert gained.sum() == found.by_host_memory > 0
    assert (found.all_seconds[gained] < fastest).all()
    both = np.isfinite(alone.all_seconds)
    assert (found.all_seconds[both] == alone.all_seconds[both]).all()
    # No faster layout is left out: try each with its states in host memory.
    states = survey(*asked(f"{flags} --fix optimizer_cpu_offload=yes --fix cpu_offloading_num_layers=0"))
    faster = ~np.isfinite(alone.all_seconds) & (states.all_seconds < fastest)
    assert faster.any()
    assert (found.all_seconds[faster] <= states.all_seconds[faster] * (1 + 1e-9)).all()
    cpu = asked("--preset gpt3-350m --cluster cpu-box --gpus 4 --global-batch-size 8")
    assert not cpu.request.host


def test_layout_with_the_least_memory() -> None:
    request = asked(f"{GPT} --fix schedule=1f1b")
    plan = find(*request, top=3, objective="memory")
    held = [each.fullest[1].total_bytes for each in plan.candidates]
    assert held == sorted(held)
    found = survey(*request)
    assert held[0] == pytest.approx(found.all_bytes[np.isfinite(found.all_seconds)].min(), rel=0.02)
    assert plan.candidates[0].prediction.step_seconds > planned(GPT, top=1).candidates[0].prediction.step_seconds


def test_cheapest_number_of_ranks() -> None:
    # On 16 ranks (two nodes) gradients cross the network, on 8 they do not; on one rank the model does not fit.
    request, cluster, stack = asked(
        "--preset gpt3-2.7b --cluster dgx-a100 --gpus 16 --global-batch-size 16 --max-memory 15GB"
    )
    plan, seconds = find_cheapest(replace(request, host=()), cluster, stack, top=1)
    each = {ranks: find(replace(request, world_size=ranks, host=()), cluster, stack, top=1) for ranks in seconds}
    assert seconds == {ranks: one.candidates[0].prediction.step_seconds for ranks, one in each.items()}
    assert max(seconds) == 16 and 1 < min(seconds) < 16
    assert plan.request.world_size == min(seconds, key=lambda ranks: ranks * seconds[ranks]) < 16
    with pytest.raises(ConfigError, match=r"none of .* fits"):
        find(replace(request, world_size=min(seconds) // 2, host=()), cluster, stack)


def test_setting_that_excludes_host_memory() -> None:
    averaged = f"{GPT} --optimizer schedule-free-adamw --lr-decay-style constant"
    assert asked(averaged).request.host == ("cpu_offloading_num_layers",)
    assert asked(f"{GPT} --compile").request.host == ("optimizer_cpu_offload", "cpu_offloading_num_layers")
    with pytest.raises(ConfigError, match=r"optimizer_cpu_offload does not go with .*schedule-free-adamw"):
        asked(f"{averaged} --optimizer-cpu-offload")
    half = asked(f"{ONE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert half.request.config.optimizer.optimizer_offload_fraction == 0.5
    assert half.request.fixed["optimizer_cpu_offload"] == (True,)


def test_error_names_what_is_possible() -> None:
    with pytest.raises(
        ConfigError, match=r"fits into 27\.94 GiB per rank on 1 ranks; the least .* in host memory"
    ) as caught:
        planned(f"{ONE} --max-memory 30GB")
    needed = str(caught.value).split("use --max-memory ")[1].split()[0]
    assert planned(f"{ONE} --max-memory {needed}", top=1).candidates
    for flags, message in (
        ("--tp 7", "no layout of 16 ranks can have tp 7; use tp 1, 2, 4, 8, 16"),
        ("--fix schedule=zb-v --vpp 3", "can have vpp 3 with pipeline_schedule zb-v; use vpp 2"),
        ("--fix tp=7 --fix pp=5", "tp 7, pp 5; remove several of these"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(f"{GPT} {flags}")
