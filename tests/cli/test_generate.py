"""Test `megalite generate` on one rank: prompts, texts and refused input."""

import json
import shutil
from pathlib import Path

import pytest

from megalite.cli.generate import DTYPES
from megalite.cli.model_commands import GENERATE as main
from megalite.config.reading import PRECISIONS
from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.native import write_native
from megalite.generation.continuation import Sampling
from megalite.generation.generate import BATCH_SIZE
from tests.conversion.samples import LLAMA, MadeUp, byte_tokenizer

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ours` and `theirs`: one model in two formats, with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    weights = MadeUp(folder, {**LLAMA, "vocab_size": 257}, tokenizer_files=byte_tokenizer(folder / "vocabulary"))
    write_native(weights, folder / "ours")
    write_huggingface(weights, folder / "theirs")
    return folder


def generate(*words: str | Path) -> int:
    return main(["--device", "cpu", "--max-new-tokens", "8", *map(str, words)])


def test_checkpoint_and_hugging_face_folder_give_the_same_text(models: Path, capsys: Captured) -> None:
    said = []
    for name in ("ours", "theirs"):
        assert generate("--load", models / name, "--prompt", "def main", "--top-k", "9") == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out
    assert said[0].out.startswith("def main") and len(said[0].out) > len("def main\n") + 1
    assert " tokens/s\n" in said[0].err
    assert sorted(path.name for path in models.iterdir()) == ["ours", "theirs", "vocabulary"]


def test_prompts_and_output_files(models: Path, tmp_path: Path, capsys: Captured) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    texts = ["def main", "é", "import os\n", "def main"]
    prompts.write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    words = ("--load", models / "ours", "--prompts", prompts, "--prompt-key", "q", "--batch-size", "3")
    assert generate(*words, "--output", output) == 0
    assert capsys.readouterr().out == ""
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["prompt"] for record in records] == texts
    assert records[0]["text"] != records[3]["text"], "equal prompts have different texts"
    for record in records:
        assert record["finish"] in ("length", "eod")
        assert record["tokens"] == 8 or record["finish"] == "eod"
    assert generate(*words) == 0
    shown = capsys.readouterr().out
    for number, record in enumerate(records, start=1):
        assert f"--- {number} of 4\n{record['prompt']}{record['text']}\n" in shown
    assert generate(*words, "--output", output) == 2
    assert "texts.jsonl exists; remove it" in capsys.readouterr().err


def test_chats_use_the_template(models: Path, tmp_path: Path, capsys: Captured) -> None:
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    shutil.copytree(models / "theirs", model)
    words = ("--load", model, "--chat", "--temperature", "0")
    assert generate(*words, "--prompt", "hi") == 2
    assert "--chat needs a chat template" in capsys.readouterr().err
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    assert generate(*words, "--prompt", "hi") == 0
    chat = capsys.readouterr().out
    assert chat.startswith("<user>hi\n<a>")
    assert generate("--load", model, "--temperature", "0", "--no-add-bos", "--prompt", "<user>hi\n<a>") == 0
    assert capsys.readouterr().out == chat
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "é"}]
    chats.write_text(json.dumps({"messages": asked}) + "\n" + json.dumps({"messages": "hi"}) + "\n")
    assert generate(*words, "--prompts", chats) == 0
    said = capsys.readouterr().out
    assert "--- 1 of 2\n<system>be brief\n<user>é\n<a>" in said and f"--- 2 of 2\n{chat}" in said
    chats.write_text(json.dumps({"messages": [{"content": "no role"}]}) + "\n")
    assert generate(*words, "--prompts", chats) == 2
    assert "chats.jsonl:1: expected a string under 'role'" in capsys.readouterr().err


def test_stop_strings_and_seed(models: Path, capsys: Captured) -> None:
    words = ("--load", models / "ours", "--prompt", "x", "--temperature", "1.5")
    said = []
    for more in ((), ("--seed", "0"), ("--seed", "1")):
        assert generate(*words, *more) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    text = said[0].removeprefix("x").removesuffix("\n")
    stop = text[2:4]
    assert generate(*words, "--stop", stop) == 0
    assert capsys.readouterr().out == "x" + text[: text.index(stop)] + "\n"


def test_start_tokens_of_a_tokenizer_json(models: Path, tmp_path: Path, capsys: Captured) -> None:
    """The start tokens equal those of transformers, by default for Hugging Face folders."""
    from transformers import AutoTokenizer

    folder = tmp_path / "begun"
    folder.mkdir()
    for path in (models / "theirs").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    values = json.loads((folder / "tokenizer.json").read_text())
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
    first, text = ({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}})
    pair = {"Sequence": {"id": "B", "type_id": 1}}
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True)("a")["input_ids"] == [256, 64]
    words = ("--prompt", "def main", "--temperature", "0")
    said = []
    for more in (("--load", folder), ("--load", folder, "--no-add-bos"), ("--load", models / "theirs")):
        assert generate(*words, *more) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1] == said[2]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # which would add start tokens itself
    assert generate(*words, "--load", folder, "--chat") == 0
    assert capsys.readouterr().out == said[1]


def test_flags_have_the_defaults_of_the_library() -> None:
    """The flags repeat the defaults, because they are declared without torch."""
    flags = main.parse(["--load", "x", "--prompt", "a"])
    assert (Sampling().max_new_tokens, Sampling().temperature) == (flags.max_new_tokens, flags.temperature)
    assert flags.batch_size == BATCH_SIZE
    assert set(PRECISIONS) == set(DTYPES)
