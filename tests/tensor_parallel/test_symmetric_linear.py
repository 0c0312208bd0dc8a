"""Layers with symmetric memory: torch's operators, by their signatures, with torch's fallbacks on the CPU."""

from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from megalite.config.errors import ConfigError
from megalite.models import compute
from megalite.models.compute import apply_compute
from megalite.tensor_parallel import overlapped_linear
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.overlapped_linear import Ring, SymmetricMemory, self_check
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import build, tiny_config
from tests.tensor_parallel.test_ring_linear import same_numbers

CPU = torch.device("cpu")
_library: list[torch.library.Library] = []


def stand_in() -> None:
    """Register torch's CPU fallbacks for the operators: they gather or reduce over the group by name."""
    if not _library:
        _library.append(torch.library.Library("symm_mem", "IMPL"))
        gather = symmetric_memory._fused_all_gather_matmul_fallback
        _library[0].impl("fused_all_gather_matmul", gather, "CPU")
        _library[0].impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")


def by_symmetric_memory(context: RankContext, size: int) -> None:
    stand_in()
    same_numbers(context.topology(tp=size).tp, SymmetricMemory, torch.float64, 1e-13)


@pytest.mark.parametrize("tp", [2, 4])
def test_symmetric_memory_layers_equal_plain_layers(tp: int) -> None:
    run_ranks(tp, by_symmetric_memory, tp)


def trial(context: RankContext, wrong: str) -> str | None:
    """Return the self-check's results on two ranks, with right operators, or wrong ones on rank 1."""
    stand_in()
    tp, gather = context.topology(tp=2).tp, SymmetricMemory.gather

    def damaged(self: SymmetricMemory, *args: Any, **kwargs: Any) -> Any:
        y, whole = gather(self, *args, **kwargs)
        if tp.rank == 1 and wrong == "raises":
            raise RuntimeError("no peer access\nbecause")
        return (y.mul_(1.5) if tp.rank == 1 and wrong == "numbers" else y), whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricMemory, "gather", damaged)
        if tp.rank == 1 and wrong == "none":
            patch.setattr(overlapped_linear, "_why_not_here", lambda: "torch has none")
        return self_check(tp)


OTHER = "another rank of tp has no symmetric memory"


@pytest.mark.parametrize(
    ("wrong", "reasons"),
    [
        ("", [None, None]),
        ("none", [OTHER, "torch has none"]),
        ("raises", [OTHER, "RuntimeError: no peer access"]),
        ("numbers", [OTHER, "a gathered product has a relative error of 5.0e-01 in its self-check"]),
    ],
)
def test_symmetric_memory_is_checked_before_use(wrong: str, reasons: list[str | None]) -> None:
    assert run_ranks(2, trial, wrong) == reasons


def test_torch_has_the_operators() -> None:
    """The operators have the signatures that the code uses."""
    schema = {name: str(getattr(torch.ops.symm_mem, name).default._schema) for name in overlapped_linear._OPERATORS}
    assert (
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)"
        in schema["fused_all_gather_matmul"]
    )
    reduce = schema["fused_matmul_reduce_scatter"]
    assert "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor" in reduce


def chosen(context: RankContext, backend: str, why: str | None) -> tuple[list[str], set[type]]:
    config = tiny_config(2, tp=2, sequence_parallel=True, tp_comm_overlap=True, tp_comm_overlap_backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        if why != "as it is":
            patch.setattr(compute, "why_not_symmetric", lambda tp: why)
        stage = next(iter(build(context, config).stages.values()))
        lines = apply_compute(stage, config)
    linears = [
        module for module in stage.layers.modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    return [line for line in lines if "pieces" in line], {linear.overlap_by for linear in linears}


UNDER = ", in pieces under the layers' matrix products"


def test_ring_is_the_fallback() -> None:
    ring, symmetric = f"sequence-parallel gathers and scatters by a ring{UNDER}", SymmetricMemory
    for backend, why, line, by in (
        ("auto", "as it is", f"{ring} (cpu has no symmetric memory)", Ring),
        ("ring", None, f"{ring} (requested)", Ring),
        ("auto", None, f"sequence-parallel gathers and scatters by symmetric memory{UNDER} (available)", symmetric),
    ):
        for found in run_ranks(2, chosen, backend, why):
            assert found == ([line], {by})


def refused(context: RankContext) -> str:
    config = tiny_config(2, tp=2, sequence_parallel=True, tp_comm_overlap=True, tp_comm_overlap_backend="symmetric")
    with pytest.raises(ConfigError) as error:
        build(context, config)
    return str(error.value)


def test_requested_overlap_is_used_or_an_error() -> None:
    said = "tp_comm_overlap_backend symmetric cannot be used: cpu has no symmetric memory; use ring or auto"
    assert run_ranks(2, refused) == [said] * 2
