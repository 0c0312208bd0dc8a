"""`AutoTokenizer` gives the ids of the tokenizer that a model was trained with, for all kinds of tokenizer files."""

import dataclasses
import io
import json
import pydoc_data.topics
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megalite.conversion.huggingface.tokenizer import export_tokenizer, parse_sentencepiece, sentencepiece_json
from megalite.conversion.weights import ConversionError
from megalite.preprocess.train_tokenizer import train_sentencepiece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.subword import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer

TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())][:60]
ROOT = Path(__file__).parents[3]
# A special token spelled out in a text is special to transformers and plain text to megalite.
SPELLED = re.compile(r"<\|\w+\|>|</?s>|<unk>|<eos>")
READ = [SPELLED.sub("", path.read_text(encoding="utf-8")) for path in sorted((ROOT / "docs").glob("*.md"))[:3]]
AWKWARD = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\tif x:\r\n\t\treturn\n",
    "naïve café ½ 日本語 🙂👩‍👩‍👧 العربية",
    "1234567890 3.14e-10 0xdeadbeef",
    "=" * 61 + " " * 45 + "\n" * 50 + "-----|---|--",
]
SETTINGS = "tokenizer_config.json"
RUN = re.compile(r"(.)\1{3}")


def loaded(files: dict[str, bytes], folder: Path, model_type: str = "llama") -> Any:
    from transformers import AutoTokenizer

    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    # It also looks up the model, in case it has its own tokenizer class.
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def assert_same_ids(theirs: Any, ours: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = ours.encode(text)
        assert theirs(text, verbose=False)["input_ids"] == ids, text[:60]
        assert theirs.decode(ids) == ours.decode(ids), text[:60]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    folder = tmp_path_factory.mktemp("trained")
    train_sentencepiece(TEXTS, output_prefix=folder / "ours", vocab_size=1000)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=1000, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder), "my")
    bpe.save(str(folder / "whole.json"))
    return folder


def sentencepiece_of(path: Path, **how: Any) -> Path:
    model = io.BytesIO()
    settings = {"vocab_size": 600, "minloglevel": 2, "num_threads": 2, "max_sentence_length": 1 << 20, **how}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS[:40]), model_writer=model, **settings)
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen3", "mixtral"])
def test_sentencepiece_trained_by_megalite(trained: Path, tmp_path: Path, model_type: str) -> None:
    """Under every family, as some tokenizer classes would change it."""
    exported = export_tokenizer([trained / "ours.model"], 64, "llama")
    assert exported.files.keys() == {"tokenizer.model", "tokenizer.json", SETTINGS}
    assert exported.files["tokenizer.model"] == (trained / "ours.model").read_bytes()
    theirs = loaded(exported.files, tmp_path / "to", model_type)
    ours = SentencePieceTokenizer(trained / "ours.model")
    assert_same_ids(theirs, ours, AWKWARD if model_type != "llama" else [*TEXTS, *READ, *AWKWARD])
    assert theirs.eos_token_id == ours.eod == exported.token_ids["eos_token_id"] == 2
    assert theirs.bos_token_id == exported.token_ids["bos_token_id"] == 1
    assert theirs.decode([*ours.encode("end"), ours.eod], skip_special_tokens=True) == "end"
    assert theirs.model_max_length == 64 and len(theirs) == ours.vocab_size


@pytest.mark.parametrize(
    "how",
    [
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},  # as in Llama 2's
        {"model_type": "bpe", "user_defined_symbols": "<mark>"},
        {"model_type": "unigram"},
        {"model_type": "unigram", "byte_fallback": True, "remove_extra_whitespaces": False, "pad_id": 3},
    ],
)
def test_sentencepiece_of_other_projects(how: dict[str, Any], tmp_path: Path) -> None:
    """Prefixed spaces, merged runs of spaces, normalised characters, unigram pieces."""
    path = sentencepiece_of(tmp_path / "their.model", **how)
    ours = SentencePieceTokenizer(path)
    exported = export_tokenizer([path], 64, "llama")
    theirs = loaded(exported.files, tmp_path / "to")
    marked = ["a <mark> b", "<mark> b<mark>", "<mark><mark>c"]
    texts = [*TEXTS[:30], *READ, *marked, *AWKWARD]
    if how["model_type"] == "unigram":
        # A run of one letter has several splits of equal likelihood, and no rule decides.
        texts = [line for text in texts for line in text.splitlines() if not RUN.search(line)]
        assert len(texts) > 500
    for text in texts:
        assert theirs(text, verbose=False)["input_ids"] == ours.encode(text), text[:60]
    assert theirs.decode(ours.encode("a few words")) == "a few words"
    assert exported.token_ids.get("pad_token_id") == how.get("pad_id")


