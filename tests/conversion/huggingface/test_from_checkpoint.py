"""A model trained on four ranks is, exported, the one that they held together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.native import NativeWeights
from megalite.conversion.weights import parameter_shapes
from tests.conversion.huggingface.models import error, our_stage, our_text
from tests.conversion.huggingface.test_write import stock
from tests.conversion.samples import train
from tests.models.test_families import all_float64
from tests.support.tiny import LLAMA

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "tp": 2, "pp": 2},
    "mixtral": {**LLAMA, "num_experts": 4, "ep": 2, "pp": 2},
}
PROMPT = [5, 17, 60, 3, 81]


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_together(name: str, tmp_path: Path) -> None:
    """Bit for bit in every tensor; logits to 1e-9 in float64 and the same greedy tokens with stock transformers."""
    held = train(tmp_path / "run", 4, CASES[name])["weight"]
    weights = NativeWeights(tmp_path / "run")
    folder = write_huggingface(weights, tmp_path / "theirs", max_file_bytes=30_000)
    again, vocab = HuggingFaceWeights(folder), weights.model.vocab_size
    assert again.family.name == name
    for key, shape in parameter_shapes(weights.model).items():
        padded = key in ("embedding.word.weight", "head.weight")
        rows = vocab if padded else shape.shape[0]
        assert torch.equal(again.read(key)[:rows], torch.from_numpy(held[key])[:rows]), key
    them, us = stock(folder), our_stage(weights)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        ours = us(tokens, us.generation_context(len(PROMPT)))[:, 0, :vocab]
        with all_float64():
            theirs = them(tokens, use_cache=False).logits[0]
            text = them.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert error(ours, theirs) < 1e-9
    assert text[0].tolist() == PROMPT + our_text(us, PROMPT, 8)
