"""The dry run: its JSON keys, its text, its errors, its speed, and that it needs no torch."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.dry_run import dry_run, format_report, report, world_size_of
from megalite.config.describe import sectioned
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate

SMALL = "--num-layers 6 --hidden-size 64 --vocab-size 512 --train-iters 30 --global-batch-size 16 --bf16"
TINY = f"--dry-run {SMALL} --tp 2 --pp 2 --vpp 2 --world-size 8"
TRILLION = (
    "--dry-run --preset gpt-1t --tp 8 --pp 64 --world-size 3072 --global-batch-size 3072 --bf16 --sequence-parallel "
    "--recompute-granularity full"
)


def report_of(flags: str) -> dict[str, Any]:
    invocation = parse_arguments(flags.split())
    return report(invocation.config, world_size_of(invocation), invocation.explicit)


def squeezed(text: str) -> list[str]:
    """The lines with one space where there are several."""
    return [" ".join(line.split()) for line in text.splitlines()]


def keys(tree: Any, prefix: str = "") -> set[str]:
    """Paths of all keys; list elements count as one `[]`."""
    if isinstance(tree, dict):
        return {path for key, value in tree.items() for path in {f"{prefix}{key}", *keys(value, f"{prefix}{key}.")}}
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return keys(tree[0], prefix.removesuffix(".") + "[].")
    return set()


def test_stable_keys() -> None:
    found = report_of(TINY)
    kinds = set(found["layout"].pop("groups"))
    found.pop("config")
    assert {"tp", "cp", "dp", "pp", "model", "embedding", "position-embedding", "ep", "expert-tp", "expert-dp"} <= kinds
    expected = """
        world_size layout layout.axes layout.axes.tp layout.axes.cp layout.axes.dp layout.axes.pp layout.axes.vpp
        layout.axes.ep layout.axes.etp layout.order layout.ranks layout.ranks[].rank layout.ranks[].tp
        layout.ranks[].cp layout.ranks[].dp layout.ranks[].pp
        stages stages[].stage stages[].pipeline_rank stages[].first_layer stages[].last_layer stages[].layers
        stages[].embedding stages[].head stages[].parameters stages[].parameters_per_rank
        memory memory.pipeline_ranks memory.fullest_pipeline_rank memory.fullest_rank memory.fullest_bytes
        memory.pipeline_ranks[].pipeline_rank memory.pipeline_ranks[].parameters
        memory.pipeline_ranks[].parameter_bytes memory.pipeline_ranks[].gradient_bytes
        memory.pipeline_ranks[].optimizer_bytes memory.pipeline_ranks[].activation_bytes
        memory.pipeline_ranks[].workspace_bytes memory.pipeline_ranks[].total_bytes
        communication communication[].pipeline_rank communication[].group communication[].size
        communication[].operation communication[].volume_bytes communication[].sent_bytes
        communication[].basis
        schedule schedule.name schedule.virtual_stages schedule.microbatches schedule.all_microbatch_counts
        schedule.bubble_fraction schedule.costs schedule.peak_activations schedule.grid
        batch batch.micro_batch_size batch.dp batch.microbatches batch.global_batch_size batch.seq_length
        batch.tokens_per_step batch.batch_sizes batch.rampup_samples batch.train_steps batch.train_samples
        batch.train_tokens
        model model.parameters model.padded_vocab_size model.flops_per_token model.flops_per_token.palm
        model.flops_per_token.megatron model.flops_per_step
    """
    assert keys(found) == set(expected.split())
    docs = (Path(__file__).parents[2] / "docs" / "dry-run.md").read_text(encoding="utf-8")
    leaves = {path.split(".")[-1].removesuffix("[]") for path in keys(found)}
    assert {leaf for leaf in leaves if f"`{leaf}`" not in docs and f".{leaf}`" not in docs} <= {
        "layout",
        "memory",
        "communication",
        "schedule",
        "stages",
        "flops_per_token",
        "pipeline_ranks",
    }


def test_contents() -> None:
    found = report_of(TINY)
    assert found["layout"]["axes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "vpp": 2, "ep": 1, "etp": 2}
    assert found["layout"]["groups"]["pp"] == {
        "count": 4,
        "size": 2,
        "complete": True,
        "ranks": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert found["layout"]["ranks"][5] == {"rank": 5, "tp": 1, "cp": 0, "dp": 0, "pp": 1}
    assert sum(stage["layers"] for stage in found["stages"]) == 6
    assert found["schedule"]["name"] == "interleaved"
    assert found["schedule"]["microbatches"] == 8
    assert (found["batch"]["microbatches"], found["batch"]["tokens_per_step"]) == (8, 16 * 256)
    assert (found["batch"]["train_samples"], found["batch"]["train_tokens"]) == (480, 480 * 256)
    assert found["memory"]["fullest_rank"] == 4 * found["memory"]["fullest_pipeline_rank"]
    assert found["model"]["flops_per_step"] == found["model"]["flops_per_token"]["palm"] * 16 * 256
    invocation = parse_arguments(TINY.split())
    assert found["config"] == sectioned(validate(invocation.config, 8, invocation.explicit))


def test_text() -> None:
    text = format_report(report_of(TINY))
    lines = squeezed(text)
    for line in (
        "Layout: 8 ranks = tp 2 x cp 1 x dp 2 x pp 2, order tp-cp-ep-dp-pp",
        "pp 4 of 2 [0 4] [1 5] [2 6] [3 7]",
        "each rank alone: cp, ep",
        "Rank 0 1 2 3 4 5 6 7",
        "dp 0 0 1 1 0 0 1 1",
        "Batch: 1 sequences x 2 data-parallel x 8 microbatches = 16 sequences = 4,096 tokens in a step",
        "run: 30 steps, 480 samples, 122,880 tokens",
    ):
        assert line in lines
    assert "rank 1   . 1F0 1F1 3F0 3B0" in text
    assert max(map(len, text.split("Schedule")[0].splitlines())) <= 120


@pytest.mark.parametrize(
    ("flags", "basis"),
    [
        ("--dp-strategy diloco --sync-interval 10", "mean over 10 steps"),
        ("--optimizer onebit-adam --freeze-step 8", "once frozen"),
        ("--grad-compression uint8 --compression-warmup-steps 5", "after 5 steps"),
        ("--dp-strategy gossip", ""),
        ("--use-distributed-optimizer", ""),
    ],
)
def test_exchanges_that_are_not_alike_in_every_step_are_labelled(flags: str, basis: str) -> None:
    found = report_of(f"{TINY} {flags}")
    rows = [row for row in found["communication"] if row["group"] == "dp-cp"]
    of_replicas = [row for row in rows if row["operation"] != "all-reduce"]
    assert of_replicas and {row["basis"] for row in of_replicas} == {basis}
    others = [row for row in found["communication"] if row not in of_replicas]
    assert others and {row["basis"] for row in others} == {""}
    assert not basis or f" sent, {basis}\n" in format_report(found)


def test_ramp_up_checks_every_batch_size() -> None:
    text = format_report(report_of(f"{TINY} --rampup-batch-size 4 4 100"))
    assert "  ramp-up: 4, 8, ... 16 sequences over 100 samples\n" in text
    # Groups of 4 take the 8 microbatches of the end, but not the 6 on the way.
    with pytest.raises(ConfigError, match="group 4 cannot take 6 microbatches"):
        report_of(
            "--dry-run --num-layers 8 --vocab-size 8 --pp 4 --vpp 2 --rampup-batch-size 4 2 100 --global-batch-size 8 "
            "--microbatch-group-size 4"
        )


def test_trillion_parameters_on_3072_ranks() -> None:
    start = time.perf_counter()
    found = report_of(TRILLION)
    assert time.perf_counter() - start < 10  # about 1 s on an idle core
    assert found["layout"]["groups"]["pp"]["count"] == 48
    assert found["layout"]["ranks"] == [] and not found["layout"]["groups"]["pp"]["complete"]
    assert found["model"]["parameters"] == pytest.approx(1.008e12, rel=1e-3)
    assert found["schedule"]["bubble_fraction"] == pytest.approx(63 / (512 + 63), rel=0.1)
    assert found["schedule"]["grid"] is None
    text = format_report(found)
    assert any(line.startswith("stage 1-62 on pipeline rank 1-62 2 layers 2-125 ") for line in squeezed(text))
    assert len(text.splitlines()) < 45


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dry-run --tp 2 --world-size 3", "world size 3 is not a multiple of tp·pp·cp = 2·1·1 = 2"),
        ("--dry-run", "the size of the vocabulary is not known, and memory depends on it; add --vocab-size"),
        (
            "--dry-run --vocab-size 8 --pp 2 --vpp 2 --num-layers 4 --global-batch-size 3 --pipeline-schedule dualpipe-v",
            "dualpipe-v",
        ),
        ("--dry-run --tokenizer-model nowhere.model", "nowhere.model"),
    ],
)
def test_errors(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        report_of(flags)
    assert message in str(error.value)


def test_default_world_size() -> None:
    assert world_size_of(parse_arguments(["--tp", "2", "--pp", "3", "--cp", "2"])) == 12
    assert world_size_of(parse_arguments(["--tp", "2", "--dp", "5"])) == 10


def test_json_is_the_report() -> None:
    assert json.loads(dry_run(parse_arguments(f"{TINY} --json".split()))) == report_of(TINY)


def test_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from megalite.cli.dry_run import dry_run\n"
        "from megalite.config.flags import parse_arguments\n"
        "print(dry_run(parse_arguments(sys.argv[1:])))"
    )
    done = subprocess.run([sys.executable, "-c", code, *TINY.split()], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("Layout: 8 ranks")
