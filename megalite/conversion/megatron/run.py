"""Read a `torch_dist` checkpoint with its training state: optimizer states, counters and settings.

Megatron-LM saves optimizer states in two forms. Without the distributed optimizer, and with
`--dist-ckpt-optim-fully-reshardable`, there is a tensor `optimizer.state.*` for each parameter. Otherwise the distributed
optimizer saves the flat buckets of each model-parallel rank: its parameters in reverse order, each aligned to 64 elements.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.conversion.megatron.arguments import Arguments
from megalite.conversion.megatron.dist import MegatronDistWeights, StoredTensor
from megalite.conversion.megatron.layout import Shard, Stage, stage_pieces
from megalite.conversion.megatron.read import is_first_copy
from megalite.conversion.megatron.torch_file import TorchFile
from megalite.conversion.weights import ConversionError, ReadWhole, Training, WeightPiece, fill

_STATES = {"exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "main_param": ("fp32_param", "param")}
"""Our state -> Megatron-LM's names. Main parameters have one name without and one with the distributed optimizer."""
_WHOLE = "optimizer.state."
_BUCKET = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)")
_ALIGNED = 64  # alignment of a parameter in a bucket, in elements


class MegatronRun(MegatronDistWeights):
    """Weights in the precision of the optimizer's main parameters, and `training`. Padding rows of the vocabulary are
    kept as tokens: Megatron-LM's softmax includes them, so the losses depend on them."""

    def __init__(self, step: Path) -> None:
        super().__init__(step, whole_vocabulary=True)
        states = self._whole_states() or self._bucket_states()
        if not {"exp_avg", "exp_avg_sq"} <= states.keys():
            raise ConversionError(
                f"{step} has no Adam states to continue from (--no-save-optim, or another optimizer); leave out "
                "--with-optimizer"
            )
        self._main = states.pop("main_param", None)
        self.training = Training(states=states, **_progress(self))

    def dtype(self, name: str) -> torch.dtype:
        return super().dtype(name) if self._main is None else torch.float32

    def read(self, name: str) -> torch.Tensor:
        return super().read(name) if self._main is None else self._main(name)

    def _whole_states(self) -> dict[str, ReadWhole]:
        found: dict[str, ReadWhole] = {}
        for state, names in _STATES.items():
            for name in names:
                prefix = f"{_WHOLE}{name}."
                stored = {key.removeprefix(prefix): each for key, each in self.stored.items() if key.startswith(prefix)}
                if stored:
                    try:
                        found[state] = partial(self.read_from, self.whole_tensors(stored))
                    except ConversionError as error:
                        raise ConversionError(f"{error} (in {prefix}*)") from None
        return found

    def _bucket_states(self) -> dict[str, ReadWhole]:
        buckets: dict[tuple[int, int], dict[str, dict[int, StoredTensor]]] = {}
        for key, stored in self.stored.items():
            if match := _BUCKET.fullmatch(key):
                group, buffer, bucket = (int(match[index]) for index in (1, 2, 3))
                buckets.setdefault((group, buffer), {}).setdefault(match[4], {})[bucket] = stored
        if not buckets:
            return {}
        sinks = self.model.softmax_type == "learnable"
        if self.model.num_experts or self.model.multi_latent_attention or sinks:
            raise ConversionError(
                f"{self.path} has a distributed optimizer's states of experts, latent attention or sinks in buckets; "
                f"{_RESHARDABLE}"
            )
        places = _Buckets(self, self.args, buckets)
        names = {state: name for state, names in _STATES.items() for name in names if name in places.kinds}
        return {state: partial(places.read, name) for state, name in names.items()}


@dataclass(frozen=True)
class _Slice:
    """The location of a rank's slice of one of our tensors: buffer, bucket and first element."""

    piece: WeightPiece
    buffer: tuple[int, int]
    bucket: int
    start: int


