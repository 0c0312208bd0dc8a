"""Small jobs on texts of numbers, with the numbers as token ids."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.config.data import DataConfig
from megalite.data.indexed_dataset import IndexedDataset
from megalite.preprocess.job import PreprocessJob, Progress
from megalite.preprocess.run import preprocess

NUMBERS = DataConfig(tokenizer_type="NullTokenizer")
NUMBER_FLAGS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000")
SUFFIXES = (".bin", ".idx", ".json")


class Stop(BaseException):
    """Ends a run, as a signal does."""


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_numbers(path: Path, count: int, first: int = 0) -> Path:
    """Write `count` documents of one to five numbers below 1000."""
    return write_jsonl(
        path, [" ".join(str(i * k % 1000) for k in range(i % 5 + 1)) for i in range(first, first + count)]
    )


def number_job(folder: Path, *inputs: Path | str, **settings: object) -> PreprocessJob:
    """A job that writes texts of numbers to folder/out_text_document and saves its state after every piece."""
    given = {"vocab_size": 1000, "checkpoint_seconds": 0.0} | settings
    return PreprocessJob(
        inputs=tuple(map(str, inputs)),
        output_prefix=str(folder / "out"),
        tokenizer=NUMBERS,
        **given,  # type: ignore[arg-type]
    )


def run_numbers(folder: Path, *inputs: Path | str, **settings: object) -> Progress:
    return preprocess(number_job(folder, *inputs, **settings))


def stop_after(documents: int) -> Callable[[Progress], None]:
    """Stop the run after a number of documents."""

    def check(progress: Progress) -> None:
        if progress.documents >= documents:
            raise Stop

    return check


def documents(folder: Path, key: str = "text") -> list[list[int]]:
    return [document.tolist() for document in IndexedDataset(folder / f"out_{key}_document")]


def output_bytes(folder: Path, key: str = "text") -> list[bytes]:
    """Contents of the three output files."""
    return [(folder / f"out_{key}_document{suffix}").read_bytes() for suffix in SUFFIXES]
