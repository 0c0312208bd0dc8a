"""Part 4's peers on the same device: a GPT in plain PyTorch under torch.compile, in nanoGPT's manner, and Hugging Face's.

Both keep fp32 weights, compute under autocast in bf16, and take a step with torch's fused AdamW and clipping, as
megalite does: same sizes, same number of tokens, no recomputation.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_legs import Row, Task
from gpu_step import WARM_UP, config_of, peak_gib, repeats, reset_peak, speed, synchronise
from torch import nn

from megalite.config.model import ModelConfig
from megalite.config.run import RunConfig
from megalite.training.throughput import device_peak_tflops


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]."""
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(h, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Network(nn.Module):
    """Learned positions, tied embeddings; tokens and labels -> mean loss."""

    def __init__(self, model: ModelConfig, seq_length: int) -> None:
        super().__init__()
        h = model.hidden_size
        self.word, self.position = nn.Embedding(model.padded_vocab_size, h), nn.Embedding(seq_length, h)
        self.blocks = nn.ModuleList([Block(h, model.num_attention_heads) for _ in range(model.num_layers)])
        self.norm = nn.LayerNorm(h)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[b, s], [b, s] -> []."""
        x = self.word(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.loss(x, labels)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of the last block's output."""
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def plain_network(config: RunConfig, device: torch.device, *, compiled: bool) -> Callable[..., torch.Tensor]:
    """`Network` on a device. Compiled block by block: one block's code serves all, so it takes seconds, not minutes."""
    with device:
        network = Network(config.model, config.training.seq_length)
    if compiled:
        for block in network.blocks:
            block.compile(dynamic=False, fullgraph=True)
        network.loss = torch.compile(network.loss, dynamic=False, fullgraph=True)  # type: ignore[method-assign]
    return network


def hugging_face(config: RunConfig, device: torch.device) -> Callable[..., torch.Tensor]:
    """Their GPT-2 of the same sizes, with torch's attention."""
    library = importlib.import_module("transformers")  # it takes seconds, and the other peer needs it not
    model = config.model
    settings = library.GPT2Config(
        vocab_size=model.padded_vocab_size,
        n_positions=config.training.seq_length,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    with device:
        network = library.GPT2LMHeadModel(settings)
    network.train()

    class Loss(nn.Module):
        """Tokens and labels -> mean loss."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """[b, s], [b, s] -> []."""
            logits = self.network(input_ids=tokens).logits
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Loss()


def rows(task: Task) -> Iterator[Row]:
    """A row an entry of `accumulations`."""
    device = torch.device(task["device"])
    common = {
        "part": "step",
        "who": task["who"],
        "model": task["model"],
        "precision": task["precision"],
        "microbatch": task["microbatch"],
    }
    if task["peer"] == "huggingface" and importlib.util.find_spec("transformers") is None:
        yield {**common, "failed": "transformers is not installed"}
        return
    # As megalite leaves it: fp32 products in full, which autocast does not touch.
    torch.manual_seed(1)
    config = config_of(task["model"], device=task["device"], microbatch=task["microbatch"], accumulation=1)
    if task["peer"] == "huggingface":
        network = hugging_face(config, device)
    else:
        network = plain_network(config, device, compiled=task["compiled"])
    step = _stepper(network, config, device, half=task["precision"] == "bf16")
    for accumulation in task["accumulations"]:
        losses = [step(accumulation).item() for _ in range(WARM_UP)]
        reset_peak(device)
        seconds = []
        for _ in range(repeats(task["steps"], accumulation)):
            synchronise(device)
            start = time.perf_counter()
            losses.append(step(accumulation).item())
            seconds.append(time.perf_counter() - start)
        measured = speed(
            seconds,
            model=config.model,
            seq_length=config.training.seq_length,
            samples=accumulation * task["microbatch"],
            peak_tflops=device_peak_tflops(config, device),
        )
        yield {
            **common,
            "accumulation": accumulation,
            **measured,
            "peak_gib": peak_gib(device),
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }


def _stepper(
    network: Any, config: RunConfig, device: torch.device, *, half: bool
) -> Callable[[int], torch.Tensor]:
    """A training step over so many microbatches; returns its loss."""
    training, parameters = config.training, list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    draws = torch.Generator().manual_seed(1)
    vocab = config.model.vocab_size
    assert vocab is not None

    def step(accumulation: int) -> torch.Tensor:
        losses = []
        for _ in range(accumulation):
            shape = (training.micro_batch_size, training.seq_length + 1)
            tokens = torch.randint(0, vocab, shape, generator=draws)
            if device.type == "cuda":
                tokens = tokens.pin_memory()
            tokens = tokens.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss = network(tokens[:, :-1], tokens[:, 1:]) / accumulation
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return step
