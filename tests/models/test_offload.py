"""Activations of the first layers of a stage in host memory: the same bits, and fewer bytes on the device."""

from typing import Any

import pytest
import torch

from megalite.models import offload
from megalite.partition.memory import activation_peaks, host_peaks, rank_memory
from megalite.partition.pipeline import plan_stages, schedule_of
from megalite.rehearsal.run import rehearse
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Runner, build, tiny_config
from tests.topology.test_host_memory import LateStream


def steps(context: RankContext, world: int, settings: dict[str, Any]) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Results and weights of two steps."""
    runner = Runner(build(context, tiny_config(world, **settings)))
    found = []
    for _ in range(2):
        result = runner.step()
        strategy = runner.replica.strategy
        strategy.wait_for_parameters()
        weights = {f"{n}": bucket.data.clone() for n, bucket in enumerate(strategy.all_buckets())}
        found.append((f"{result.loss} {result.grad_norm}", weights))
    strategy.close()
    return found


class Late(LateStream):
    """For activations: what is let go may go."""

    def outlive(self, tensor: torch.Tensor) -> None: ...


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (1, {"hidden_dropout": 0.1, "attention_dropout": 0.1, "precision": "bf16"}),
    "llama": (1, LLAMA),
    "experts": (1, {"num_experts": 4, "moe_router_topk": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "vpp2": (2, {"pp": 2, "vpp": 2}),
    "split backward": (2, {"pp": 2, "pipeline_schedule": "zb-h1"}),
    "zero-3": (2, {"dp": 2, "dp_strategy": "fully-sharded"}),
}


def both(context: RankContext, world: int, settings: dict[str, Any]) -> list[str]:
    """The numbers of offloaded layers that change a bit."""
    wanted = steps(context, world, settings)
    found = []
    for late, count in ((False, 1), (True, 2)) if "vpp" not in settings else ((True, 1),):
        with pytest.MonkeyPatch.context() as patch:
            if late:
                patch.setattr(offload, "CopyStream", Late)
            ours = steps(context, world, {**settings, "cpu_offloading_num_layers": count})
        same = (torch.equal(b[key], a[key]) for (_, a), (_, b) in zip(wanted, ours, strict=True) for key in a)
        if [text for text, _ in ours] != [text for text, _ in wanted] or not all(same):
            found.append(f"{count}, late {late}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_bit_is_another(case: str) -> None:
    world, settings = CASES[case]
    assert run_ranks(world, both, world, settings) == [[]] * world


SHAPE: dict[str, Any] = {"hidden_size": 64, "seq_length": 64, "num_layers": 8, "precision": "bf16"}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_on_both_sides_are_planned(rank: int, count: int) -> None:
    """Of two pipeline ranks; each storage takes whole blocks of 512 bytes."""
    config, plain = (tiny_config(2, pp=2, **SHAPE, **more) for more in ({"cpu_offloading_num_layers": count}, {}))
    stages = plan_stages(config)
    schedule = schedule_of(config, 8)
    own = [plan for plan in stages if plan.rank == rank]
    plan = rank_memory(
        config, own, activation_peaks(config, stages, schedule)[rank], host_peaks(config, stages, schedule)[rank]
    )
    without = rank_memory(plain, own, activation_peaks(plain, stages, schedule)[rank])
    ours, theirs = rehearse(config, rank), rehearse(plain, rank)
    assert ours.host_bytes == pytest.approx(plan.host_bytes, rel=0.03)
    assert theirs.peak_bytes - ours.peak_bytes == pytest.approx(without.total_bytes - plan.total_bytes, rel=0.15)
