"""Test the dry run of all ranks and of one: JSON keys, text, errors and speed."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.dry_run import dry_run, format_report, report, world_size_of
from megalite.cli.train import main
from megalite.config.describe import sectioned
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.validate import validate
from megalite.partition import stages
from megalite.partition.memory import USUAL_MEMORY, within_memory

SMALL = "--num-layers 6 --hidden-size 64 --vocab-size 512 --train-iters 30 --global-batch-size 16 --bf16"
TINY = f"--dry-run {SMALL} --tp 2 --pp 2 --vpp 2 --world-size 8"
TRILLION = (
    "--dry-run --preset gpt-1t --tp 8 --pp 64 --world-size 3072 --global-batch-size 3072 --bf16 --sequence-parallel "
    "--recompute-granularity full"
)


MOE = (
    "--dry-run --preset mixtral-8x7b --vocab-size 32000 --bf16 --tp 4 --etp 1 --ep 8 --cp 2 --pp 4 --world-size 102400 "
    "--global-batch-size 51200"
)
HUGE = (
    "--dry-run --preset gpt-1t --bf16 --tp 8 --pp 64 --vpp 2 --world-size 99840 --global-batch-size 24960 "
    "--dp-strategy distributed-optimizer"
)


def report_of(flags: str) -> dict[str, Any]:
    invocation = parse_arguments(flags.split())
    return report(invocation.config, world_size_of(invocation), invocation.explicit)


def squeezed(text: str) -> list[str]:
    """Return the lines with runs of spaces collapsed."""
    return [" ".join(line.split()) for line in text.splitlines()]


def keys(tree: Any, prefix: str = "") -> set[str]:
    """Return the paths of all keys; `[]` stands for list elements."""
    if isinstance(tree, dict):
        return {path for key, value in tree.items() for path in {f"{prefix}{key}", *keys(value, f"{prefix}{key}.")}}
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return keys(tree[0], prefix.removesuffix(".") + "[].")
    return set()


def test_auto_names_the_smallest_device_with_this_schedule() -> None:
    flags = f"--dry-run {SMALL} --pp 4 --pipeline-schedule auto"
    found = report_of(flags)
    least, config = found["schedule"]["device_bytes"], parse_arguments(flags.split()).config
    config = validate(config, 4)
    assert within_memory(config, USUAL_MEMORY * least) is config
    assert within_memory(config, USUAL_MEMORY * (least - 2)).parallel.pipeline_memory_limit is not None
    assert "GPUs with less than" in format_report(found)
    assert "GPUs with less than" not in format_report(report_of(f"{flags} --pipeline-memory-limit 1GiB"))


def test_flops_equal_the_paper() -> None:
    """96·B·s·L·h²·(1 + s/6h + V/16Lh) is the numerator of Narayanan et al. 2021."""
    batch, s, layers, h, vocabulary = 3072, 2048, 128, 25600, 51200
    published = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    found = report_of(TRILLION)["model"]
    assert found["flops_per_step_with_recompute"] == pytest.approx(published, rel=1e-12)
    assert found["flops_per_step"] == pytest.approx(
        72 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * layers * h)), rel=1e-12
    )
    selective = report_of(TRILLION.replace("full", "selective"))["model"]["flops_per_step_with_recompute"]
    assert selective - found["flops_per_step"] == batch * s * layers * 4 * s * h  # scores and values once more


def test_json_keys_are_stable() -> None:
    found = report_of(TINY)
    kinds = set(found["layout"].pop("groups"))
    found.pop("config")
    assert {"tp", "cp", "dp", "pp", "model", "embedding", "ep", "expert-tp", "expert-dp"} <= kinds
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
        memory.pipeline_ranks[].workspace_bytes memory.pipeline_ranks[].total_bytes memory.pipeline_ranks[].host_bytes
        communication communication[].pipeline_rank communication[].group communication[].size
        communication[].operation communication[].volume_bytes communication[].sent_bytes
        communication[].basis
        schedule schedule.name schedule.virtual_stages schedule.microbatches schedule.all_microbatch_counts
        schedule.bubble_fraction schedule.costs schedule.peak_activations schedule.grid schedule.device_bytes
        batch batch.micro_batch_size batch.dp batch.microbatches batch.global_batch_size batch.seq_length
        batch.tokens_per_step batch.batch_sizes batch.rampup_samples batch.train_steps batch.train_samples
        batch.train_tokens batch.seq_length_warmup
        model model.parameters model.padded_vocab_size model.flops_per_token model.flops_per_token.palm
        model.flops_per_token.megatron model.flops_per_token.with_recompute model.flops_per_step
        model.flops_per_step_with_recompute"""
    assert keys(found) == set(expected.split())
    docs = (Path(__file__).parents[2] / "docs" / "dry-run.md").read_text(encoding="utf-8")
    leaves = {path.split(".")[-1].removesuffix("[]") for path in keys(found)}
    assert {leaf for leaf in leaves if f"`{leaf}`" not in docs and f".{leaf}`" not in docs} <= set(
        ["layout", "memory", "communication", "schedule", "stages", "flops_per_token", "pipeline_ranks"]
    )


