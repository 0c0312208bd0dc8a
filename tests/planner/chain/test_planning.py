"""The planner for chains: equal to exhaustive search, never slower than its baselines."""

import pytest

from megalite.config.errors import ConfigError
from megalite.planner.chain.inputs import ChainCluster, find_profile, read_cluster
from megalite.planner.chain.plan import Judge, Problem
from megalite.planner.chain.planning import DATA_PARALLEL, PIPEDREAM, STRAIGHT, plan_chain
from tests.planner.chain.chains import brute_force, chain, cluster, random_chain

NO_LIMIT = float("inf")
SMALL = [
    (5, cluster(2, 2)),
    (5, cluster(2, 2, network=1.0, message=0.2)),
    (6, cluster(3, 1)),
    (5, cluster(1, 4)),
    (4, cluster(2, 3, message=0.3)),
    (4, cluster(4, 1, network=10.0, message=10.0, latency_us=100.0)),
]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("layers", "machines"), SMALL, ids=lambda value: getattr(value, "name", str(value)))
def test_plans_are_within_one_percent_of_brute_force(layers: int, machines: ChainCluster, seed: int) -> None:
    profile = random_chain(seed, layers)
    planned = plan_chain(profile, machines, 8, memory=NO_LIMIT)
    best = brute_force(Judge(Problem(profile, machines, 8, NO_LIMIT)))
    assert best.seconds - 1e-12 <= planned.best.seconds <= 1.01 * best.seconds


@pytest.mark.parametrize(("model", "where", "batch"), [("vgg-19", "4x8", 1024), ("bert-48", "C", 64)])
def test_plans_are_never_slower_than_the_baselines(model: str, where: str, batch: int) -> None:
    planned = plan_chain(find_profile(model), read_cluster(where), batch, memory=NO_LIMIT)
    assert tuple(planned.baselines) == (PIPEDREAM, DATA_PARALLEL, STRAIGHT)
    for name, other in planned.baselines.items():
        assert planned.best.seconds <= other.seconds, name
    if (model, where) == ("vgg-19", "4x8"):
        # The paper reports up to 3.23 times.
        assert planned.baselines[PIPEDREAM].seconds / planned.best.seconds >= 3.23


def test_plans_of_the_paper() -> None:
    # Table 5: VGG-19 replicates its convolutions but not its dense layers; XLNet-36 has two even stages.
    vgg = plan_chain(find_profile("vgg-19"), read_cluster("A"), 1024, memory=NO_LIMIT).best.plan.stages
    assert len(vgg) == 2
    assert vgg[0].replicas >= 14 and vgg[1].first >= 15
    xlnet = plan_chain(find_profile("xlnet-36"), read_cluster("A"), 128, memory=NO_LIMIT).best.plan.stages
    assert [stage.devices for stage in xlnet] == [(8, 0), (0, 8)]
    assert abs(xlnet[0].last - 19) <= 1


def test_plan_of_one_device() -> None:
    planned = plan_chain(chain([(1.0, 1.0, 1.0)] * 3), cluster(1, 1), 4)
    assert planned.best.seconds == pytest.approx(4 * 9e-3)
    assert planned.complete
    assert {len(other.plan.stages) for other in planned.baselines.values()} == {1}


def test_devices_that_do_not_help_stay_unused() -> None:
    # A second machine would only add a slow reduction of 1 GB, or a slow message.
    profile = chain([(1.0, 1000.0, 500.0), (1.0, 1000.0, 500.0)])
    stages = plan_chain(profile, cluster(2, 1, network=0.1, message=0.1), 4).best.plan.stages
    assert [sum(stage.devices) for stage in stages] == [1]


def test_memory_forces_a_pipeline() -> None:
    profile = chain([(5.0, 1.0, 100.0)] * 4, kept=1e6)
    machines = cluster(1, 4)
    assert len(plan_chain(profile, machines, 16).best.plan.stages) == 1
    # A device holds 4 bytes per byte of parameters: 1.6 GB of all layers, 0.8 of two.
    planned = plan_chain(profile, machines, 16, memory=1e9)
    assert len(planned.best.plan.stages) > 1
    assert max(planned.best.memory) <= 1e9
    assert max(planned.baselines[DATA_PARALLEL].memory) > 1e9, "shown although it does not fit"
    assert max(planned.baselines[STRAIGHT].memory) <= 1e9
    with pytest.raises(ConfigError, match=r"no plan for test on 1x4 fits 95.37 MiB .* needs 38"):
        plan_chain(profile, machines, 16, memory=1e8)


def test_invalid_batches_are_errors() -> None:
    profile = chain([(1.0, 1.0, 1.0)])
    with pytest.raises(ConfigError, match=r"global_batch_size is 0; it must be 1 or more"):
        plan_chain(profile, cluster(1, 1), 0)
    with pytest.raises(ConfigError, match=r"global_batch_size 5040 has 51 divisors; use 4096"):
        plan_chain(profile, cluster(1, 1), 5040)
    # Huge batches have at most 512 microbatches.
    assert plan_chain(profile, cluster(1, 1), 2**40, memory=NO_LIMIT).best.plan.microbatches <= 512
