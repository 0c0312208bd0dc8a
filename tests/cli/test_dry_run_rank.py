"""`--dry-run --rank`: its keys, its text, its errors. tests/planner/test_meta_modules.py compares it with real modules."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.dry_run import dry_run
from megalite.cli.train import main
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.partition import stages
from tests.cli.test_dry_run import report_of, squeezed

TINY = (
    "--dry-run --num-layers 6 --hidden-size 64 --vocab-size 500 --global-batch-size 16 --bf16 --tp 2 --pp 2 --vpp 2 "
    "--world-size 8"
)
MOE = (
    "--dry-run --preset mixtral-8x7b --vocab-size 32000 --bf16 --tp 4 --etp 1 --ep 8 --cp 2 --pp 4 --world-size 102400 "
    "--global-batch-size 51200"
)
HUGE = (
    "--dry-run --preset gpt-1t --bf16 --tp 8 --pp 64 --vpp 2 --world-size 99840 --global-batch-size 24960 "
    "--dp-strategy distributed-optimizer"
)


def rank_of(flags: str) -> dict[str, Any]:
    found = json.loads(dry_run(parse_arguments(f"{flags} --json".split())))
    assert isinstance(found, dict)
    return found


def test_keys_are_the_documented_ones() -> None:
    found = rank_of(f"{TINY} --rank 5")
    docs = (Path(__file__).parents[2] / "docs" / "dry-run.md").read_text(encoding="utf-8")
    section = docs[docs.index("--rank") :]
    assert list(found) == [
        *("rank", "world_size", "coordinate", "groups", "stages", "parameters", "buckets", "memory"),
        *("communication", "schedule", "actions"),
    ]
    rows = [*found["groups"].values(), *(found[key][0] for key in ("stages", "parameters", "buckets"))]
    for key in {*found, *found["coordinate"], *found["memory"], *(key for row in rows for key in row)}:
        assert any(f"`{key}{end}" in section for end in ("`", "[]`", ".KIND`")), key


def test_contents() -> None:
    found, whole = rank_of(f"{TINY} --rank 5"), report_of(TINY)
    assert found["coordinate"] == {"tp": 1, "cp": 0, "dp": 0, "pp": 1, "ep": 0, "etp": 1, "edp": 0}
    assert found["groups"]["pp"] == {"index": 1, "size": 2, "ranks": [1, 5]}
    assert [row["stage"] for row in found["stages"]] == [1, 3]
    for row in whole["stages"]:
        if row["pipeline_rank"] == 1:
            mine = [held for held in found["parameters"] if held["stage"] == row["stage"]]
            assert sum(held["bytes"] for held in mine) == 2 * row["parameters_per_rank"]
    # Rows 256 to 511 of the padded vocabulary, in the copy that the head works with.
    (word,) = [row for row in found["parameters"] if row["name"] == "embedding.word.weight"]
    assert (word["slice"], word["shape"], word["global_shape"]) == ([[256, 512], [0, 64]], [256, 64], [512, 64])
    planned = whole["memory"]["pipeline_ranks"][1]
    assert found["memory"]["activation_bytes"] == planned["activation_bytes"]
    # Padding alone is more: less than 64 elements a bucket and replica.
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert planned[part] <= found["memory"][part] <= planned[part] + len(found["buckets"]) * 128 * 12
    assert found["communication"] == [row for row in whole["communication"] if row["pipeline_rank"] == 1]
    kinds = [action.strip("0123456789") for action in found["actions"]]
    assert (kinds.count("F"), kinds.count("B"), kinds.count("REDUCE_GRAD")) == (16, 16, 2)


def test_text() -> None:
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
        "layers.16-23.moe.experts.down.weight 1 x 4096 x 14336 bf16 112.00 MiB [5:6] of 8 along 0, each of 8 layers"
    )
    actions = text[text.index("Actions of a step: 1f1b, 16 microbatches: 16 RECV_F, 16 F, 16 SEND_F") :]
    assert " 2RECV_F0 2RECV_F1 2F0 2SEND_F0 " in actions and " more ... " in actions
    assert actions.endswith(" 2REDUCE_GRAD")
    assert max(map(len, text.splitlines())) <= 140


def test_one_rank_alone() -> None:
    flags = ["--dry-run", "--num-layers", "2", "--vocab-size", "100", "--rank", "0"]
    text = dry_run(parse_arguments(flags))
    assert text.startswith("Rank 0 of 1: tp 0, cp 0, dp 0, pp 0\n  alone in: world, tp, ")
    assert "Communication" not in text
    assert text.endswith("1 F, 1 B, 1 REDUCE_GRAD\n  0F0 0B0 0REDUCE_GRAD")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{TINY} --rank 8",
            "rank is 8, but a world of 8 has the ranks 0 to 7; use --rank 7, or a --world-size above 8",
        ),
        (f"{TINY} --rank -1", "--rank takes a whole number of at least 0, such as 4, got -1"),
        (f"{TINY} --rank one", "--rank takes a whole number of at least 0, such as 4, got one"),
        ("--rank 1", "--rank has no effect without --dry-run; add --dry-run or remove it"),
        (f"{TINY} --rank 1 --rank 2", "--rank is given twice: 1 and 2; keep one of them"),
    ],
)
def test_errors(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        dry_run(parse_arguments(flags.split()))
    assert str(error.value) == message


def test_a_hundred_thousand_ranks_are_not_gone_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is the same for all is found once: the cut into stages, which everything asks for."""
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
