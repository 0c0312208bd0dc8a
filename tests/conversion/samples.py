"""Shared by the conversion tests: synthetic weights, a tokenizer, and weights of a trained run."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.cli.model_commands import CONVERT
from megalite.config.data import DataConfig
from megalite.config.describe import replace
from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.conversion.weights import Weights, parameter_shapes
from megalite.tokenizers.build import build_tokenizer
from megalite.training.saving import save
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, assemble, build, local_parts, tiny_config, words

VOCAB = 301  # more than the 257 ids of `byte_tokenizer`, and no multiple of 8

GPT: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCAB}
GPT |= {"make_vocab_size_divisible_by": 8, "seq_length": 24}
LLAMA: dict[str, Any] = GPT | words(
    "position_embedding_type=rope normalization=RMSNorm activation=swiglu num_query_groups=2 ffn_hidden_size=48 "
    "add_bias_linear=false tie_embeddings=false"
)
EXPERTS: dict[str, Any] = {**LLAMA, "num_experts": 4}
ROUTING: dict[str, Any] = words(
    "num_experts=8 moe_router_topk=4 moe_router_score_function=sigmoid moe_router_enable_expert_bias "
    "moe_router_num_groups=4 moe_router_group_topk=2 moe_router_topk_scaling_factor=1.5 "
    "moe_shared_expert_intermediate_size=24 moe_shared_expert_gate"
)
"""DeepSeek-V3's router and Qwen2's gate, over `EXPERTS`."""


SINKS: dict[str, Any] = EXPERTS | words(
    "softmax_type=learnable add_bias_linear moe_add_bias_linear activation=quick_geglu activation_func_clamp_value=7.0 "
    "glu_linear_offset=1.0 rope_scaling=yarn rope_scaling_factor=32.0 rope_original_max_positions=4096 "
    "rope_truncate=false"
)
"""Settings of gpt-oss."""
LATENT: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "num_query_groups"} | words(
    "multi_latent_attention q_lora_rank=20 kv_lora_rank=12 qk_head_dim=8 qk_pos_emb_head_dim=4 v_head_dim=6 qk_norm"
)
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "rope_original_max_positions": 4096}
YARN |= {"rope_mscale": 0.7, "rope_mscale_all_dim": 0.9}


def model_of(settings: dict[str, Any]) -> ModelConfig:
    return validate(replace(RunConfig(), **settings), 1).model


class MadeUp(Weights):
    """Synthetic weights: each tensor is generated from its name, times `factor`. Counts how often each is read."""

    format = "megalite"
    tokenizer_hints = DataConfig()
    generation: Mapping[str, Any] = {}

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
        tokenizer_files: Sequence[Path] = (),
        factor: float = 1.0,
    ) -> None:
        self.path, self.factor = path, factor
        self.model = model_of(settings)
        self.seq_length: int = settings["seq_length"]
        self.tokenizer_files = tokenizer_files
        self.reads: Counter[str] = Counter()
        self._dtype = dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype

    def read(self, name: str) -> torch.Tensor:
        self.reads[name] += 1
        shape = parameter_shapes(self.model)[name].shape
        generator = torch.Generator().manual_seed(sum(name.encode()))
        values = self.factor * 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in ("embedding.word.weight", "head.weight"):
            values[self.model.vocab_size :] = 0.0
        return values.to(self._dtype)


PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*PRINTABLE, *(byte for byte in range(256) if byte not in PRINTABLE)]
"""Bytes in the order of `byte_tokenizer`'s ids."""


def byte_tokenizer(folder: Path) -> list[Path]:
    """Write vocab.json and merges.txt of a byte-level BPE without merges: 256 bytes and the end of document."""
    symbols = [chr(byte) for byte in PRINTABLE] + [chr(256 + k) for k in range(256 - len(PRINTABLE))]
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({token: i for i, token in enumerate([*symbols, "<|endoftext|>"])}))
    merges.write_text("#version: 0.2\n")
    return [vocab, merges]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in _files(folder)}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def run(*words: str | Path) -> int:
    """Run `megalite convert`."""
    return CONVERT([str(word) for word in words])


def ignore(count: int) -> None:
    """Ignore progress."""


def _train(context: RankContext, world: int, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    runner = Runner(build(context, tiny_config(world, **settings)))
    for _ in range(3):
        runner.step()
    tokenizer = build_tokenizer(runner.replica.config.data, None)
    fingerprint = None if tokenizer is None else tokenizer.fingerprint()
    save(runner.replica, Path(folder), runner.progress, tokenizer=fingerprint)
    return {kind: local_parts(runner.replica, kind) for kind in ("weight", "main_param")}


def train(folder: Path, world: int, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Train three steps on `world` ranks and save. Returns the whole tensors of each kind, as numpy."""
    ranks = run_ranks(world, _train, world, settings, str(folder))
    return {kind: assemble([rank[kind] for rank in ranks]) for kind in ("weight", "main_param")}