def test_text_output() -> None:
    text = format_report(report_of(TINY))
    lines = squeezed(text)
    for line in (
        "Layout: 8 ranks = tp 2 x cp 1 x dp 2 x pp 2, order tp-cp-ep-dp-pp",
        "pp 4 of 2 [0 4] [1 5] [2 6] [3 7]",
        "each rank alone: cp, ep",
        "Rank 0 1 2 3 4 5 6 7",
        "dp 0 0 1 1 0 0 1 1",
        "Batch: 1 sequences x 2 data-parallel x 8 microbatches = 16 sequences = 4,096 tokens per step",
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
def test_varying_communication_is_labelled(flags: str, basis: str) -> None:
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
    text = format_report(
        report_of("--dry-run --num-layers 8 --vocab-size 8 --seq-length 8 --step-batch-size-schedule 0:4 800:8")
    )
    assert "  ramp-up: 4, 8 sequences over 100 samples\n" in text
    # Groups of 4 take the 8 microbatches of the end, but not the 6 on the way.
    with pytest.raises(ConfigError, match="group 4 cannot take 6 microbatches"):
        report_of(
            "--dry-run --num-layers 8 --vocab-size 8 --pp 4 --vpp 2 --rampup-batch-size 4 2 100 --global-batch-size 8 "
            "--microbatch-group-size 4"
        )


def test_default_world_size_follows_the_layout() -> None:
    assert world_size_of(parse_arguments(["--tp", "2", "--pp", "3", "--cp", "2"])) == 12
    assert world_size_of(parse_arguments(["--tp", "2", "--dp", "5"])) == 10


def rank_of(flags: str) -> dict[str, Any]:
    found = json.loads(dry_run(parse_arguments(f"{flags} --json".split())))
    assert isinstance(found, dict)
    return found


def test_keys_of_a_rank_are_documented() -> None:
    found = rank_of(f"{TINY} --rank 0")
    docs = (Path(__file__).parents[2] / "docs" / "dry-run.md").read_text(encoding="utf-8")
    section = docs[docs.index("--rank") :]
    assert list(found) == [
        *("rank", "world_size", "coordinate", "groups", "stages", "parameters", "buckets", "memory"),
        *("communication", "schedule", "actions"),
    ]
    rows = [*found["groups"].values(), *(found[key][0] for key in ("stages", "parameters", "buckets"))]
    for key in {*found, *found["coordinate"], *found["memory"], *(key for row in rows for key in row)}:
        assert any(f"`{key}{end}" in section for end in ("`", "[]`", ".KIND`")), key


def test_text_output_of_a_rank() -> None:
    text = dry_run(parse_arguments(f"{MOE} --rank 51237".split()))
    for line in (
        "Rank 51237 of 102400: tp 1, cp 1, dp 4, pp 2; of the experts ep 5, etp 0, edp 4",
        "ep 5 of 8 [51232 51233 51234 51235 51236 51237 51238 51239]",
        "alone in: expert-tp",
        "chunk 0: stage 2 layers 16-23",
        "Parameters: 56, 2.78 GiB",
    ):
        assert line in squeezed(text)
    (row,) = [line for line in text.splitlines() if "experts.down" in line and "each" in line]
    assert " ".join(row.split()) == (
        "layers.{16..23}.moe.experts.down.weight 1 x 4096 x 14336 bf16 112.00 MiB [5:6] of 8 along 0, each of 8 layers"
    )
    actions = text[text.index("Actions per step: 1f1b, 16 microbatches: 16 RECV_F, 16 F, 16 SEND_F") :]
    assert " 2RECV_F0 2RECV_F1 2F0 2SEND_F0 " in actions and " more ... " in actions
    assert actions.endswith(" 2REDUCE_GRAD")
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{TINY} --rank 8", "rank is 8, but a world of 8 has the ranks 0 to 7; use --rank 7"),
        (f"{TINY} --rank -1", "--rank takes a whole number of at least 0, such as 4, got -1"),
        (f"{TINY} --rank one", "--rank takes a whole number of at least 0, such as 4, got one"),
        ("--rank 1", "--rank has no effect without --dry-run; add --dry-run or remove it"),
        (f"{TINY} --rank 1 --rank 2", "--rank is given twice: 1 and 2; keep one of them"),
    ],
)
def test_invalid_ranks_are_errors(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        dry_run(parse_arguments(flags.split()))
    assert str(error.value) == message


def test_dry_run_does_not_enumerate_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Shared results, such as the split into stages, are computed once."""
    cuts: list[int] = []
    partition = stages.partition_layers

    def counting(num_layers: int, *args: Any, **settings: Any) -> tuple[int, ...]:
        cuts.append(num_layers)
        return partition(num_layers, *args, **settings)

    monkeypatch.setattr(stages, "partition_layers", counting)
    stages._partition.cache_clear()
    assert main(HUGE.split()) == 0
    assert cuts == [128]
    text = capsys.readouterr().out
    assert "tp 12480 of 8 [0 1 2 3 4 5 6 7] [8 9 10" in " ".join(text.split())
    assert " 512 of 195 [0 8 16 24 ... 1552] [1 9 17 25 ... 1553] " in " ".join(text.split())
    assert main([*HUGE.split(), "--rank", "99839"]) == 0
    assert capsys.readouterr().out.startswith("Rank 99839 of 99840: tp 7, cp 0, dp 194, pp 63\n")


def test_json_contents() -> None:
    found = report_of(TINY)
    assert found["layout"]["groups"]["pp"]["ranks"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found["layout"]["ranks"][5] == {"rank": 5, "tp": 1, "cp": 0, "dp": 0, "pp": 1}
    assert [(each["pipeline_rank"], each["layers"]) for each in found["stages"]] == [(0, 2), (1, 2), (0, 1), (1, 1)]
    assert (found["schedule"]["microbatches"], found["schedule"]["virtual_stages"]) == (8, 4)
    invocation = parse_arguments(TINY.split())
    assert found["config"] == sectioned(validate(invocation.config, 8, invocation.explicit))
