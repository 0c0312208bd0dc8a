"""The commands of docs/data.md, run in order on real text."""

import json
import re
from pathlib import Path

import pytest

from megalite.cli import main as program
from megalite.config.files import level_from_text
from megalite.config.merge import merge
from megalite.data.indexed_dataset import IndexedDataset
from tests.docs.execution import run_script
from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY

PAGE = REPOSITORY / "docs" / "data.md"
TEXT = PAGE.read_text()
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}<|endoftext|>{% endgeneration %}{% else %}{{ message.content }} {% endif %}\
{% endfor %}"""
SMALL = "num_layers: 2\nhidden_size: 32\nnum_attention_heads: 2\nseq_length: 64\nlr: 0.001\nmicro_batch_size: 4\ntrain_iters: 2\n"


def test_commands_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    builder = str(REPOSITORY / "examples" / "quickstart" / "build_corpus.py")
    size = ["--max-megabytes", "0.5"]
    assert run_script([builder, "--output", "corpus/a.jsonl", *size]) == 0
    lines = Path("corpus/a.jsonl").read_text().splitlines(keepends=True)
    Path("corpus/a.jsonl").write_text("".join(lines[:40]))
    Path("corpus/b.jsonl").write_text("".join(lines[40:]))
    found = [command.words for command in commands_in(TEXT, str(PAGE))]
    assert [words[1] for words in found][-4:] == ["preprocess", "preprocess", "data", "data"]
    (examples,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    Path("examples.jsonl").write_text(examples * 20)
    Path("chat_template.jinja").write_text(TEMPLATE)
    Path("small.yaml").write_text(SMALL)
    small = {"examples/quickstart/run.yaml": "small.yaml", "8192": "1024"}
    for _, *shown_words in found:
        words = [small.get(word, word) for word in shown_words]
        assert program.main(words) == 0, words
    shown = capsys.readouterr().out
    first = json.loads(lines[0])["text"]
    assert repr(first[:20])[1:-1] in shown, "inspect shows the first document"

    whole, merged = IndexedDataset("whole"), Path("whole.bin").read_bytes()
    assert len(whole) == len(lines)
    for suffix in (".bin", ".idx"):
        for other in ("whole", "many"):
            assert Path(f"corpus_text_document{suffix}").read_bytes() == Path(f"{other}{suffix}").read_bytes()
    parts = [name for name in ("train", "valid", "test") if Path(f"whole_{name}.idx").exists()]
    assert "valid" in parts
    assert b"".join(Path(f"whole_{name}.bin").read_bytes() for name in parts) == merged


def test_yaml_forms_are_equivalent() -> None:
    forms = [line for line in TEXT.splitlines() if line.startswith("data_path:")]
    read = [merge([level_from_text(form, "docs/data.md")]).config.data.data_path for form in forms]
    assert read == [["0.7", "web_text_document", "0.3", "code_text_document"]] * 3
