"""Which splits a run reads on which ranks, its log lines about them, and where indices are built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megalite.training.setup as setup
from megalite.config.data import DataConfig
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.numbers import parse_byte_size
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.packed_dataset import PackedDataset
from megalite.data.sources import build_datasets
from megalite.data.token_files import encode_side_file
from megalite.tokenizers.build import build_tokenizer
from megalite.topology.group import Group
from megalite.training.setup import Loaders, is_first_on_node, open_data, prepare_indices, resolve, within_device
from tests.data.token_files import write_by_layout
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import TINY, build, tiny_config


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """1000 documents of 4 tokens: 31 for validation, and one for tests, shorter than a sample."""
    write_by_layout(tmp_path / "d", [[1 + i % 90] * 4 for i in range(1000)])
    return str(tmp_path / "d")


def opened(context: RankContext, world: int, **settings: Any) -> Loaders:
    return open_data(build(context, tiny_config(world, eod_mask_loss=False, **settings)), None)


def alone(**settings: Any) -> Loaders:
    return opened(RankContext(0), 1, **settings)


def test_run_without_evaluation_reads_only_the_training_split(prefix: str) -> None:
    loaders = alone(data_path=[prefix])
    assert loaders.train is not None
    assert (loaders.valid, loaders.test, loaders.notes) == (None, None, ())


def test_test_split_is_opened_if_there_is_one(prefix: str) -> None:
    loaders = alone(data_path=[prefix], split="8,1,1", eval_interval=5)
    assert loaders.train and loaders.valid and loaders.test
    assert loaders.test.dataset.documents == range(900, 1000)  # type: ignore[attr-defined]
    loaders = alone(train_data_path=[prefix], valid_data_path=[prefix], eval_interval=5)
    assert loaders.valid and loaders.test is None
    settings = {"train_data_path": [prefix], "valid_data_path": [prefix], "test_data_path": [prefix]}
    for changes, read in (
        ({}, [True, True]),
        ({"valid_data_path": []}, [False, True]),
        ({"eval_iters": 0}, [False, False]),
    ):
        loaders = alone(**{**settings, **changes})
        assert [loaders.valid is not None, loaders.test is not None] == read
    assert alone(data_path=[prefix], split="9,1,0", eval_interval=5).test is None
    assert alone(mock_data=True, eval_interval=5).test is None


def test_ignored_setting_does_not_reach_the_tokenizer() -> None:
    """Megatron-LM's script of Llama 3 has --tiktoken-pattern with a NullTokenizer."""
    ignored = {"tokenizer_type": "NullTokenizer", "tiktoken_pattern": "v2"}
    config = replace(RunConfig(), **TINY, mock_data=True, **ignored)
    _, tokenizer = resolve(config, world_size=1, explicit=frozenset(ignored))
    assert tokenizer is not None and tokenizer.name == "NullTokenizer"


def test_short_default_test_split_is_reported_and_skipped(prefix: str) -> None:
    loaders = alone(data_path=[prefix], eval_interval=5)
    assert loaders.train and loaders.valid and loaders.test is None
    (note,) = loaders.notes
    assert note.startswith("no test loss at the end of the run: ") and "the test split holds 4 tokens" in note
    with pytest.raises(ConfigError, match="the test split holds 4 tokens"):
        alone(data_path=[prefix], split="969,30,1", eval_interval=5)
    with pytest.raises(ConfigError, match="the valid split holds 4 tokens"):
        alone(data_path=[prefix], split="999,1,0", eval_interval=5)


def test_packing_is_described_per_file(prefix: str, tmp_path: Path) -> None:
    write_by_layout(tmp_path / "e", [[1] * 17] * 3)
    loaders = alone(data_path=["1", prefix, "1", str(tmp_path / "e")], split="1", packing="best-fit")
    assert loaders.notes == (
        # 4 documents of 4 tokens in 17, 12 of 16 positions predict
        f"{prefix}: 1000 documents are packed into 250 samples per epoch; 25.00 % of their positions predict nothing",
        f"{tmp_path}/e: 3 documents are packed into 3 samples per epoch; 0.00 % of their positions predict nothing",
    )
    assert loaders.train is not None and loaders.train.packed and loaders.train.find_documents
    (batch, *_) = loaders.train.load(0, 8)
    assert batch.document_starts in (((0, 4, 8, 12, 15),), ((0,),))


