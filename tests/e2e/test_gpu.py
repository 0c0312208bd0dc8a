"""Whole runs on a GPU give the CPU's numbers in every layout: ranks share the GPU and communicate by NCCL."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.programs import TORCHRUN, records, run

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

LLAMA = "--normalization RMSNorm --activation swiglu --position-embedding-type rope --num-query-groups 2 --no-add-bias-linear"
MODELS = {
    "llama": LLAMA,
    "experts": f"{LLAMA} --num-experts 4",
    "latent": f"{LLAMA.replace('--num-query-groups 2 ', '')} --multi-latent-attention --num-experts 4 --mtp-num-layers 1",
}
RUN = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 3 --log-interval 1"
)
LAYOUTS = {
    "tp": ("llama", 2, "--tp 2 --sequence-parallel"),
    "cp": ("llama", 2, "--cp 2"),
    "cp, all-to-all": ("llama", 2, "--cp 2 --cp-comm-type a2a"),
    "vpp": ("llama", 2, "--pp 2 --vpp 2"),
    "zero bubble": ("llama", 2, "--pp 2 --pipeline-schedule zb-v"),
    "ZeRO-3": ("llama", 2, "--dp-strategy fully-sharded"),
    "server": ("llama", 2, "--dp-strategy parameter-server"),
    "tp, pp, ZeRO-1": ("llama", 4, "--tp 2 --pp 2 --sequence-parallel --dp-strategy distributed-optimizer"),
    "tp, ZeRO-2": ("llama", 4, "--tp 2 --dp-strategy distributed-optimizer --shard-gradients"),
    "ep": ("experts", 2, "--ep 2"),
    "tp, ep": ("experts", 4, "--tp 2 --ep 2 --sequence-parallel"),
    "latent attention, pp": ("latent", 2, "--pp 2"),
}


Numbers = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def trained(folder: Path, ranks: int, flags: str) -> Numbers:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "tests/e2e/on_one_gpu.py"]
    run(*launcher, *RUN.split(), *flags.split(), "--run-dir", folder, seconds=240).require_success()
    return [(record["loss"], record["grad_norm"]) for record in records(folder, "train")]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Numbers]:
    return functools.cache(lambda model: trained(tmp_path_factory.mktemp(model), 1, f"{MODELS[model]} --device cpu"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_gives_the_numbers_of_a_cpu(layout: str, on_cpu: Callable[[str], Numbers], tmp_path: Path) -> None:
    model, ranks, flags = LAYOUTS[layout]
    found = trained(tmp_path, ranks, f"{MODELS[model]} {flags} --device cuda")
    assert len(found) == 3
    for numbers, expected in zip(found, on_cpu(model), strict=True):
        assert numbers == pytest.approx(expected, rel=1e-4)
