"""The command `megalite profile` on one process, and on gloo ranks that pose as several nodes."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.cli.profile import _dtypes, format_profile, profile
from megalite.cli.tool_commands import PROFILE
from megalite.config.errors import ConfigError
from megalite.config.numbers import duration, rate
from megalite.planner.hardware import load_cluster, load_stack
from megalite.profiling.collectives import describe_machine, make_groups
from megalite.profiling.run import fit_cluster
from megalite.topology import shared_memory
from megalite.topology.topology import Launch
from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY
from tests.profiling.made_up import CPU, measurements
from tests.support.ranks import RankContext, run_ranks


def _profile(context: RankContext, words: list[str], size: int) -> tuple[str, str]:
    """Return what it printed, or its error."""
    launch = Launch(rank=context.rank, world_size=size, local_rank=context.rank)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            arguments, device = PROFILE.parse(words), torch.device("cpu")
            profile(arguments, launch, device, _dtypes(arguments, device), reuse=context.groups)
    except ConfigError as error:
        return said.getvalue(), str(error)
    return said.getvalue(), ""


def test_two_ranks_write_a_cluster_file(tmp_path: Path) -> None:
    output, stack = tmp_path / "mine.yaml", tmp_path / "stack.yaml"
    words = ["--output", str(output), "--output-stack", str(stack), "--seconds", "1"]
    (said, failed), other = run_ranks(2, _profile, words, 2)
    assert failed == ""
    assert other == ("", "")  # only rank 0 prints
    cluster = load_cluster(str(output))
    assert (cluster.name, cluster.node.accelerators, list(cluster.accelerator.peak_flops)) == ("mine", 2, ["fp32"])
    assert (
        f"torch {torch.__version__}, by megalite profile --output {output} --output-stack {stack} --seconds 1 on 2 ranks"
        in cluster.provenance["node"]
    )
    assert cluster.provenance["network"] == "assumed, from cluster cpu-box"
    assert "2 ranks on 1 node, 1 thread per rank; all ranks of a node measured at once" in cluster.description
    own = load_stack(str(stack))
    assert own.operation_seconds > 0
    for title in ("Matrix products", "Attention", "Memory", "Between ranks, all groups at once"):
        assert title in said
    for operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p"):
        assert f"{operation} inside" in said
    assert ("all-reduce memory" in said) == (cluster.node.shared_memory_bandwidth is not None)
    assert shared_memory._system() is None or cluster.node.shared_memory_bandwidth > 1e8
    assert "not measured: accelerator.host_bandwidth, network, efficiency.network" in said


def _channels(context: RankContext, hosts: list[str]) -> tuple[list[tuple[Any, ...]], list[tuple[bool, int]]]:
    """Return groups and pair of each place, and whether groups inside a node have shared memory."""
    world = context.topology(dp=len(hosts)).world
    machine = describe_machine(world, node=hosts[context.rank])
    found = make_groups(machine, context.rank, torch.device("cpu"), reuse=context.groups)
    places = [
        (each.place, [group.ranks for group in each.groups], each.edges[0].ranks if each.edges else ())
        for each in found
        if each.place != "memory"
    ]
    inside = [
        (group.memory is not None, group.size) for each in found if each.place != "across" for group in each.groups
    ]
    return places, inside


def test_groups_inside_and_across_nodes() -> None:
    on_rank = [places for places, _ in run_ranks(4, _channels, ["a", "a", "b", "b"])]
    assert on_rank[3] == [("inside", [(2, 3)], (2, 3)), ("across", [(1, 3)], (1, 3))]
    assert on_rank[0] == [("inside", [(0, 1)], (0, 1)), ("across", [(0, 2)], (0, 2))]
    found = run_ranks(4, _channels, ["a"] * 4)
    assert found[2][0] == [("inside", [(2, 3), (0, 1, 2, 3)], (2, 3))]
    if shared_memory._system() is not None:  # Linux on x86-64
        assert all(inside == [(False, 2), (False, 4), (True, 2), (True, 4)] for _, inside in found)
    # With an odd number one rank is idle while the others exchange messages.
    on_rank = [places for places, _ in run_ranks(3, _channels, ["a"] * 3)]
    assert on_rank[1] == [("inside", [(0, 1, 2)], (0, 1))]
    assert on_rank[2] == [("inside", [(0, 1, 2)], ())]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "{tmp}/no/mine.yaml"], "cannot write {tmp}/no/mine.yaml: No such file or directory; give"),
        (["--output", "{tmp}/mine.json"], "cluster and stack files end in .yaml, got {tmp}/mine.json"),
        (["--output", "{tmp}/a.yaml", "--output-stack", "{tmp}/a.yaml"], "are both {tmp}/a.yaml; give two files"),
        (["--output", "{tmp}/a.yaml", "--dtype", "bf61"], "--dtype cannot be bf61: did you mean bf16?"),
        (["--output", "{tmp}/a.yaml", "--seconds", "0.1"], "--seconds is 0.1; measuring takes at least 1 s"),
        (["--output", "{tmp}/a.yaml", "--like", "dgx-a10"], "unknown cluster dgx-a10: did you mean dgx-a100"),
    ],
)
def test_bad_input_is_an_error_before_measuring(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [flag.format(tmp=tmp_path) for flag in flags]
    assert PROFILE(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert message.format(tmp=tmp_path) in said.err
    assert "measuring" not in said.out
    assert list(tmp_path.iterdir()) == []


def _without_product(context: RankContext, words: list[str]) -> tuple[str, str]:
    """Let rank 1's device have no fp16 product."""
    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1:

            def refuse(*_: object) -> torch.Tensor:
                raise RuntimeError("addmm not implemented for 'Half'\nmore lines")

            patch.setattr(torch.Tensor, "__matmul__", refuse)
        return _profile(context, words, 2)


