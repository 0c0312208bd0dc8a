"""Hugging Face's picotron on a CPU as a contender of peers.run: its Llama, its layers, buckets and 1F1B.

Its step does not clip, and sums the microbatches of a pipeline instead of averaging them: both are corrected here, so that
it trains the same model. flash_attn is stubbed: picotron imports it, but does not use it on a CPU."""

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks import common
from benchmarks.peers.case import Case, adamw, clip, first_weights, model_of, squares

_STUBS = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}
_COLUMNS = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "final_proj", "embedding")
_ROWS = ("out_proj", "down_proj")
"""Parameters that tensor parallelism splits along dimension 0, and along dimension 1."""
_CONFIG = common.settings(
    "hidden_size=hidden_size num_attention_heads=num_attention_heads num_key_value_heads=num_attention_heads "
    "num_hidden_layers=num_layers intermediate_size=ffn_size vocab_size=vocab_size rms_norm_eps=norm_epsilon "
    "rope_theta=rotary_base max_position_embeddings=max_position_embeddings"
)
"""Setting of picotron -> of megalite."""
_WEIGHTS = {
    "attention.out_proj": "attention.out",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
_ENDS = {"embedding": "embedding.word", "final_norm": "final_norm", "final_proj": "head"}
"""Module of picotron -> of megalite, where the layout of the tensors is the same."""


def prepare(folder: str, rank: int) -> None:
    """Make the package in `folder` importable; further calls do nothing."""
    if folder in sys.path:
        return
    sys.path.insert(0, folder)
    os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32", "CONTEXT_PARALLEL": "0"}
    os.environ["LOCAL_RANK"] = str(rank)
    for name, function in _STUBS.items():
        words = name.split(".")
        for end in range(1, len(words) + 1):
            sys.modules.setdefault(".".join(words[:end]), types.ModuleType(".".join(words[:end])))
        setattr(sys.modules[name], function, None)
    torch.cuda.synchronize = lambda *_: None


class Batches(Iterator[dict[str, torch.Tensor]]):
    """The part of a data loader that picotron's step uses."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.grad_acc_steps = len(parts)
        self._parts = iter(parts)

    def __next__(self) -> dict[str, torch.Tensor]:
        part = next(self._parts)
        places = torch.arange(part.shape[1] - 1).expand(part.shape[0], -1)
        return {"input_ids": part[:, :-1], "target_ids": part[:, 1:], "position_ids": places}


class Picotron:
    def __init__(self, case: Case) -> None:
        import picotron.process_group_manager as pgm
        from picotron.data_parallel.data_parallel import DataParallelBucket
        from picotron.model import Llama
        from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
        from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

        self._case, layout, ours = case, case.layout, model_of(case)
        pgm.setup_process_group_manager(layout.tp, 1, layout.pp, layout.dp)
        self._groups = pgm.process_group_manager
        config = types.SimpleNamespace(**{theirs: getattr(ours, name) for theirs, name in _CONFIG.items()})
        model = Llama(config)
        if layout.tp > 1:
            model = apply_tensor_parallel(model)
        if layout.pp > 1:
            model = PipelineParallel(model, config)
        _load(model, weights_of(case), self._groups.tp_rank, layout.tp)
        self._parameters = list(model.parameters())
        # replicated over tp: counted once in the norm
        self._split = [p for name, p in model.named_parameters() if layout.tp > 1 and _dim(name) is not None]
        self._model = DataParallelBucket(model) if layout.dp > 1 else model
        self._optimizer = adamw(self._parameters)

    def step(self, tokens: torch.Tensor) -> float:
        case, layout = self._case, self._case.layout
        self._optimizer.zero_grad()
        batches = Batches(case.share(tokens, self._groups.dp_rank))
        count, loss = batches.grad_acc_steps, 0.0
        if layout.pp > 1:
            from picotron.pipeline_parallel.pipeline_parallel import train_step_pipeline_1f1b

            shape = (case.size.micro, case.size.seq, case.size.hidden)
            loss = train_step_pipeline_1f1b(self._model, batches, shape, torch.device("cpu"), torch.float32)
        else:
            for index, batch in enumerate(batches):
                if layout.dp > 1:
                    self._model.require_backward_grad_sync = index == count - 1
                logits = self._model(input_ids=batch["input_ids"])
                mean = F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten()) / count
                mean.backward()
                loss += mean.item()
        clip(self._parameters, self._norm(), scale=1.0 / count if layout.pp > 1 else 1.0)
        self._optimizer.step()
        if layout.dp > 1:
            self._model.reset()
        return loss / layout.dp / layout.tp

    def _norm(self) -> torch.Tensor:
        """Global norm of the gradients, fp32 []."""
        layout = self._case.layout
        if layout.tp > 1:
            split = set(self._split)
            own, total = squares(self._split), squares(p for p in self._parameters if p not in split)
            dist.all_reduce(own)
            total = total + own
        else:
            total = squares(self._parameters)
            if layout.pp > 1:
                dist.all_reduce(total)
        return total.sqrt().float()


def weights_of(case: Case) -> dict[str, torch.Tensor]:
    size, ours = case.size, first_weights(case)
    found = {f"{theirs}.weight": ours[f"{name}.weight"] for theirs, name in _ENDS.items()}
    for layer in range(size.layers):
        us, them = f"layers.{layer}", f"decoder_layers.{layer}"
        qkv = ours[f"{us}.attention.qkv.weight"].view(size.heads, 3, size.head, -1)
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            found[f"{them}.attention.{name}.weight"] = qkv[:, index].flatten(0, 1)
        gate, up = ours[f"{us}.mlp.up.weight"]
        found |= {f"{them}.mlp.gate_proj.weight": gate, f"{them}.mlp.up_proj.weight": up}
        for theirs, name in _WEIGHTS.items():
            found[f"{them}.{theirs}.weight"] = ours[f"{us}.{name}.weight"]
    return found


def _dim(name: str) -> int | None:
    """The dimension that tensor parallelism splits."""
    module = name.split(".")[-2]
    return 0 if module in _COLUMNS else 1 if module in _ROWS else None


@torch.no_grad()
def _load(model: nn.Module, weights: dict[str, torch.Tensor], tp_rank: int, tp: int) -> None:
    for name, parameter in model.named_parameters():
        whole, dim = weights[name], _dim(name)
        parameter.copy_(whole if dim is None else whole.chunk(tp, dim)[tp_rank])


def build(case: Case, context: Any) -> Picotron:
    prepare(dict(case.folders)["picotron"], context.rank)
    return Picotron(case)
