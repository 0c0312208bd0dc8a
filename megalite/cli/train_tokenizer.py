"""`megalite train-tokenizer`: train a tokenizer on a corpus; and the tokenizer that the flags of other commands name."""

from argparse import Namespace
from pathlib import Path

from megalite.cli.display import ByteProgress, decimal_bytes
from megalite.cli.model_commands import BYTE_LEVEL, KINDS, SENTENCEPIECE, TRAIN_TOKENIZER
from megalite.cli.output import show
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.train_tokenizer import TrainingText, train_byte_level, train_sentencepiece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

_OTHER_KINDS = {
    "gptsentencepiecetokenizer": "SentencePieceTokenizer",
    "llama3tokenizer": "HuggingFaceTokenizer",
    "qwentokenizer": "HuggingFaceTokenizer",
}
"""Other names that scripts have, in lower case, of kinds that give the same ids."""
_ADDS_START = "llama2tokenizer"

main = TRAIN_TOKENIZER


def tokenizer_config(flags: Namespace) -> DataConfig:
    """The settings of the flags that name a tokenizer."""
    names = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    kind = None if flags.tokenizer_type is None else tokenizer_kind(flags.tokenizer_type)
    return DataConfig(tokenizer_type=kind, **{name: getattr(flags, name) for name in names})


def tokenizer_kind(name: str) -> str:
    """The kind that a script means, in upper or lower case."""
    known = {kind.lower(): kind for kind in KINDS} | _OTHER_KINDS
    if name.lower() in known:
        return known[name.lower()]
    if name.lower() == _ADDS_START:
        raise ConfigError(
            f"--tokenizer-type {name} would put <s> before each document; use SentencePieceTokenizer, which adds nothing"
        )
    raise ConfigError(f"--tokenizer-type {name} is unknown{nearest(name, KINDS)} (one of {', '.join(KINDS)})")


def run(flags: Namespace) -> int:
    text, path = _train(flags)
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(path)), None)
    assert tokenizer is not None
    _report(text, path, tokenizer)
    return 0


def _train(flags: Namespace) -> tuple[TrainingText, Path]:
    if flags.max_megabytes * 1e6 < 1:
        raise ConfigError(f"max_megabytes {flags.max_megabytes} is no amount of text; try --max-megabytes 20")
    if flags.pattern is not None and flags.type != BYTE_LEVEL:
        raise ConfigError(f"{flags.type} does not read pattern ({flags.pattern}); use --type {BYTE_LEVEL}")
    inputs = find_inputs(flags.input)
    most = int(flags.max_megabytes * 1e6)
    # On the disk a corpus may be longer than its text, or shorter where it is compressed.
    progress = ByteProgress(min(most, sum(item.size or most for item in inputs)))
    text = TrainingText(inputs, flags.json_keys, most, progress.advance)
    wanted = {"output_prefix": flags.output_prefix, "vocab_size": flags.vocab_size}
    try:
        if flags.type == BYTE_LEVEL:
            return text, train_byte_level(text, words=flags.pattern or "gpt2", **wanted)
        return text, train_sentencepiece(text, model_type=SENTENCEPIECE[flags.type], **wanted)
    finally:
        progress.end()


def _report(text: TrainingText, path: Path, tokenizer: Tokenizer) -> None:
    spread = " (a share that is spread evenly over the inputs; see --max-megabytes)" if text.is_share else ""
    bad = f", {text.bad} bad lines left out" if text.bad else ""
    show(f"read {decimal_bytes(text.num_bytes)} of text in {text.documents} documents{spread}{bad}")
    held = text.held_out
    if held:
        num_bytes = sum(len(document.encode("utf-8")) for document in held)
        tokens = sum(len(ids) for ids in tokenizer.encode_batch(held))
        share = f"{num_bytes / max(tokens, 1):.2f} bytes per token on {decimal_bytes(num_bytes)}"
        show(f"{share} in {len(held)} documents that were held out")
    else:
        show("too few documents to hold some out: bytes per token are not measured")
    show(f"{path}: {tokenizer.vocab_size} pieces; use it with --tokenizer-model {path}")