def test_padding_is_the_end_of_document_if_known(prefix: str) -> None:
    def pad(**settings: Any) -> int:
        config = tiny_config(1, data_path=[prefix], split="1", packing="best-fit", **settings)
        loaders = open_data(build(RankContext(0), config), build_tokenizer(config.data, 93))
        assert loaders.train is not None and isinstance(loaders.train.dataset, PackedDataset)
        return loaders.train.dataset.pad_token

    assert pad() == 0
    assert pad(tokenizer_type="NullTokenizer") == 92


def test_middle_stages_open_no_file(prefix: str) -> None:
    settings = {"data_path": [prefix], "split": "1"}
    counts = run_ranks(4, opens, settings)
    assert counts == [(1, True), (0, False), (0, False), (1, True)]
    # Each of these settings hides documents from each other.
    assert run_ranks(4, opens, {**settings, "packing": "best-fit"}) == [(1, True)] * 4


def opens(context: RankContext, settings: dict[str, Any]) -> tuple[int, bool]:
    paths: list[str] = []
    make = IndexedDataset.__init__

    def noted(self: IndexedDataset, path: Any, *more: Any, **named: Any) -> None:
        paths.append(str(path))
        make(self, path, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexedDataset, "__init__", noted)
        loaders = opened(context, 4, pp=4, **settings)
    return len(paths), loaders.train is not None


def test_data_error_of_one_rank_is_raised_on_all(prefix: str) -> None:
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])
    for path, said in ((prefix + "x", "do not exist"), (prefix, "truncated: 7998 bytes, expected 8000")):
        found = run_ranks(3, fault, {"data_path": [path], "num_layers": 3})
        assert len(set(found)) == 1 and said in found[0]


def test_io_error_is_a_config_error(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*settings: Any, **named: Any) -> None:
        raise OSError(5, "Input/output error", "d.idx")

    monkeypatch.setattr(setup, "open_run_datasets", fails)
    with pytest.raises(ConfigError, match=r"^cannot read d\.idx: Input/output error$"):
        alone(data_path=[prefix])


def fault(context: RankContext, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        opened(context, 3, pp=3, **settings)
    return str(error.value)


def test_tokenizer_of_other_data_is_refused_on_all_ranks(prefix: str) -> None:
    """Also on middle stages, which open no file."""
    facts = {"documents": 1000, "tokens": 4000, "dtype": "uint16"}
    made_with = {"kind": "ByteLevelTokenizer", "sha256": "0" * 64}
    Path(f"{prefix}.json").write_bytes(encode_side_file({**facts, "tokenizer": made_with}))
    found = run_ranks(4, refusal, {"data_path": [prefix], "tokenizer_type": "NullTokenizer"})
    assert len(set(found)) == 1
    assert found[0].startswith(
        f"{prefix}.bin was made with another tokenizer: ByteLevelTokenizer (sha256 000000000000...)"
    )


def refusal(context: RankContext, settings: dict[str, Any]) -> str:
    config = tiny_config(4, pp=4, **settings)
    with pytest.raises(ConfigError) as error:
        open_data(build(context, config), build_tokenizer(config.data, 93))
    return str(error.value)


def test_auto_schedule_fits_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest, said = 2**20, list[str]()

    class Unequal(Group):
        def gather_json(self, value: Any) -> list[Any]:
            return [value, smallest]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))

    def limited(device: str = "cuda", **settings: Any) -> str | None:
        config = validate(tiny_config(2, pp=2, **settings), 2)
        world = Unequal("world", (0,), 0, device=torch.device(device))
        found = within_device(config, world=world, log=said.append)
        return found.parallel.pipeline_memory_limit

    assert limited() is limited("cpu", pipeline_schedule="auto") is None
    assert limited(pipeline_schedule="auto", pipeline_memory_limit="1GiB") == "1GiB"
    room = parse_byte_size(limited(pipeline_schedule="auto") or "")
    assert 0 < (room or 0) < 0.9 * 2**20
    smallest = 2**29
    assert limited(pipeline_schedule="auto") is None  # fits as it is
    end = " on GPUs with 1.00 MiB; --pipeline-memory-limit sets another limit"
    assert [line.endswith(end) for line in said] == [True]


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
