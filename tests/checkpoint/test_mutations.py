"""Damage to the newest checkpoint of a run is always detected and named, and the previous checkpoint is used."""

import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megalite.cli.inspect import DAMAGED
from megalite.cli.model_commands import INSPECT as inspect_main
from megalite.config.errors import CheckpointError
from megalite.optimizers.schedules import Progress
from megalite.parity.pool import RankContext
from megalite.training.resume import load
from megalite.training.saving import save
from tests.checkpoint.mutations import COUNTS, MANIFEST, Mutation, Place, edit_manifest, of_another_run, swap_files
from tests.checkpoint.samples import find
from tests.support.ranks import run_ranks
from tests.support.tiny import Runner, build, tiny_config

RUN = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "precision": "bf16",
    "dp_strategy": "distributed-optimizer",
}
OLDER, NEWEST = 1, 2
FILES = [MANIFEST, *(f"{kind}-{rank:05d}.safetensors" for kind in ("weights", "optimizer") for rank in (0, 1))]

REASONS = re.compile(
    r"(?P<file>[\w.-]+): (sha256 is [0-9a-f]{12}\.\.\., the manifest says|\d+ bytes long, the manifest says \d+"
    r"|No such file or directory|not a plain file|does not match its own sha256|not valid JSON|'utf-8' codec"
    r"|the key .* appears twice|is of step \d+)"
)
"""A file and its fault, as in log lines."""


@dataclass(frozen=True)
class Runs:
    """A run of two steps on two ranks with both checkpoints, and the same with another seed."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "run"

    @property
    def newest(self) -> Path:
        return self.folder / "step-0000002"

    def place(self, name: str) -> Place:
        foreign = self.root / "foreign" / "step-0000002"
        return Place(self.newest / name, self.folder / "step-0000001", foreign)


def train(context: RankContext, root: str) -> None:
    for name, seed in (("run", 1), ("foreign", 2)):
        runner = Runner(build(context, tiny_config(2, **RUN, dp=2, seed=seed)))
        for _ in range(2):
            runner.step()
            save(runner.replica, Path(root, name), runner.progress, tokenizer=None)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    run_ranks(2, train, str(root))
    assert sorted(path.name for path in (root / "run" / "step-0000002").iterdir()) == sorted(FILES)
    return root


@pytest.fixture
def runs(pristine: Path, tmp_path: Path) -> Runs:
    shutil.copytree(pristine, tmp_path / "runs")
    return Runs(tmp_path / "runs")


def restore(pristine: Path, runs: Runs) -> None:
    shutil.rmtree(runs.newest)
    shutil.copytree(pristine / "run" / "step-0000002", runs.newest)


def damaged_files(place: Place, mutation: Mutation) -> set[str]:
    """Files that the message may name: either of two swapped files; for another run's manifest, any file that does not match it."""
    if mutation is swap_files or (mutation is of_another_run and place.path.name == MANIFEST):
        return set(FILES)
    return {MANIFEST if mutation is edit_manifest else place.path.name}


@pytest.mark.parametrize("mutation", COUNTS, ids=lambda mutation: mutation.__name__)
def test_damage_is_detected(pristine: Path, runs: Runs, mutation: Mutation, capsys: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(mutation.__name__)
    for number in range(COUNTS[mutation]):
        place = runs.place(FILES[number % len(FILES)])
        mutation(place, choose)
        lines: list[str] = []
        checkpoint = find(runs.folder, log=lines.append)
        assert checkpoint.manifest.step == OLDER, (number, place.path)
        assert len(lines) == 1 and "step-0000002" in lines[0]
        named = REASONS.search(lines[0])
        assert named and named["file"] in damaged_files(place, mutation), lines
        if not number % 10:
            with pytest.raises(CheckpointError, match=r"step 2 is damaged: .*" + re.escape(named["file"])):
                find(runs.folder, step=NEWEST)
            assert inspect_main([str(runs.folder)]) == inspect_main([str(runs.newest)]) == DAMAGED
            assert named["file"] in capsys.readouterr().out
        restore(pristine, runs)
    assert find(runs.folder).manifest.step == NEWEST


@pytest.mark.parametrize("content", [None, b"", b"\0" * 13, b"step-0000001\n", b"step-9999999\n", b"../../etc\n"])
def test_newest_is_found_without_latest(runs: Runs, content: bytes | None) -> None:
    """The file is for users only: the newest checkpoint is found whatever it contains."""
    latest = runs.folder / "latest"
    assert latest.read_bytes() == b"step-0000002\n"
    if content is None:
        latest.unlink()
    else:
        latest.write_bytes(content)
    lines: list[str] = []
    assert find(runs.folder, log=lines.append).manifest.step == NEWEST and lines == []


def test_run_resumes_from_the_previous_checkpoint(pristine: Path, runs: Runs) -> None:
    """By the trainer's own resume, on one rank instead of two: the log names the file, and the weights are those of step 1."""
    replica = build(RankContext(0), tiny_config(1, **{**RUN, "dp_strategy": "all-reduce"}))
    weights = [shard.bucket.data for shard in replica.strategy.shards]

    def resume(folder: Path, lines: list[str]) -> Progress:
        for data in weights:
            data.fill_(7.0)
        return load(replica, folder, tokenizer=None, log=lines.append)

    shutil.copytree(runs.folder / "step-0000001", runs.root / "alone" / "step-0000001")
    assert resume(runs.root / "alone", []).step == OLDER
    expected = [data.clone() for data in weights]
    assert resume(runs.folder, []).step == NEWEST
    assert not any(map(torch.equal, weights, expected))
    for number, mutation in enumerate(COUNTS):
        place = runs.place(FILES[number % len(FILES)])
        mutation(place, random.Random(number))
        lines: list[str] = []
        assert resume(runs.folder, lines).step == OLDER
        assert all(map(torch.equal, weights, expected)), mutation
        named = REASONS.search(lines[0])
        assert named and named["file"] in damaged_files(place, mutation), lines
        restore(pristine, runs)
