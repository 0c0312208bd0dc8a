"""The comparison after a conversion detects a flipped bit, a misplaced weight and a lost setting."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.verify import Rounded, Verification, verify
from megalite.conversion.weights import ConversionError, Repadded, Wrapped
from tests.conversion.samples import EXPERTS, GPT, LATENT, LLAMA, ROUTING, MadeUp
from tests.support.state import silent
from tests.support.tiny import words

QKV = "layers.1.attention.qkv.weight"


class Changed(Wrapped):
    def __init__(self, weights: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(weights)
        self._name, self._change = name, change

    def read(self, name: str) -> torch.Tensor:
        tensor = self.inner.read(name)
        return self._change(tensor) if name == self._name else tensor


def compared(source: Any, target: Any, *, use_stock: bool = False) -> Verification:
    return verify(source, target, log=silent, use_stock=use_stock)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.uint8).view(-1)[40] ^= 1
    return tensor


@pytest.mark.parametrize("settings", [GPT, LLAMA, EXPERTS], ids=["gpt", "llama", "experts"])
def test_equal_weights_give_equal_logits(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = compared(MadeUp(tmp_path, settings), MadeUp(tmp_path, settings))
    assert found.passed and (found.logits, found.unexplained) == (0.0, 0.0)
    # Products with more columns may round differently.
    padded = compared(MadeUp(tmp_path, settings), Repadded(MadeUp(tmp_path, settings), 128))
    assert padded.passed and padded.logits < 1e-14
    assert found.scale > 0.1
    assert found.lines()[0] == "weights: bit-equal"
    assert found.lines()[-1].startswith("passed")


@pytest.mark.parametrize(
    ("change", "worst"),
    [(flipped, 1e-6), (lambda t: t.flip(0), 2.0), (lambda t: t.fill_(float("nan")), float("inf"))],
    ids=["one bit", "other order", "nan"],
)
def test_different_tensor_is_named(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], worst: float
) -> None:
    weights = MadeUp(tmp_path, GPT)
    found = compared(weights, Changed(weights, QKV, change))
    assert not found.passed
    assert [*found.wrong] == [QKV]
    assert 0.0 < found.wrong[QKV] <= worst
    assert any(QKV in line for line in found.lines())
    assert found.lines()[-1].startswith("FAILED")


def test_only_rounding_is_tolerated_and_reported(tmp_path: Path) -> None:
    source, target = MadeUp(tmp_path, LLAMA), MadeUp(tmp_path, LLAMA, dtype=torch.bfloat16)
    found = compared(source, target)
    assert found.passed and len(found.rounded) == 15 and found.unexplained == 0.0
    assert 1e-4 < found.logits < 0.1
    assert found.lines()[0].startswith("weights: 15 tensors changed by rounding, ")
    assert not compared(source, Changed(target, QKV, flipped)).passed
    widened = compared(target, Rewidened(target))
    assert widened.passed and not widened.rounded


def test_number_that_became_infinite_is_an_error(tmp_path: Path) -> None:
    def raised(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[40] = 1e6
        return tensor

    source = Changed(MadeUp(tmp_path, LLAMA), QKV, raised)
    found = compared(source, Rounded(source, MadeUp(tmp_path, LLAMA, dtype=torch.float16)))
    assert not found.passed
    assert found.wrong == {QKV: float("inf")}


class Rewidened(Wrapped):
    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, name: str) -> torch.Tensor:
        return self.inner.read(name).float()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 3}, "only one of them has layers.2"),
        ({"vocab_size": 300}, "vocab_size 301 and 300"),
        ({"tie_embeddings": False}, "only one of them has head.weight"),
    ],
)
def test_different_models_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConversionError, match=says):
        compared(MadeUp(tmp_path, GPT), MadeUp(tmp_path, {**GPT, **change}))


# With one head many scores of its indexer are zero, of which transformers chooses any.
SPARSE = {**LATENT, **ROUTING, "moe_shared_expert_gate": False, "norm_epsilon": 1e-6} | words(
    "experimental_attention_variant=dsa dsa_indexer_n_heads=1 dsa_indexer_head_dim=6 dsa_indexer_topk=5 "
    "dsa_indexer_k_norm_epsilon=1e-6 moe_ffn_hidden_size=24"
)
STOCK = {"gpt": {**GPT, "activation": "gelu_tanh"}, "llama": LLAMA, "experts": EXPERTS, "sparse": SPARSE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    home = tmp_path_factory.mktemp("stock")
    return {name: write_huggingface(MadeUp(home, each), home / name) for name, each in STOCK.items()}


class TestStock:
    """Logits of Hugging Face folders come from transformers, if it is installed."""

    @pytest.mark.parametrize("name", STOCK)
    def test_logits_of_the_folder_come_from_transformers(self, folders: dict[str, Path], name: str) -> None:
        target = HuggingFaceWeights(folders[name])
        found = compared(MadeUp(folders[name], STOCK[name]), target, use_stock=True)
        assert found.passed and 0.0 < found.logits < 1e-6, found.lines()
        assert "megalite and transformers 5" in found.computed
        assert logging.getLogger("transformers").level == logging.ERROR  # no hints to install kernels

    def test_symmetric_read_and_write_fault_is_detected(self, folders: dict[str, Path]) -> None:
        source = HuggingFaceWeights(folders["llama"])
        misread = Changed(source, QKV, lambda tensor: tensor.flip(0))
        for dtype in (torch.float32, torch.bfloat16):
            target = Changed(MadeUp(folders["llama"], LLAMA, dtype=dtype), QKV, lambda tensor: tensor.flip(0))
            assert compared(misread, target).passed
            assert not compared(misread, target, use_stock=True).passed

    def test_folder_that_transformers_cannot_load_is_an_error(self, folders: dict[str, Path], tmp_path: Path) -> None:
        target = HuggingFaceWeights(folders["llama"])
        config = folders["llama"] / "config.json"
        text = config.read_text()
        config.write_text(json.dumps({**json.loads(text), "model_type": "unheard-of"}))
        try:
            with pytest.raises(ConversionError, match=r"transformers does not load it: ValueError"):
                compared(MadeUp(tmp_path, LLAMA), target, use_stock=True)
        finally:
            config.write_text(text)