class _Buckets:
    """The buckets of all model-parallel ranks. `buckets`: by (rank, buffer), name of the state and bucket index."""

    def __init__(
        self,
        weights: MegatronDistWeights,
        args: Arguments,
        buckets: Mapping[tuple[int, int], Mapping[str, Mapping[int, StoredTensor]]],
    ) -> None:
        self._weights, self._buckets = weights, buckets
        self.kinds = set.intersection(*(set(kinds) for kinds in buckets.values()))
        self._slices: dict[str, list[_Slice]] = {name: [] for name in weights.shapes}
        local = args.get("transformer_impl") == "local"
        for buffer, shard, stage in self._stages(args):
            if buffer not in buckets:
                raise ConversionError(f"{weights.path} lacks the buckets of model-parallel rank {buffer[0]}")
            for piece in self._placed(buffer, shard, stage, local):
                if is_first_copy(piece.piece, weights.shapes[piece.piece.parameter], shard):
                    self._slices[piece.piece.parameter].append(piece)

    def _stages(self, args: Arguments) -> Iterator[tuple[tuple[int, int], Shard, Stage]]:
        tp, pp = args.integer("tensor_model_parallel_size", 1), args.integer("pipeline_model_parallel_size", 1)
        chunks = args.integer("virtual_pipeline_model_parallel_size", 1)
        layers = self._weights.model.num_layers
        each = layers // (pp * chunks)
        for index in range(pp * chunks):
            last = index == pp * chunks - 1
            stage = Stage(index * each, (index + 1) * each, has_embedding=index == 0, has_head=last)
            if last and stage.last != layers:
                raise ConversionError(
                    f"{args.path}: {layers} layers are split unevenly over {pp} ranks; {_RESHARDABLE}"
                )
            for tensor in range(tp):
                yield (tensor + tp * (index % pp), index // pp), Shard(tp, tensor), stage

    def _placed(self, buffer: tuple[int, int], shard: Shard, stage: Stage, local: bool) -> Iterator[_Slice]:
        """Yield the location of each parameter of a chunk. A bucket ends when it is full."""
        weights = self._weights
        sizes = self._sizes(buffer)
        bucket = cursor = 0
        every = stage_pieces(weights.model, stage, shard, vocabulary=weights.vocabulary)
        pieces = [piece for piece in every if not piece.name.endswith(".expert_bias")]  # a buffer without gradient
        for piece in reversed(_in_module_order(pieces, local)):
            start = -(-cursor // _ALIGNED) * _ALIGNED
            cursor = start + torch.Size(piece.shape).numel()
            if bucket == len(sizes) or cursor > sizes[bucket]:
                raise self._size_error(buffer)
            yield _Slice(piece, buffer, bucket, start)
            if -(-cursor // _ALIGNED) * _ALIGNED >= sizes[bucket]:
                bucket, cursor = bucket + 1, 0
        if bucket != len(sizes):
            raise self._size_error(buffer)

    def _sizes(self, buffer: tuple[int, int]) -> list[int]:
        buckets = self._buckets[buffer]["exp_avg"]
        return [buckets[bucket].shape[0] for bucket in sorted(buckets)]

    def _size_error(self, buffer: tuple[int, int]) -> ConversionError:
        return ConversionError(
            f"{self._weights.path}: the buckets of model-parallel rank {buffer[0]} have {self._sizes(buffer)} elements, "
            f"which do not match its args; {_RESHARDABLE}"
        )

    def read(self, kind: str, name: str) -> torch.Tensor:
        output = torch.zeros(self._weights.shapes[name].shape)
        for place in self._slices[name]:
            stored = self._buckets[place.buffer][kind][place.bucket]
            fill(place.piece.view(output), partial(self._elements, stored, place))
        return output

    def _elements(self, stored: StoredTensor, place: _Slice, start: int, count: int, _room: object) -> torch.Tensor:
        """Read elements [start, start + count) of a slice from the blocks that contain them."""
        first = place.start + start
        found, done = torch.empty(count, dtype=stored.dtype), 0
        for block in sorted(stored.pieces, key=lambda block: block.offsets):
            low, high = max(first, block.offsets[0]), min(first + count, block.offsets[0] + block.sizes[0])
            if low < high:
                file = self._weights.open_block(block, stored.dtype, place.piece.name)
                values = file.read(file.content, low - block.offsets[0], high - low)
                found[low - first : high - first] = values
                done += high - low
        if done != count:
            raise ConversionError(f"{self._weights.path}: the state of {place.piece.name} is incomplete")
        return found


_RESHARDABLE = "save it with --dist-ckpt-optim-fully-reshardable"
_LAYER_ORDER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1"),
    "mlp.linear_fc2",
)
"""Modules of a layer in the order in which megatron.core's local layers register them. In Transformer Engine's layers a
norm belongs to the linear layer after it, and precedes its weight."""


def _in_module_order(pieces: list[WeightPiece], local: bool) -> list[WeightPiece]:
    order = list(_LAYER_ORDER)
    if not local:
        order.remove("input_layernorm")
        order.insert(order.index("self_attention.linear_qkv"), "input_layernorm")

    def place(item: tuple[int, WeightPiece]) -> tuple[int, int]:
        index, piece = item
        parts = piece.name.split(".")
        if parts[1] != "layers":
            return (-1, index) if parts[0] == "embedding" else (len(pieces), index)
        return int(parts[2]), order.index(".".join(parts[3:-1])) * 2 + (parts[-1] == "bias")

    return [piece for _, piece in sorted(enumerate(pieces), key=place)]


_SETTINGS: Mapping[str, Sequence[str]] = {
    "training": ("seed", "seq_length", "micro_batch_size", "global_batch_size", "train_iters", "train_samples"),
    "data": ("split", "data_path", "train_data_path", "valid_data_path", "test_data_path"),
    "optimizer": (
        *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
        *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_iters"),
        *("lr_wsd_decay_samples", "lr_wsd_decay_style", "weight_decay", "weight_decay_incr_style"),
        *("start_weight_decay", "end_weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    ),
}
"""Settings with the same name and meaning in Megatron-LM, by section."""
_FILLED_IN = {"lr_decay_iters": "train_iters", "lr_decay_samples": "train_samples"}
"""Arguments that Megatron-LM fills in with the value of another one."""


def _progress(run: MegatronRun) -> dict[str, Any]:
    """Return step, counters and settings of the run, as arguments of `Training`."""
    args, content = run.args, run.common.content
    step = content.get("iteration")
    samples = args.get("consumed_train_samples")
    if not _is_count(step) or not _is_count(samples):
        raise ConversionError(f"{args.path} lacks the progress of its run: iteration {step!r}, samples {samples!r}")
    file, states = _state_dict(run)
    updates = next(filter(None, (_number(file, value) for value in _named(states, ("common_step", "step")))), step)
    scheduler = content.get("opt_param_scheduler")
    scheduled = scheduler.get("num_steps", samples) if isinstance(scheduler, dict) else samples
    scaler: dict[str, Any] = {}
    if _is_count(scheduled) and scheduled < samples:
        scaler |= {"skipped_steps": step - int(updates), "skipped_samples": samples - scheduled}
    kept = next(_named(states, ("grad_scaler",)), None)
    if isinstance(kept, dict) and "growth_tracker" in kept:
        names = {"scale": "scale", "good_steps": "growth_tracker", "overflows_left": "hysteresis_tracker"}
        scaler |= {ours: _number(file, kept.get(theirs)) or 0 for ours, theirs in names.items()}
    counters = {"step": step, "consumed_samples": samples, "optimizer_updates": int(updates), "loss_scaler": scaler}
    return {"step": step, "counters": counters, "config": _settings(args)}


def _state_dict(run: MegatronRun) -> tuple[TorchFile, Any]:
    """Return the file and content of the optimizer's state dict, without the tensors in parameter shape."""
    place = run.objects.get("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1")
    if place is None:
        return run.common, run.common.content.get("optimizer")
    file = run.open_bytes(place)
    return file, file.content


def _named(content: Any, names: Sequence[str], depth: int = 6) -> Iterator[Any]:
    """Yield the values of these keys in nested dicts and lists."""
    if depth and isinstance(content, dict):
        for key, value in content.items():
            if key in names:
                yield value
            yield from _named(value, names, depth - 1)
    elif depth and isinstance(content, list):
        for value in content[:100]:
            yield from _named(value, names, depth - 1)


def _number(file: TorchFile, value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(file.read(value, 0, 1).item()) if value.numel() == 1 else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _settings(args: Arguments) -> dict[str, dict[str, Any]]:
    """Return the known settings in the args, by section. A resuming run compares its settings with them."""
    found: dict[str, dict[str, Any]] = {}
    for section, names in _SETTINGS.items():
        values = {name: args.get(name) for name in names}
        found[section] = {name: value for name, value in values.items() if value is not None}
    training, optimizer = found["training"], found["optimizer"]
    training["precision"] = "bf16" if args.flag("bf16", False) else "fp16" if args.flag("fp16", False) else "fp32"
    found["data"]["data_order"] = optimizer["lr_schedule_offset"] = "megatron"
    for name, other in _FILLED_IN.items():
        if optimizer.get(name) == args.get(other):
            optimizer.pop(name, None)
    for name in ("lr_warmup_iters", "lr_warmup_samples"):
        if optimizer.get(name) == 0:
            del optimizer[name]
    if optimizer.get("weight_decay_incr_style", "constant") == "constant":
        optimizer.pop("start_weight_decay", None)
        optimizer.pop("end_weight_decay", None)
    return found