@pytest.mark.parametrize(
    "how, message",
    [
        ({"model_type": "char", "vocab_size": 90}, "neither unigram nor bpe"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_inexpressible_sentencepiece_is_refused(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = sentencepiece_of(tmp_path / "their.model", **how)
    with pytest.raises(ConversionError, match=message):
        export_tokenizer([path], 64, "llama")


def test_merges_follow_scores_not_ids(trained: Path) -> None:
    model = parse_sentencepiece((trained / "ours.model").read_bytes(), "x")
    expected = sentencepiece_json(model)["model"]["merges"]
    turned = dataclasses.replace(model, pieces=[*model.pieces[:3], *model.pieces[:2:-1]])
    merges = sentencepiece_json(turned)["model"]["merges"]
    made = [merge.replace(" ", "") for merge in merges]
    assert made == [merge.replace(" ", "") for merge in expected]
    assert len(set(merges)) == len(merges) > 600


def test_truncated_sentencepiece_is_refused_or_has_fewer_pieces(trained: Path) -> None:
    """For each length of the file: a megalite error, or fewer pieces."""
    content = (trained / "ours.model").read_bytes()
    whole = parse_sentencepiece(content, "x")
    for length in range(0, len(content), 101):
        try:
            cut = parse_sentencepiece(content[:length], "x")
        except ConversionError:
            continue
        assert cut.pieces == whole.pieces[: len(cut.pieces)]


def test_vocab_json_and_merges_txt(trained: Path, tmp_path: Path) -> None:
    files = [trained / "my-vocab.json", trained / "my-merges.txt"]
    exported = export_tokenizer(files, 64, "llama")
    assert exported.files.keys() == {"vocab.json", "merges.txt", "tokenizer.json", SETTINGS}
    ours = GPT2BPETokenizer(*files)
    for model_type in ("gpt2", "qwen3", "llama"):
        theirs = loaded(exported.files, tmp_path / model_type, model_type)
        assert_same_ids(theirs, ours, [*READ, *AWKWARD])
        assert theirs.eos_token_id == theirs.bos_token_id == ours.eod
    assert exported.token_ids == {"bos_token_id": ours.eod, "eos_token_id": ours.eod}


def test_qwen2_accepts_only_its_tokenizer(trained: Path, tmp_path: Path) -> None:
    """transformers 5 makes a Qwen2Tokenizer for every qwen2 and ignores tokenizer_config.json."""
    others = [[trained / "ours.model"], [trained / "whole.json"], sorted(trained.glob("my-*"))]
    for paths in others:
        with pytest.raises(ConversionError, match=r"like Qwen2's tokenizer; use --without-tokenizer"):
            export_tokenizer(paths, 64, "qwen2")
    # as it saves itself
    from transformers import Qwen2Tokenizer

    content = json.loads((trained / "whole.json").read_text())["model"]
    before = Qwen2Tokenizer(vocab=content["vocab"], merges=[tuple(pair) for pair in content["merges"]])
    before.save_pretrained(tmp_path / "before")
    exported = export_tokenizer([tmp_path / "before" / "tokenizer.json"], 64, "qwen2")
    after = loaded(exported.files, tmp_path / "after", "qwen2")
    ours = HuggingFaceTokenizer(tmp_path / "before" / "tokenizer.json")
    assert_same_ids(after, ours, [*TEXTS[:20], *READ, *AWKWARD])
    assert after.eos_token_id == ours.eod


def test_tokenizer_json_is_converted(trained: Path, tmp_path: Path) -> None:
    exported = export_tokenizer([trained / "whole.json"], 64, "llama")
    assert exported.files["tokenizer.json"] == (trained / "whole.json").read_bytes()
    ours = HuggingFaceTokenizer(trained / "whole.json")
    theirs = loaded(exported.files, tmp_path / "to")
    assert_same_ids(theirs, ours, [*READ, *AWKWARD])
    assert theirs.eos_token_id == ours.eod == exported.token_ids["eos_token_id"]


def test_hugging_face_files_are_copied_unchanged(trained: Path, tmp_path: Path) -> None:
    """Files that name a class and special tokens keep them."""
    from transformers import PreTrainedTokenizerFast

    before = PreTrainedTokenizerFast(
        tokenizer_file=str(trained / "whole.json"), eos_token="the", bos_token="<|endoftext|>"
    )
    before.save_pretrained(tmp_path / "before")
    (tmp_path / "before" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "before" / "generation_config.json").write_text('{"pad_token_id": 5, "top_p": 0.9}')
    paths = sorted((tmp_path / "before").iterdir())
    exported = export_tokenizer(paths, 64, "llama")
    assert exported.generation == {"pad_token_id": 5, "top_p": 0.9}
    assert exported.token_ids == {
        "bos_token_id": before.bos_token_id,
        "eos_token_id": before.eos_token_id,
        "pad_token_id": 5,
    }
    assert exported.files == {path.name: path.read_bytes() for path in paths if path.name != "generation_config.json"}
    after = loaded(exported.files, tmp_path / "after")
    text = READ[0]
    assert after(text, verbose=False)["input_ids"] == before(text, verbose=False)["input_ids"]
    assert after.chat_template == "{{ messages }}"


def test_faults_are_errors(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps({"model": {"vocab": {name: 0}}}))
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_bytes(b"\xff")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # Llama 3's name
    (tmp_path / "list.json").write_text('[{"rank": 0, "token_bytes": "IQ==", "token_str": "!"}]')
    for names, message in (
        (["list.json"], r"list\.json is a tiktoken file; .*--without-tokenizer"),
        (["tokenizer.model"], r"tokenizer\.model is a tiktoken file; .*--without-tokenizer"),
        (["a.json", "b.json"], r"b\.json: a second tokenizer\.json beside .*a\.json"),
        (["vocab.json", "merges.txt"], r"<\|endoftext\|> is not in the vocabulary"),
        (["merges.txt"], "are not a tokenizer"),
        (["gone.json"], "cannot be read"),
    ):
        with pytest.raises(ConversionError, match=message):
            export_tokenizer([tmp_path / name for name in names], 8, "llama")
    (tmp_path / "vocab.json").write_text('{"<|endoftext|>": 0}')
    with pytest.raises(ConversionError, match=r"merges\.txt: not UTF-8"):
        export_tokenizer([tmp_path / "vocab.json", tmp_path / "merges.txt"], 8, "llama")
