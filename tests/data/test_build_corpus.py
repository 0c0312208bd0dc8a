import json
import pydoc_data.topics
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart" / "build_corpus.py"


def build(output: Path, megabytes: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    monkeypatch.setattr(sys, "argv", ["build_corpus.py", "--output", str(output), "--max-megabytes", megabytes])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 0
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def test_corpus_has_all_topics_and_sources_shuffled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = build(tmp_path / "new" / "c.jsonl", "2", monkeypatch)
    topics = len(pydoc_data.topics.topics)
    sources = [document["source"] for document in corpus]
    assert {s for s in sources if s.startswith("topic ")} == {f"topic {t}" for t in pydoc_data.topics.topics}
    library = [source for source in sources if not source.startswith("topic ")]
    assert len(library) > 10
    assert "abc.py" in library
    # Shuffled: neither the topics nor the files are in order.
    assert 0 < sum(source.startswith("topic ") for source in sources[:topics]) < topics
    assert library != sorted(library, key=lambda s: Path(s).parts)
    assert not {"test", "tests", "site-packages", "__pycache__", "idlelib"} & {
        p for s in library for p in Path(s).parts
    }
    texts = {document["source"]: document["text"] for document in corpus}
    assert texts["topic assert"] == pydoc_data.topics.topics["assert"]
    size = sum(len(document["text"].encode("utf-8")) for document in corpus)
    assert 1.5e6 < size <= 2e6
    assert f"{topics} topics, {len(library)} library files, {size / 1e6:.1f} MB" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c.jsonl"]
    assert build(tmp_path / "again.jsonl", "2", monkeypatch) == corpus
