"""What all contenders of step_vs_peers.py share: the models, the layouts, the batches, the first weights and the optimizer.

A contender is built for a `Case` on every rank of it and then makes steps: the same global batches, a microbatch at a
time, the gradient of the mean loss, clipping by the global norm, AdamW that decays matrices and embeddings alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from plain_gpt import Size
from torch import nn

from megalite.config.model import ModelConfig
from megalite.models.gpt import GPTStage
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group

LR, DECAY, CLIP, SEED = 1e-3, 0.01, 1.0, 1234
GPT2, LLAMA = "gpt2", "llama"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks, and how many threads each has."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    threads: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.dp * self.tp * self.pp


LAYOUTS = {
    "1": Layout(),
    "1.2threads": Layout(threads=2),
    "dp2": Layout(dp=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2.vpp2": Layout(pp=2, vpp=2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model in one layout."""

    size: Size
    layout: Layout
    family: str = GPT2
    bf16: bool = False
    schedule: str | None = None
    """Of the pipeline, instead of megalite's usual one: the cut of the layers goes by it."""
    batch_peers: bool = False
    """Peers are scheduled as megalite's ranks are."""
    folders: tuple[tuple[str, str], ...] = ()
    """Where peers that are not installed lie, by contender."""

    @property
    def microbatches(self) -> int:
        """Of a step, on one data-parallel rank."""
        return self.size.batch // self.size.micro // self.layout.dp

    def share(self, tokens: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The microbatches [b, s + 1] of a data-parallel rank, dealt out in turn."""
        return list(tokens.split(self.size.micro))[rank :: self.layout.dp]


class Contender(Protocol):
    """A system that trains, on one rank."""

    def step(self, tokens: torch.Tensor) -> float:
        """One step on the global batch [batch, s + 1]: this rank's part of its loss; the parts of all ranks add up."""
        ...


def batch_of(size: Size, step: int) -> torch.Tensor:
    """The tokens of a step, [batch, s + 1]: the same everywhere."""
    draws = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, size.vocab, (size.batch, size.seq + 1), generator=draws)


def model_of(case: Case) -> ModelConfig:
    """megalite's settings of the model."""
    size = case.size
    family: dict[str, Any] = {}
    if case.family == LLAMA:
        family = {
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "position_embedding_type": "rope",
            "add_bias_linear": False,
            "tie_embeddings": False,
        }
    return ModelConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        vocab_size=size.vocab,
        max_position_embeddings=size.seq,
        **family,
    )


def first_weights(case: Case) -> dict[str, torch.Tensor]:
    """megalite's initial weights in fp32 by its own names: what every contender starts from."""
    model = model_of(case)
    make = ParameterFactory(tp=Group.solo("tp"), seed=SEED, dtype=torch.float32, device=torch.device("cpu"))
    stage = GPTStage(
        model,
        first_layer=0,
        last_layer=model.num_layers,
        has_embedding=True,
        has_head=True,
        make=make,
        seq_length=case.size.seq,
    )
    found = {}
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        found[parameter.info.spec.name] = parameter.detach()
    # Norms and biases start as ones and zeros: with them a contender that mixed some up would still agree.
    draws = torch.Generator().manual_seed(SEED)
    return {
        name: value if value.dim() > 1 else value + 0.02 * torch.randn(value.shape, generator=draws)
        for name, value in found.items()
    }


PLAIN_NAMES = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "qkv": "attention.qkv",
    "out": "attention.out",
    "up": "mlp.up",
    "down": "mlp.down",
}
"""plain_gpt's modules of a block, and megalite's."""


def plain_weights(case: Case) -> dict[str, torch.Tensor]:
    """The same by plain_gpt's names; its tensors are laid out as ours."""
    ours = first_weights(case)
    found = {
        "word.weight": ours["embedding.word.weight"],
        "position.weight": ours["embedding.position.weight"],
    }
    for part in ("weight", "bias"):
        found[f"norm.{part}"] = ours[f"final_norm.{part}"]
        for layer in range(case.size.layers):
            for theirs, name in PLAIN_NAMES.items():
                found[f"blocks.{layer}.{theirs}.{part}"] = ours[f"layers.{layer}.{name}.{part}"]
    return found


def adamw_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices and embeddings are decayed, norms and biases are not; each kind of tensor in groups of its own."""
    groups: dict[tuple[type, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((type(parameter.data), parameter.dim() > 1), []).append(parameter)
    return [
        {"params": members, "weight_decay": DECAY if decayed else 0.0}
        for (_, decayed), members in groups.items()
    ]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's fused AdamW."""
    return torch.optim.AdamW(adamw_groups(parameters), lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, *, scale: float = 1.0) -> None:
    """Scale gradients, whose global norm is `norm`, and then clip them to the norm `CLIP`, in one pass."""
    coefficient = scale * (CLIP / (norm * scale + 1e-6)).clamp(max=1.0)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, coefficient)


def squares(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Σg² of the gradients that are whole or of which this rank has a part, fp64 []."""
    norms = torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return torch.stack(norms).double().square().sum()


Build = Callable[[Case, Any], Contender]
"""Makes a contender on this rank; the other argument is the rank's `RankContext`."""
