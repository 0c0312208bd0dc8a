"""What all contenders of peers.run share: models, layouts, batches, initial weights and optimizer.

Each rank of a `Case` builds its contender, which then trains: the same global batches, one microbatch at a time, the
gradient of the mean loss, clipping by the global norm, AdamW with decay of matrices and embeddings only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks import common
from benchmarks.peers.plain_gpt import Size
from megalite.config.model import ModelConfig
from megalite.models.gpt import GPTStage
from megalite.models.shapes import StageLayers
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group

LR, DECAY, CLIP, SEED = 1e-3, 0.01, 1.0, 1234
GPT2, LLAMA = "gpt2", "llama"
FAMILIES = {
    GPT2: "",
    LLAMA: "normalization=RMSNorm activation=swiglu position_embedding_type=rope add_bias_linear=false tie_embeddings=false",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes, and threads per rank."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    threads: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


LAYOUTS = {"1": Layout(), "1.2threads": Layout(threads=2), "dp2": Layout(dp=2), "tp2": Layout(tp=2)}
LAYOUTS |= {"pp2": Layout(pp=2), "pp2.vpp2": Layout(pp=2, vpp=2)}


@dataclass(frozen=True, kw_only=True)
class Case:
    size: Size
    layout: Layout
    family: str = GPT2
    bf16: bool = False
    schedule: str | None = None
    """Pipeline schedule instead of megalite's default; it decides how the layers are cut."""
    batch_peers: bool = False  # run peers under SCHED_BATCH, as megalite's ranks are
    folders: tuple[tuple[str, str], ...] = ()  # contender -> folder of its package if it is not installed

    @property
    def microbatches(self) -> int:
        """Microbatches per step on one data-parallel rank."""
        return self.size.batch // self.size.micro // self.layout.dp

    def share(self, tokens: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return the microbatches [b, s + 1] of a data-parallel rank, dealt round-robin."""
        return list(tokens.split(self.size.micro))[rank :: self.layout.dp]


class Contender(Protocol):
    """One rank of a system that trains."""

    def step(self, tokens: torch.Tensor) -> float:
        """Train on the global batch [batch, s + 1]. Returns this rank's part of the loss; the parts of all ranks sum to it."""
        ...


def batch_of(size: Size, step: int) -> torch.Tensor:
    """Tokens of a step, [batch, s + 1], the same on all ranks."""
    draws = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, size.vocab, (size.batch, size.seq + 1), generator=draws)


def model_of(case: Case) -> ModelConfig:
    size = case.size
    sizes = {"num_layers": size.layers, "hidden_size": size.hidden, "num_attention_heads": size.heads}
    family = common.settings(FAMILIES[case.family])
    return ModelConfig(**sizes, vocab_size=size.vocab, max_position_embeddings=size.seq, **family)


def first_weights(case: Case) -> dict[str, torch.Tensor]:
    """megalite's initial weights in fp32 by megalite's names; every contender starts from them."""
    model = model_of(case)
    factory = ParameterFactory(tp=Group.solo("tp"), seed=SEED, dtype=torch.float32, device=torch.device("cpu"))
    part = StageLayers(first_layer=0, last_layer=model.num_layers, has_embedding=True, has_head=True)
    stage = GPTStage(model, part, factory=factory, seq_length=case.size.seq)
    found = {}
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        found[parameter.info.spec.name] = parameter.detach()
    # Norms and biases start as ones and zeros, so a contender that confused two of them would still agree.
    draws = torch.Generator().manual_seed(SEED)
    return {
        name: value if value.dim() > 1 else value + 0.02 * torch.randn(value.shape, generator=draws)
        for name, value in found.items()
    }


PLAIN_NAMES = {"norm1": "attention_norm", "norm2": "mlp_norm", "qkv": "attention.qkv", "out": "attention.out"}
PLAIN_NAMES |= {"up": "mlp.up", "down": "mlp.down"}  # module of a block in plain_gpt -> in megalite


def plain_weights(case: Case) -> dict[str, torch.Tensor]:
    """`first_weights` by plain_gpt's names; the layout of the tensors is the same."""
    ours = first_weights(case)
    found = {f"{name}.weight": ours[f"embedding.{name}.weight"] for name in ("word", "position")}
    for part in ("weight", "bias"):
        found[f"norm.{part}"] = ours[f"final_norm.{part}"]
        for layer in range(case.size.layers):
            for theirs, name in PLAIN_NAMES.items():
                found[f"blocks.{layer}.{theirs}.{part}"] = ours[f"layers.{layer}.{name}.{part}"]
    return found


def adamw_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Decay matrices and embeddings, not norms and biases; a separate group per tensor type."""
    groups: dict[tuple[type, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((type(parameter.data), parameter.dim() > 1), []).append(parameter)
    decays = {True: DECAY, False: 0.0}
    return [{"params": members, "weight_decay": decays[matrix]} for (_, matrix), members in groups.items()]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(adamw_groups(parameters), lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)


def clip(parameters: Iterable[nn.Parameter], norm: torch.Tensor, *, scale: float = 1.0) -> None:
    """Multiply gradients of global norm `norm` by `scale`, then clip them to the norm `CLIP`, in one pass."""
    coefficient = scale * (CLIP / (norm * scale + 1e-6)).clamp(max=1.0)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(grads, coefficient)


def squares(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Σg² of the gradients, or parts of gradients, on this rank; fp64 []."""
    norms = torch._foreach_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return torch.stack(norms).double().square().sum()
