"""Tokenizers in conversions: end tokens of any name, and unreadable, missing or changed tokenizers."""

import json
from pathlib import Path

import pytest

from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.model_folder import open_tokenizer, settings_in, tokenizer_folder_files
from megalite.conversion.native import NativeWeights, write_native
from tests.conversion.samples import GPT, MadeUp, byte_tokenizer, run
from tests.support.trainer import fit

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["<unk>", "A", "</s>", "<|end|>"]


def word_tokenizer(folder: Path, words: list[str], eos: object = None) -> Path:
    """Write tokenizer.json of these words, and tokenizer_config.json if there is an end token. Returns the folder."""
    folder.mkdir(parents=True)
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def checkpoint(folder: Path, files: list[Path]) -> Path:
    weights = MadeUp(folder.parent, GPT, tokenizer_files=files)
    return write_native(weights, folder)


class TestEndToken:
    def test_end_token_is_kept_by_all_formats(self, tmp_path: Path) -> None:
        files = tokenizer_folder_files(word_tokenizer(tmp_path / "data", ["<unk>", "<|end|>"], "<|end|>"))
        source = checkpoint(tmp_path / "a", files)
        assert run(source, tmp_path / "b", "--to", "huggingface", "--no-verify") == 0
        assert run(tmp_path / "b", tmp_path / "c", "--to", "native") == 0
        found = open_tokenizer(NativeWeights(tmp_path / "c").tokenizer_files)
        assert found is not None and found.eod == 1
        assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == 1

    def test_single_file_uses_the_settings_beside_it(self, tmp_path: Path) -> None:
        folder = word_tokenizer(tmp_path / "data", ["<unk>", "<|end|>"], "<|end|>")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        names = [path.name for path in tokenizer_folder_files(folder / "tokenizer.json")]
        assert names == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


def test_weights_convert_without_an_end_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "a", [])
    assert run(source, tmp_path / "hf", "--to", "huggingface", "--no-verify") == 0
    (word_tokenizer(tmp_path / "data", ["<unk>"]) / "tokenizer.json").rename(tmp_path / "hf/tokenizer.json")
    assert run(tmp_path / "hf", tmp_path / "b", "--to", "native") == 2
    assert "leave the tokenizer out with --without-tokenizer" in capsys.readouterr().err
    for to, flags in (("native", ["--without-tokenizer"]), ("megatron", [])):
        assert run(tmp_path / "hf", tmp_path / to, "--to", to, *flags) == 0
        assert "verify   passed" in capsys.readouterr().out


def test_changed_tokenizer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "a", byte_tokenizer(tmp_path / "data"))
    recorded = NativeWeights(source).recorded_tokenizer
    other = word_tokenizer(tmp_path / "other", WORDS)
    flags = ["--to", "native", "--no-verify", "--tokenizer-model"]
    assert recorded is not None
    assert run(source, tmp_path / "same", *flags, tmp_path / "data") == 0
    assert capsys.readouterr().err == ""
    assert run(source, tmp_path / "b", *flags, other) == 0
    warning = capsys.readouterr().err
    given = open_tokenizer(tokenizer_folder_files(other))
    assert warning.startswith("warning: ") and warning.count("\n") == 1 and given is not None
    assert f"(sha256 {given.fingerprint()[:12]}..., vocabulary 4) is not the tokenizer" in warning
    assert f"(sha256 {recorded[:12]}..., vocabulary 301)" in warning


def test_missing_or_changed_recorded_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "a", byte_tokenizer(tmp_path / "data"))
    merges = source / "tokenizer" / "merges.txt"
    merges.write_text("#version: 0.2\na b\n")
    assert run(source, tmp_path / "b", "--to", "native", "--no-verify") == 2
    capsys.readouterr()
    assert run(source, tmp_path / "b", "--to", "native", "--without-tokenizer") == 0
    assert "without tokenizer (--without-tokenizer)" in capsys.readouterr().out
    merges.unlink()
    assert run(source, tmp_path / "c", "--to", "native", "--no-verify") == 0
    gone = f"the checkpoint's tokenizer is missing (recorded as {merges}, looked in {merges.parent})"
    assert f"without tokenizer: {gone}; --tokenizer-model PATH adds it" in capsys.readouterr().out


@pytest.mark.parametrize("inside", [True, False])
def test_relative_tokenizer_path_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Also if the run's working folder has moved with its contents."""
    home, moved, elsewhere = (tmp_path / name for name in ("home", "moved", "elsewhere"))
    for folder in (home, elsewhere):
        folder.mkdir()
        byte_tokenizer(folder / "tok")
    monkeypatch.chdir(home)
    save = Path("runs/1" if inside else tmp_path / "1")
    files = {"vocab_file": "tok/vocab.json", "merge_file": "tok/merges.txt", "save": str(save)}
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8, "vocab_size": 512}
    fit(**files, **sizes, mock_data=True, train_iters=1, device="cpu", save_interval=1)
    at = save.absolute()
    monkeypatch.chdir(elsewhere)
    for place, folder in ((home, at), (moved, moved / "runs/1"))[: 1 + inside]:
        if place == moved:
            home.rename(moved)
        found = settings_in(str(folder), None)
        assert found is not None and found["vocab_file"] == str(place / "tok/vocab.json")
        assert NativeWeights(folder).missing_tokenizer is None


@pytest.mark.parametrize("merges", ["#version: 0.2\nA B\n", "A B\n"])
def test_openai_file_names(tmp_path: Path, merges: str) -> None:
    """OpenAI's encoder.json and vocab.bpe are vocab.json and merges.txt; the checkpoint is still exported."""
    vocab, empty = byte_tokenizer(tmp_path / "data")
    encoder, bpe = vocab.with_name("encoder.json"), vocab.with_name("vocab.bpe")
    encoder.write_text(json.dumps({**json.loads(vocab.read_text()), "AB": 257}))
    bpe.write_text(merges)
    vocab.unlink()
    empty.unlink()
    weights = MadeUp(tmp_path, GPT, tokenizer_files=[bpe, encoder])  # as with a run's --merge-file and --vocab-file
    write_huggingface(weights, tmp_path / "hf")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode("ABA")[0] == 257 and tokenizer.eos_token_id == 256
    assert (tmp_path / "hf" / "merges.txt").read_text() == merges


@pytest.mark.parametrize("generation", [None, {"eos_token_id": [7, 9], "temperature": 0.6}])
def test_token_ids_without_a_tokenizer_round_trip(tmp_path: Path, generation: dict[str, object] | None) -> None:
    first = checkpoint(tmp_path / "first", byte_tokenizer(tmp_path / "data"))
    assert run(first, tmp_path / "hf", "--to", "huggingface", "--without-tokenizer", "--no-verify") == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"bos_token_id": 3, "eos_token_id": 7}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    assert run(tmp_path / "hf", tmp_path / "native", "--to", "native", "--without-tokenizer", "--no-verify") == 0
    assert NativeWeights(tmp_path / "native").tokenizer_files == []
    assert run(tmp_path / "native", tmp_path / "again", "--to", "native", "--without-tokenizer", "--no-verify") == 0
    assert run(tmp_path / "again", tmp_path / "back", "--to", "huggingface", "--no-verify") == 0
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    eos = 7 if generation is None else [7, 9]
    assert (written["bos_token_id"], written["eos_token_id"]) == (3, eos)
    found = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert found == {"bos_token_id": 3, "eos_token_id": eos, **(generation or {})}