def test_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """Rank 0 cannot write; rank 1 has no fp16 product."""
    said = run_ranks(2, _profile, ["--output", str(tmp_path / "no" / "mine.yaml")], 2)
    assert said[0] == said[1] and said[0][1].startswith(f"cannot write {tmp_path}/no/mine.yaml")
    said = run_ranks(2, _without_product, ["--output", str(tmp_path / "a.yaml"), "--dtype", "fp16"])
    assert said[0] == said[1]
    assert said[0][1].startswith("--dtype fp16 is not supported on cpu here (addmm not implemented for 'Half'); use ")


def test_page_shows_valid_commands() -> None:
    page = (REPOSITORY / "docs" / "profile.md").read_text(encoding="utf-8")
    shown = [command.words for command in commands_in(page, "docs/profile.md")]
    assert len(shown) == 3
    for words in shown:
        arguments = PROFILE.parse(words[words.index("profile") + 1 :])
        assert _dtypes(arguments, torch.device("cpu"))


def test_tables_have_a_row_per_measurement_and_shares_of_peaks() -> None:
    base, noisy = load_cluster("dgx-a100"), {"spread": 0.3}
    measured = measurements(base, CPU, ("bf16",))
    first = measured.gemms[0]
    timing = dataclasses.replace(first.timing, **noisy)
    measured = dataclasses.replace(measured, gemms=[dataclasses.replace(first, timing=timing), *measured.gemms[1:]])
    fitted = fit_cluster(measured, base, nominal=True, name="x", source="s")
    said = format_profile(measured, fitted, load_stack("fused"), base).split("\n\n")
    products, attention, memory, passes, between, constants, mark = (part.splitlines() for part in said)
    assert [len(part) - 2 for part in (products, attention, memory)] == [36, 2, 6]
    assert len(between) - 2 == len(measured.collectives) and passes == [
        "Passes of small stages are measured only on CPUs"
    ]
    assert products[1].split()[-3:] == ["FLOP/s", "of", "peak"]
    share = first.flops_per_second / base.peak("bf16")
    speed = rate(first.flops_per_second, "F").split()
    assert products[2].split()[-4:] == ["30%*", *speed, f"{share:.0%}"]
    last = measured.memory[-1]
    assert memory[-1].split()[:2] == ["adam", str(last.elements)] and memory[-1].endswith(
        f"{last.bytes_per_second / base.accelerator.memory_bandwidth:.0%}"
    )
    assert rate(999.6e9, "F") == "1000 GF" and duration(1234.0) == "1234 s"
    assert constants[0].startswith("Cluster x: ") and mark[0].startswith("* 1 of ")
