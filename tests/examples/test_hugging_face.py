"""examples/hugging_face: the commands of its README, and the result in transformers."""

import re
from pathlib import Path

import pytest

from tests.docs.execution import execute
from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY, records

pytestmark = pytest.mark.e2e

README = "examples/hugging_face/README.md"


def test_readme_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls, the exported folder equals the checkpoint, and transformers generates text from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / README).read_text(encoding="utf-8").replace("runs/hugging_face", str(tmp_path))
    for more, less in (("-iters 40", "-iters 16"), ("-interval 20", "-interval 8"), ("megabytes 0.5", "megabytes 0.2")):
        assert more in text
        text = text.replace(more, less)
    said = {}
    for command in commands_in(text, README):
        done = execute(command)
        assert done.status == 0, f"{command.line}\n{done.out}\n{done.err}"
        said[" ".join(command.words[:2])] = done.out
    first, *_, last = (record["valid_loss"] for record in records(tmp_path / "run", "valid"))
    assert 6.8 < first < 7.1 and last < first - 0.2
    compared = said["python examples/hugging_face/compare.py"]
    losses = re.search(r"megalite ([0-9.]+), transformers ([0-9.]+)", compared)
    assert losses is not None and abs(float(losses[1]) - float(losses[2])) < 1e-5, compared
    assert sorted(path.name for path in tmp_path.glob("trained*")) == ["trained", "trained-step-0000008"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trained")
    prompt = tokenizer("The value of", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    made = model.generate(**prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(made[0]).startswith("The value of")
