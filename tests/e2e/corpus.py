"""A small corpus, prepared by the same commands that a user would run."""

from pathlib import Path

from megalite.cli.model_commands import PREPROCESS, TRAIN_TOKENIZER
from tests.docs.execution import in_process, run_script
from tests.e2e.programs import REPOSITORY, Corpus


def build_corpus(folder: Path, *, megabytes: float) -> Corpus:
    """Write text of Python's documentation of the given size, a tokenizer of 384 ids, and token files."""
    text, tokenizer, prefix = folder / "corpus.jsonl", folder / "tokenizer.model", folder / "corpus"
    builder = REPOSITORY / "examples" / "quickstart" / "build_corpus.py"
    learn = ("--input", text, "--output-prefix", tokenizer.with_suffix(""), "--vocab-size", 384)
    words = ("--input", text, "--output-prefix", prefix, "--tokenizer-model", tokenizer, "--append-eod")
    for program, arguments in (
        (run_script, (builder, "--output", text, "--max-megabytes", megabytes)),
        (TRAIN_TOKENIZER, learn),
        (PREPROCESS, words),
    ):
        said = in_process(program, [str(word) for word in arguments])
        assert said.status == 0, said.out + said.err
    return Corpus(jsonl=text, tokenizer=tokenizer, prefix=Path(f"{prefix}_text_document"))
