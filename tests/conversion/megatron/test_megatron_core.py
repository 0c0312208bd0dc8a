"""megatron.core's own GPTModel loads written files, computes the same logits and saves files that megalite reads.

Runs in separate processes if the package is installed (`pip install megatron-core psutil`)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.conversion.megatron.write import write_megatron
from megalite.conversion.open import open_megatron
from megalite.conversion.verify import our_logits
from tests.conversion.megatron.builder import assert_same
from tests.conversion.samples import EXPERTS, GPT, LATENT, LLAMA, ROUTING, SINKS, YARN, MadeUp


def installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("megatron.core", "psutil"))
    except ModuleNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not installed(), reason="megatron-core or psutil is not installed")
SCRIPT = Path(__file__).with_name("megatron_core_logits.py")

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT | {"activation": "gelu_tanh"},
    "gpt-exact-gelu": GPT,
    "llama": LLAMA,
    "llama3-scaling": LLAMA | {"rope_scaling": "llama3", "rotary_base": 500000.0},
    "qwen": LLAMA | {"add_qkv_bias": True, "qk_norm": True, "tie_embeddings": True, "kv_channels": 16},
    "latent": LATENT,
    "latent-yarn": LATENT | YARN | {"q_lora_rank": None, "tie_embeddings": True},
    "deepseek-v3": {**EXPERTS, "num_query_groups": None} | ROUTING | LATENT | YARN | {"moe_shared_expert_gate": False},
    "experts": EXPERTS | {"moe_shared_expert_intermediate_size": 24, "moe_ffn_hidden_size": 16},
    "routing": EXPERTS | ROUTING,
    "some-experts": EXPERTS | {"moe_first_dense_layers": 1, "moe_router_pre_softmax": True},
    "gpt-oss": SINKS,
}


@pytest.mark.parametrize(
    "kind, tp", [*((kind, 1) for kind in MODELS), ("gpt", 2), ("llama", 2), ("qwen", 2), ("experts", 2), ("routing", 2)]
)
def test_megatron_core_loads_and_saves_our_files(tmp_path: Path, kind: str, tp: int) -> None:
    weights = MadeUp(tmp_path, MODELS[kind])
    folder = write_megatron(weights, tmp_path / "out", tp=tp, pp=1, implementation="local")
    tokens = torch.randint(weights.model.vocab_size or 0, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, folder / "tokens.pt")
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tp), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp)
    ]
    printed = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * tp, "\n".join(printed)

    theirs = torch.cat([torch.load(folder / f"logits-{rank}.pt", weights_only=True) for rank in range(tp)], -1)
    ours = our_logits(weights, tokens, torch.float32)
    size = weights.model.vocab_size
    worst = (ours[..., :size] - theirs[..., :size]).abs().max().item()
    assert worst <= 1e-4 * ours.abs().max().item()

    for saved in ("back", "dist"):
        assert_same(open_megatron(folder / saved), weights)
