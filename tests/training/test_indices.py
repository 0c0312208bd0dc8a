from pathlib import Path

import pytest

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.dataset import GPTDataset
from megalite.data.sources import build_datasets
from megalite.training.setup import is_first_on_node, prepare_indices
from tests.data.token_files import write_by_layout
from tests.support.ranks import RankContext, run_ranks

RANKS, PER_NODE = 4, 2
SAMPLES = 60


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write_by_layout(tmp_path / "d", [[i % 10] * (5 + i) for i in range(40)])
    return tmp_path / "d"


def prepared(context: RankContext, prefix: str, folders: list[str]) -> dict:
    """Two nodes of two ranks, each rank with its cache folder. Ranks 0, 2 and 3 open the data."""
    world = context.topology(dp=RANKS).world
    leads = is_first_on_node(world, node=f"node{context.rank // PER_NODE}")
    notes: list[str] = []
    source, needs, built, samples = None, [], [], []
    if context.rank != 1:
        source = build_datasets(
            DataConfig(data_path=[prefix], split="1", data_cache_path=folders[context.rank] or None),
            seq_length=16,
            seed=1,
            vocab_size=10,
            splits=("train",),
            log=notes.append,
            small_bytes=0,
        ).train
        assert isinstance(source, GPTDataset) and source.cache is not None
        needs = [(source, 0, SAMPLES)]
    try:
        lines = prepare_indices(needs, notes, world=world, leads=leads)
    except ConfigError as error:
        return {"error": str(error)}
    if isinstance(source, GPTDataset) and source.cache is not None:
        built = [kept.built for kept in source.cache.kept]
        samples = [source.sample(k).tolist() for k in range(SAMPLES)]
    return {"leads": leads, "built": built, "lines": lines, "samples": samples}


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(tokens: Path, folders: list[Path | None]) -> list[dict]:
    texts = ["" if folder is None else str(folder) for folder in folders]
    return run_ranks(RANKS, prepared, str(tokens), texts)


def test_indices_in_a_shared_folder_are_built_once(tokens: Path, tmp_path: Path) -> None:
    found = run(tokens, [tmp_path / "c"] * RANKS)
    assert [one["leads"] for one in found] == [True, False, True, False]
    # 40 documents of 980 tokens are 61 samples of 16: one epoch. Node 1 shares rank 0's files.
    assert [one["built"] for one in found] == [[True], [], [False], []]
    assert len(entries(tmp_path / "c")) == 1
    assert found[0]["samples"] == found[2]["samples"] == found[3]["samples"]
    assert all(one["lines"] == [] for one in found)


def test_each_node_builds_indices_in_its_local_folder(tokens: Path, tmp_path: Path) -> None:
    folders: list[Path | None] = [tmp_path / f"node{rank // PER_NODE}" for rank in range(RANKS)]
    found = run(tokens, folders)
    assert [one["built"] for one in found] == [[True], [], [True], []]
    assert entries(tmp_path / "node0") == entries(tmp_path / "node1")
    assert found[0]["samples"] == found[3]["samples"]


def test_unwritable_cache_folder_is_one_error_on_all_ranks(tokens: Path, tmp_path: Path) -> None:
    """All ranks raise it, also if only one node has the fault."""
    (tmp_path / "file").write_text("in the way")
    for folders in ([tmp_path / "file"] * RANKS, [*[tmp_path / "c"] * 2, *[tmp_path / "file"] * 2]):
        errors = {one["error"] for one in run(tokens, list(folders))}
        assert len(errors) == 1 and f"data_cache_path {tmp_path / 'file'}: File exists" in errors.pop()
