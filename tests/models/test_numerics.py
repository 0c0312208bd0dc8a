"""`--tf32` and `--deterministic`: settings, errors, and unchanged bits on a CPU."""

import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megalite.config.compute import ComputeConfig
from megalite.config.errors import ConfigError
from megalite.models.compute import use_numerics
from megalite.parity.trajectory import Runner
from megalite.topology.topology import Topology
from megalite.training.replica import build_replica
from tests.support.tiny import LLAMA, tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore both settings of the process."""
    with mock.patch.dict(os.environ):
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False


def test_nothing_is_set_by_default() -> None:
    assert use_numerics(ComputeConfig(), CUDA) == []
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.are_deterministic_algorithms_enabled()


def test_intended_torch_warnings_are_hidden() -> None:
    """Their texts in torch 2.11. In tests, a warning that is not hidden is an error."""
    use_numerics(ComputeConfig(), CUDA)
    warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set", stacklevel=1)
    unbatched = "An unbatched P2P op (send/recv) was called on this ProcessGroup with size 2."
    warnings.warn(f"{unbatched}  This will result in a new 2-rank NCCL communicator to be created.", stacklevel=1)
    with pytest.raises(UserWarning, match="unbatched"):
        warnings.warn(unbatched, stacklevel=1)


def test_tf32_sets_both_torch_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert use_numerics(ComputeConfig(tf32=True), CUDA) == ["fp32 products in TF32"]
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.get_float32_matmul_precision() == "high"


def test_tf32_without_support_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^tf32 cannot be used: cpu has no products in TF32; remove it$"):
        use_numerics(ComputeConfig(tf32=True), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(ConfigError, match=r"compute capability 8\.0 or more, but this device has 7\.0"):
        use_numerics(ComputeConfig(tf32=True), CUDA)
    assert not torch.backends.cuda.matmul.allow_tf32
    use_numerics(ComputeConfig(tf32=True), torch.device("meta"))  # of a dry run


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "experts, muon": {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "optimizer": "muon"},
}


@pytest.mark.parametrize("model", MODELS)
def test_deterministic_run_has_the_same_bits(model: str) -> None:
    """torch refuses no operation of a step; its list is nearly the same on CUDA."""
    norms = []
    for asked in (False, True):
        config = tiny_config(**MODELS[model], num_layers=2, global_batch_size=2, deterministic=asked)
        run = Runner(build_replica(config, Topology.solo(CPU)))
        assert torch.are_deterministic_algorithms_enabled() == asked
        results = [run.step() for _ in range(3)]
        norms.append([(result.loss, result.grad_norm) for result in results])
        assert any("deterministic" in line for line in run.replica.compute_notes) == asked
    assert norms[0] == norms[1]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_nondeterministic_operation_is_refused() -> None:
    use_numerics(ComputeConfig(deterministic=True), CPU)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=False)


def test_workspace_set_by_the_user_is_kept() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    build_replica(tiny_config(deterministic=True), Topology.solo(CPU))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
