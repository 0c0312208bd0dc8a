"""examples/extend: each addition trains on one layout, and resumes on another."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.cli.main import main
from tests.docs.execution import in_process
from tests.e2e.forked import train_forked
from tests.e2e.programs import REPOSITORY
from tests.support.ranks import forked_pools

EXTEND = REPOSITORY / "examples" / "extend"
pytestmark = pytest.mark.e2e
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --precision fp64 --device cpu"
STEPS = "--global-batch-size 4 --train-iters 6 --lr 1e-3 --log-interval 1"
MOCK = "--mock-data --vocab-size 64"
BYTES = "--import examples.extend.text_bytes --dataset text-bytes --data-path README.md --vocab-size 256"


def losses(run_dir: Path, kind: str = "train") -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss" if kind == "train" else f"{kind}_loss"] for line in lines if line["kind"] == kind]


def train(ranks: int, run_dir: Path, *flags: str) -> list[float]:
    words = f"{MODEL} {STEPS} {' '.join(flags)} --run-dir {run_dir}".split()
    train_forked(ranks, *words).require_success()
    return losses(run_dir)


def test_examples_are_short() -> None:
    lengths = [len(path.read_text().splitlines()) for path in EXTEND.glob("*.py")]
    assert len(lengths) == 6 and max(lengths) < 60


def test_dataset_resumes_on_another_layout(tmp_path: Path) -> None:
    flags = (BYTES, "--eval-interval 3 --eval-iters 1")
    one = train(1, tmp_path / "one", *flags)
    two = tmp_path / "two"
    saves = f"--save-interval 3 --load {two}/checkpoints --fresh-if-missing"
    first = train(2, two, *flags, saves, "--tp 2 --exit-interval 3")
    again = train(1, two, *flags, saves)
    assert len(first) == 3 and again == pytest.approx(one, rel=1e-9)
    assert losses(two, "valid")[0] == pytest.approx(losses(tmp_path / "one", "valid")[0], rel=1e-9)


def test_layer_generates_text_if_imported(tmp_path: Path) -> None:
    """A checkpoint names its kind of layer, but does not import it; the user must."""
    layer = "--import examples.extend.parallel_block"
    byte_level = "--mock-data --tokenizer-type ByteLevelTokenizer --vocab-size 512 --save-interval 6"
    train(1, tmp_path, f"{layer} --block parallel {byte_level}")
    words = f"generate --load {tmp_path}/checkpoints --prompt ab --max-new-tokens 3 --device cpu".split()
    refused = train_forked(1, *words, command="megalite.cli.main:main")  # the layer has not been imported there
    assert refused.status == 2
    assert "block cannot be 'parallel' (one of gpt; --import MODULE registers others)" in refused.err
    made = in_process(main, [*words, *layer.split()])
    assert made.status == 0, made.err


def test_optimizer_resumes_on_another_layout(tmp_path: Path) -> None:
    """Its state is in the checkpoint: sharded over two ranks, then whole on one."""
    flags = f"--import examples.extend.lion --optimizer lion {MOCK}"
    one = train(1, tmp_path / "one", flags)
    words = f"{MODEL} {STEPS} {flags} --run-dir {tmp_path}/two --dp-strategy distributed-optimizer"
    stop = "--save-interval 3 --exit-interval 3"
    train_forked(2, *words.split(), *stop.split()).require_success()
    assert losses(tmp_path / "two") == pytest.approx(one[:3], rel=1e-9)
    again = train(1, tmp_path / "again", flags, f"--load {tmp_path}/two/checkpoints")
    assert again == pytest.approx(one[3:], rel=1e-9)


def test_loss_resumes_on_another_layout(tmp_path: Path) -> None:
    """Its name is in the checkpoint, so a run without it says so."""
    flags = f"--import examples.extend.smooth_z --loss smooth-z {MOCK} --eval-interval 3 --eval-iters 1"
    one = train(1, tmp_path / "one", flags)
    two = tmp_path / "two"
    saves = f"--save-interval 3 --load {two}/checkpoints --fresh-if-missing"
    assert train(2, two, flags, saves, "--tp 2 --sequence-parallel --exit-interval 3") == pytest.approx(
        one[:3], rel=1e-9
    )
    without = train_forked(1, *f"{MODEL} {STEPS} {MOCK} --load {two}/checkpoints".split())
    assert "other settings than the checkpoint's run had: loss smooth-z -> cross-entropy" in without.out
    assert train(2, two, flags, saves, "--pp 2") == pytest.approx(one, rel=1e-9)
    ours, expected = losses(two, "valid"), losses(tmp_path / "one", "valid")
    assert [ours[0], ours[-1]] == pytest.approx([expected[0], expected[-1]], rel=1e-9)


def test_schedule_and_metrics_writer(tmp_path: Path) -> None:
    flags = f"--import examples.extend.eager_1f1b --pipeline-schedule eager-1f1b {MOCK} --micro-batch-size 1"
    writer = "--import examples.extend.best_loss --metrics best-loss --eval-interval 2 --eval-iters 1"
    one = train(1, tmp_path / "one", flags, writer)
    best = json.loads((tmp_path / "one" / "best.json").read_text())
    assert best["valid_loss"] == min(losses(tmp_path / "one", "valid"))
    assert train(2, tmp_path / "two", flags, "--pp 2 --pipeline-check-memory") == pytest.approx(one, rel=1e-9)


def test_failed_import_ends_all_ranks_at_the_start(tmp_path: Path) -> None:
    words = f"{MODEL} {STEPS} {MOCK} --import examples.extend.tiger --run-dir {tmp_path}/run".split()
    outcome = train_forked(2, *words)
    says = "error: --import examples.extend.tiger cannot be imported: ModuleNotFoundError: No module named"
    assert outcome.status == 2 and all(line.startswith(says) for line in outcome.errors) and outcome.errors
    assert not (tmp_path / "run").exists()


def said(*words: str) -> Any:
    """JSON output of a command."""
    with forked_pools():
        found = in_process(main, " ".join(words).split())
    assert found.status == 0, found.out + found.err
    return json.loads(found.out)


def test_other_commands_know_the_additions() -> None:
    lion = f"--import examples.extend.lion --optimizer lion {MOCK} {MODEL} {STEPS} --json"
    (memory,) = said("train --dry-run", lion)["memory"]["pipeline_ranks"]
    assert memory["optimizer_bytes"] == 8 * memory["parameters"], "one state, of 8 bytes in fp64"
    assert said("config --show", lion)["training"]["imports"] == ["examples.extend.lion"]
    assert said("rehearse", lion)
    loss = f"--import examples.extend.smooth_z --loss smooth-z {MOCK} {MODEL} {STEPS} --tp 2 --json"
    assert said("rehearse", loss)
    (planned,), (usual,) = (
        said("train --dry-run", flags)["memory"]["pipeline_ranks"]
        for flags in (loss, f"{MOCK} {MODEL} {STEPS} --tp 2 --json")
    )
    # Five tensors [16, 1, 64] of 8 bytes without the padding, instead of this rank's 64 of 128 columns.
    assert planned["activation_bytes"] - usual["activation_bytes"] == 16 * 8 * (5 * 64 - 64)
    drawn = "schedule --import examples.extend.eager_1f1b --schedule eager-1f1b --pp 4 --microbatches 8 --json"
    assert "eager-1f1b" in json.dumps(said(drawn))


def test_parity_of_a_layer() -> None:
    """Its ranks are separate processes, which get the config from this one."""
    layer = f"--import examples.extend.parallel_block --block parallel --hidden-dropout 0.1 {MOCK} {MODEL}"
    found = said("parity", layer, "--global-batch-size 4 --tp 2 --sequence-parallel --steps 2 --json")
    assert found["same"]
