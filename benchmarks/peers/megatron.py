"""NVIDIA's megatron-core on a CPU as a contender of peers.run, in all its layouts.

The package is as pip installs it, without Transformer Engine and apex: its local layers, DDP, optimizer and pipeline
schedules, with CUDA-only fusions off. Its calls of CUDA are redirected to the CPU."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.peers.case import CLIP, DECAY, LR, Case, first_weights

_REDIRECTED = ("arange", "empty", "full", "ones", "tensor", "zeros")

NAMES = common.settings(
    "embedding.word_embeddings=embedding.word embedding.position_embeddings=embedding.position output_layer=embedding.word "
    "decoder.final_layernorm=final_norm input_layernorm=attention_norm self_attention.linear_qkv=attention.qkv "
    "self_attention.linear_proj=attention.out pre_mlp_layernorm=mlp_norm mlp.linear_fc1=mlp.up mlp.linear_fc2=mlp.down"
)
"""Module of megatron-core -> of megalite; the layout of the tensors is the same."""
OFF = ("hidden_dropout", "attention_dropout", "perform_initialization", "persist_layer_norm", "bias_activation_fusion")
OFF += ("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion")


def _on_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs or tensor.dtype != torch.float32:
        return _plain_type(tensor, *args, **kwargs)
    return "torch.cuda.FloatTensor"  # gradient clipping requires this type


_plain_type = torch.Tensor.type


def redirect_cuda(folder: str) -> None:
    """Make the package in `folder` importable and redirect its CUDA calls to the CPU; further calls do nothing."""
    if folder in sys.path:
        return
    sys.path.insert(0, folder)
    for name in _REDIRECTED:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for owner, name, answer in (
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", _type_of),
    ):
        setattr(owner, name, answer)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    # No random state is needed: there is no dropout, and the weights are loaded.
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


class Megatron:
    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer import TransformerConfig

        self._case, layout, size = case, case.layout, case.size
        virtual = layout.vpp if layout.vpp > 1 else None
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(layout.tp, layout.pp, virtual, create_gloo_process_groups=False)
        self._dp_rank = parallel_state.get_data_parallel_rank()
        sizes = {"num_layers": size.layers, "hidden_size": size.hidden, "num_attention_heads": size.heads}
        split = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
        split["virtual_pipeline_model_parallel_size"] = virtual
        # Two ranks that are each other's next and previous would confuse batched messages. Overlapped messages are still
        # being sent when outputs are freed: gloo, unlike CUDA's streams, would send whatever was written there since.
        one = layout.vpp == 1
        messages = {"batch_p2p_comm": one, "overlap_p2p_comm": not one, "deallocate_pipeline_outputs": one}
        messages["pipeline_dtype"] = torch.float32 if layout.pp > 1 else None
        off = {**dict.fromkeys(OFF[:2], 0.0), **dict.fromkeys(OFF[2:], False)}
        config = TransformerConfig(**sizes, **split, **messages, **off, use_cpu_initialization=True)
        self._chunks = self._build_chunks(config)
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = [chunk.no_sync for chunk in self._chunks]
        if len(self._chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
        settings = OptimizerConfig(optimizer="adam", lr=LR, weight_decay=DECAY, adam_eps=1e-8, clip_grad=CLIP)
        self._optimizer = get_megatron_optimizer(settings, self._chunks, use_gloo_process_groups=False)
        for group in self._optimizer.param_groups:
            group.update(fused=True, foreach=False)  # as megalite does; the default is Transformer Engine's
        self._run = get_forward_backward_func()

    def _build_chunks(self, config: Any) -> list[Any]:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        size, layout = self._case.size, self._case.layout
        weights = first_weights(self._case)
        chunks = []
        for index in range(layout.vpp):
            place = {"ignore_virtual": False, "vp_stage": index if layout.vpp > 1 else None}
            model = GPTModel(
                *(config, get_gpt_layer_local_spec(), size.vocab, size.seq),
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
                share_embeddings_and_output_weights=True,
                position_embedding_type="learned_absolute",
                vp_stage=place["vp_stage"],
            )
            _load(model, weights, parallel_state.get_tensor_model_parallel_rank())
            reduction = DistributedDataParallelConfig(overlap_grad_reduce=layout.dp > 1)
            chunks.append(DistributedDataParallel(config, reduction, model))
        return chunks

    def step(self, tokens: torch.Tensor) -> float:
        case = self._case
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        parts = case.share(tokens, self._dp_rank)
        losses = self._run(
            forward_step_func=_forward_step,
            data_iterator=[iter(parts) for _ in self._chunks],
            model=self._chunks,
            forward_only=False,
            num_microbatches=case.microbatches,
            seq_length=case.size.seq,
            micro_batch_size=case.size.micro,
        )
        self._optimizer.step()
        layout = case.layout
        return sum(float(loss["loss"]) for loss in losses) / case.microbatches / layout.dp / layout.tp


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    part = next(data)
    places = torch.arange(part.shape[1] - 1).expand(part.shape[0], -1)
    losses = model(part[:, :-1], places, None, labels=part[:, 1:])

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.mean()
        return loss, {"loss": loss.detach().clone()}  # the caller divides `loss` in place

    return losses, mean


@torch.no_grad()
def _load(model: Any, weights: dict[str, torch.Tensor], tp_rank: int) -> None:
    layers = enumerate(model.decoder.layers)
    numbers = {f"decoder.layers.{place}": layer.layer_number - 1 for place, layer in layers}
    for name, parameter in model.named_parameters():
        module, _, part = name.rpartition(".")
        prefix = ".".join(module.split(".")[:3])
        if prefix in numbers:
            ours = f"layers.{numbers[prefix]}.{NAMES[module[len(prefix) + 1 :]]}.{part}"
        else:
            ours = f"{NAMES[module]}.{part}"
        whole = weights[ours]
        for dim, extent in enumerate(parameter.shape):
            whole = whole.split(extent, dim)[tp_rank if whole.shape[dim] > extent else 0]
        parameter.copy_(whole)


def build(case: Case, context: Any) -> Megatron:
    redirect_cuda(dict(case.folders)["megatron-core"])
    dist.barrier()
    return Megatron(case)
