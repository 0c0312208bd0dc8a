"""A `torch_dist` folder as megatron.core saves it: blocks of tensors, torch's own `.metadata` classes, `common.pt`."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.conversion.megatron import builder
from tests.conversion.samples import MadeUp

Block = tuple[tuple[int, ...], torch.Tensor]  # offset, elements


def model_blocks(weights: MadeUp, tp: int, *, stacked: bool) -> dict[str, tuple[tuple[int, ...], list[Block]]]:
    """Name -> global shape and blocks of each rank. `stacked`: layers are one tensor with the layer as first dimension;
    experts are always stacked."""
    model = weights.model
    found: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    ranks = [
        builder.fuse(builder.stage(weights, range(model.num_layers), tp, r, first=True, last=True)) for r in range(tp)
    ]
    for name, first in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        key, leading, counts = _stack(name, model.num_layers if stacked else 0, model.num_experts or 0)
        dim = _dim(name)
        if dim is None:
            blocks, shape = [((0,) * first.dim(), first)], first.shape
        else:
            pieces = [half for part in parts for half in _halves(name, part, model.is_gated)]
            if len(pieces) > len(parts):  # all gates, then all ups
                pieces = pieces[::2] + pieces[1::2]
            shape = torch.Size([*first.shape[:dim], sum(p.shape[dim] for p in pieces), *first.shape[dim + 1 :]])
            blocks, done = [], 0
            for piece in pieces:
                blocks.append((tuple(done if axis == dim else 0 for axis in range(first.dim())), piece))
                done += piece.shape[dim]
        _, held = found.setdefault(key, ((*counts, *shape), []))
        for start, block in blocks:
            held.append(((*leading, *start), block.reshape((1,) * len(leading) + block.shape).clone()))
    return found


def _stack(name: str, layers: int, experts: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(key, indices of this tensor, sizes of their dimensions)."""
    parts, leading, counts = name.split("."), [], []
    if layers and name.startswith("decoder.layers."):
        leading, counts = [int(parts.pop(2))], [layers]
    if "local_experts" in parts:
        place = parts.index("local_experts")
        leading, counts = [*leading, int(parts[place + 1])], [*counts, experts]
        parts[place : place + 2] = ["experts"]
    return ".".join(parts), tuple(leading), tuple(counts)


def _dim(name: str) -> int | None:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1
    split = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", "softmax_offset")
    return 0 if name.endswith((*split, "word_embeddings.weight", "output_layer.weight")) else None


def _halves(name: str, part: torch.Tensor, gated: bool) -> tuple[torch.Tensor, ...]:
    """Split one rank's fc1 of a gated MLP, which is saved as two blocks."""
    return part.chunk(2) if gated and ("linear_fc1.weight" in name or "linear_fc1.bias" in name) else (part,)


def save(folder: Path, weights: MadeUp, *, tp: int = 1, stacked: bool = True, **args: Any) -> Path:
    """Save iter_0000007 and the tracker, with one file of blocks per rank."""
    step = folder / "iter_0000007"
    step.mkdir(parents=True)
    torch.save(
        {"args": builder.arguments(weights, tp, 1, **args), "iteration": 7, "checkpoint_version": 3.0},
        step / "common.pt",
    )
    tensors = model_blocks(weights, tp, stacked=stacked)
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = (32,), [((0,), torch.zeros(32))]
    pickled = pickle.dumps(metadata(step, tensors))
    (step / ".metadata").write_bytes(pickled)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def metadata(step: Path, tensors: dict[str, tuple[tuple[int, ...], list[Block]]]) -> Metadata:
    """The metadata that torch writes for blocks in several files."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    items = []
    for number, (name, (shape, blocks)) in enumerate(tensors.items()):
        chunks = [ChunkStorageMetadata(torch.Size(start), block.shape) for start, block in blocks]
        properties = TensorProperties(dtype=blocks[0][1].dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        file = f"__{number % 2}_0.distcp"
        for chunk, (_, block) in zip(chunks, blocks, strict=True):
            index = MetadataIndex(name, chunk.offsets)
            data = TensorWriteData(chunk, properties, torch.Size(shape))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
            places[index] = _append(step / file, block, file)
    entries["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"] = BytesStorageMetadata()
    places[MetadataIndex("decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2")] = _append(
        step / "__0_0.distcp", io.BytesIO(b"fp8"), "__0_0.distcp"
    )
    found = Metadata(entries, None, places, StorageMeta(checkpoint_id=str(step), save_id="x"))
    found.all_local_plans = [SavePlan(items)]  # type: ignore[attr-defined]
    return found


def _append(path: Path, value: Any, name: str) -> _StorageInfo:
    data = io.BytesIO()
    torch.save(value, data)
    with path.open("ab") as file:
        start = file.tell()
        file.write(data.getvalue())
    return _StorageInfo(name, start, len(data.getvalue()))
