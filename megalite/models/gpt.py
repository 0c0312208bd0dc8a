"""`GPTStage`: the part of a GPT in one virtual pipeline stage. With one stage it is the whole model."""

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config.errors import ConfigError, RankError
from megalite.config.model import BLOCKS, ModelConfig
from megalite.config.training import LOSSES
from megalite.context_parallel.tiles import Visibility
from megalite.kernels.bases import Module
from megalite.kernels.layer_ops import attention_factor, dropout_mask, masked_dropout, rope_frequencies, rope_tables
from megalite.kernels.matmul import Products
from megalite.kernels.quantization import Fp8Products
from megalite.models.block import Block, MTPBlock, run_layers
from megalite.models.context import (
    AuxiliaryLosses,
    ForwardContext,
    KeyValueCache,
    MTPInputs,
    NextTokens,
    document_position_ids,
    query_factors,
)
from megalite.models.norm import Norm
from megalite.models.recompute import ActivationOffload, Recompute
from megalite.models.shapes import StageLayers
from megalite.tensor_parallel.layers import VocabParallelEmbedding, linear
from megalite.tensor_parallel.mappings import gather_from_tensor_parallel_region, scatter_to_sequence_parallel_region
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tensor_parallel.random import DropoutStream
from megalite.topology.layout import Spans, sequence_spans


class Embedding(Module):
    """Word plus learned position embedding (if any), then dropout: tokens [b, s] -> [s, b, h]."""

    def __init__(self, config: ModelConfig, *, factory: ParameterFactory, tied: bool, uses: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.dropout = config.hidden_dropout
        self.scale = config.embedding_scale
        self.region = factory.sequence_region
        shape, std = (config.padded_vocab_size, h), config.init_method_std
        self.word = VocabParallelEmbedding("embedding.word", shape, std=std, factory=factory, tied=tied, uses=uses)
        self.position: ShardedParameter | None = None
        if config.position_embedding_type == "learned_absolute":
            if config.max_position_embeddings is None:
                raise ConfigError(
                    "max_position_embeddings of the model is not set; pass validate(config, world_size).model"
                )
            shape = (config.max_position_embeddings, h)
            self.position = factory.parameter("embedding.position.weight", shape, std=std)

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """Tokens [b, s/cp] -> [s/cp, b, h], split over tp as well with sequence parallelism."""
        if (length := tokens.shape[1]) != (expected := context.positions.shape[0]):
            raise ValueError(f"{length} tokens with a context of {expected}; use context(seq_length={length})")
        x = self.word(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            ids = context.position_ids
            rows = F.embedding(ids if ids.dim() == 2 else ids.unsqueeze(1), self.position)
            x = x + scatter_to_sequence_parallel_region(rows, tp=self.region)
        keep = context.keep_mask(x, self.dropout, site="embedding", region=self.region)
        return masked_dropout(x, keep, self.dropout)


_TORCH = str(Path(torch.__file__).parent)


def token_losses(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Return a registered loss of each token [s, b], of logits [s, b, V] and labels [s, b]. Raises ConfigError: it fails,
    has another shape or dtype, or no gradient."""
    function = LOSSES.get(name)
    try:
        losses = function(logits, labels)
    except (ConfigError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):  # not, or not only, of the loss
        raise
    except Exception as error:
        _, *frames = traceback.extract_tb(error.__traceback__)
        frame = next((each for each in frames if not each.filename.startswith(_TORCH)), None)
        where = "" if frame is None else f" ({frame.name}, {frame.filename}:{frame.lineno})"
        raise ConfigError(f"loss {name} fails{where}: {type(error).__name__}: {error}") from error
    found, wanted = (
        f"{list(each.shape)} in {each.dtype}" if isinstance(each, Tensor) else type(each).__name__
        for each in (losses, logits[..., 0])
    )
    if found != wanted:
        raise ConfigError(
            f"loss {name} returns {found} for logits {list(logits.shape)} and labels {list(labels.shape)}; it must "
            f"return {wanted}, the loss of each token"
        )
    if logits.requires_grad and not losses.requires_grad:
        raise ConfigError(f"loss {name} has no gradient for its logits; compute it with differentiable operations")
    return losses


class Head(Module):
    """Final norm and projection to the vocabulary, with a separate weight or the word embedding's.

    `mtp`: the layers of multi-token prediction; they take the output of the norm and share the projection and the loss.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        weight: ShardedParameter,
        loss: str,
        mtp: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.vocab_size, self.softcap = config.vocab_size, config.final_logit_softcapping
        self.logit_scale = config.logit_scale
        self.weight = weight
        self.mtp = mtp
        self.norm = Norm("final_norm", config, factory=factory)
        self._products = Products(factory.kernel("matmul", config.hidden_size))
        self._loss = loss
        if loss in LOSSES.builtin:
            self._kernel = factory.kernel("cross_entropy", config.padded_vocab_size // factory.tp.size)

    def forward(self, x: Tensor, context: ForwardContext, labels: Tensor | None = None) -> Tensor:
        """[s, b, h] (or split over s) -> logits [s, b, V/tp], or with labels [b, s] the token losses [b, s]."""
        x = self.norm(x)
        if self.mtp is not None and context.mtp is not None:
            x = self.mtp(x, context, self._losses)
        return self._logits(x) if labels is None else self._losses(x, labels)

    def _logits(self, x: Tensor) -> Tensor:
        sp = self.sequence_parallel
        if self.logit_scale != 1.0:
            x = x * self.logit_scale
        logits = linear(x, self.weight, None, tp=self.tp, sequence_parallel=sp, products=self._products)
        # The product is new memory: the loss may overwrite it, and tanh saves its output.
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def _losses(self, x: Tensor, labels: Tensor) -> Tensor:
        logits, labels, size = self._logits(x), labels.t().contiguous(), self.vocab_size
        if self._loss in LOSSES.builtin:
            losses, first = LOSSES.get(self._loss), self.tp.rank * logits.shape[-1]
            return losses(logits, labels, first=first, vocab_size=size, tp=self.tp, kernel=self._kernel).t()
        logits = gather_from_tensor_parallel_region(logits, size=size, tp=self.tp)
        try:
            return token_losses(self._loss, logits.to(torch.promote_types(logits.dtype, torch.float32)), labels).t()
        except ConfigError as error:  # ranks without the head do not raise it
            raise RankError(str(error)) from error


class GPTStage(Module):
    """The layers of `part`, preceded by the embedding and followed by the head if they belong to the stage.

    With tied embeddings and only one of embedding and head, the weight is one of two copies. `word`: the weight of the
    embedding if another stage of this rank has it; the head then shares it. `loss`: one of `LOSSES`."""

    def __init__(
        self,
        config: ModelConfig,
        part: StageLayers,
        *,
        factory: ParameterFactory,
        seq_length: int,
        recompute: Recompute | None = None,
        cp_comm_type: str = "p2p",
        word: ShardedParameter | None = None,
        loss: str = "cross-entropy",
    ) -> None:
        super().__init__()
        self.config, self.factory, self.seq_length = config, factory, seq_length
        self.tp, self.device = factory.tp, factory.device
        self.recompute = recompute or Recompute()
        if self.recompute.offload_layers:
            saves = ActivationOffload(factory.device, self.recompute.offload_modules)
            self.recompute = replace(self.recompute, saves=saves)
        self.embedding: Embedding | None = None
        has_head, mtp_layers = part.has_head, config.mtp_num_layers
        if part.has_embedding:
            # One lookup; with the head in this stage also the lookups of the MTP layers and all logits.
            uses = 1 + has_head * (mtp_layers + config.tie_embeddings * (1 + mtp_layers))
            tied = (config.tie_embeddings or mtp_layers > 0) and not has_head
            self.embedding = Embedding(config, factory=factory, tied=tied, uses=uses)
        self.fp8: Fp8Products | None = None
        """Caches the fp8 weights of the stage's layers while they do not change."""
        self.layers = torch.nn.ModuleDict()
        for index in range(part.first_layer, part.last_layer):
            self.layers[str(index)] = BLOCKS.get(config.block)(
                index, config, factory=factory, recompute=self.recompute, cp_comm_type=cp_comm_type
            )
        self.head: Head | None = None
        if has_head:
            if self.embedding is not None:
                word = self.embedding.word.weight
            if word is None and (config.tie_embeddings or mtp_layers):
                uses = mtp_layers + config.tie_embeddings * (1 + mtp_layers)
                word = self._table("embedding.word", tied=True, uses=uses)
            mtp: torch.nn.Module | None = None
            if mtp_layers:
                assert word is not None
                mtp = MTPBlock(config, factory=factory, word=word, recompute=self.recompute, cp_comm_type=cp_comm_type)
            head = word if config.tie_embeddings else self._table("head", tied=False, uses=1 + mtp_layers)
            assert head is not None
            self.head = Head(config, factory=factory, weight=head, loss=loss, mtp=mtp)
        self._rows: dict[int, tuple[tuple[Spans, ...], Tensor]] = {}
        """Sequence length -> spans of each cp rank, and this rank's positions."""
        self._rope: dict[bool, tuple[Tensor, Tensor]] = {}  # local base (rotary_base_local) or not -> cos, sin
        layers = (*range(part.first_layer, part.last_layer), *(config.mtp_layers if has_head else ()))
        windows = {config.has_window(index) for index in layers}
        self._windowed = True in windows
        self._mixed = len(windows) > 1
        drops = config.hidden_dropout > 0.0 or config.attention_dropout > 0.0
        self._draw = factory.kernel("dropout_mask", config.hidden_size) if drops else dropout_mask

    def _usual_rows(self, length: int) -> tuple[tuple[Spans, ...], Tensor]:
        if length not in self._rows:
            cp = self.factory.cp.size
            spans = tuple(sequence_spans(length, cp_rank=rank, cp_size=cp) for rank in range(cp))
            self._rows[length] = spans, self._positions_of(spans)
        return self._rows[length]

    def _positions_of(self, spans: tuple[Spans, ...]) -> Tensor:
        return torch.cat([torch.arange(*span, device=self.device) for span in spans[self.factory.cp.rank]])

    def _table(self, name: str, *, tied: bool, uses: int) -> ShardedParameter:
        shape, std = (self.config.padded_vocab_size, self.config.hidden_size), self.config.init_method_std
        return self.factory.parameter(f"{name}.weight", shape, shard_dim=0, std=std, tied=tied, uses=uses)

    def context(
        self,
        sample_ids: tuple[int, ...] = (),
        *,
        seq_length: int | None = None,
        spans: tuple[Spans, ...] | None = None,
        attention_documents: tuple[tuple[int, ...], ...] | None = None,
        position_documents: tuple[tuple[int, ...], ...] | None = None,
        auxiliary: AuxiliaryLosses | None = None,
        mtp: MTPInputs | None = None,
        row_counts: dict[int, Any] | None = None,
    ) -> ForwardContext:
        """Build the context of a microbatch of training or evaluation.

        Args:
            sample_ids: global indices of the samples; they key the dropout masks in training mode.
            seq_length: tokens per sequence; None: the model's sequence length.
            spans: parts of the sequence on each cp rank; None: the usual split of this length.
            attention_documents: per sample the first positions of its documents, if attention stays within documents.
            position_documents: the same, if positions restart at each document.
            mtp: inputs of the MTP layers; None: they do not run.
            row_counts: filled by MoE layers, which read it again in activation recomputation."""
        length = seq_length or self.seq_length
        if spans is None:
            spans, positions = self._usual_rows(length)
        else:
            positions = self._positions_of(spans)
        ids = positions
        if position_documents is not None:
            ids = document_position_ids(ids, position_documents)
        return self._build_context(
            length,
            seq_length=length,
            spans=spans,
            positions=positions,
            position_ids=ids,
            stream=DropoutStream(self.factory.seed, sample_ids, self._draw) if self.training else None,
            visibility=Visibility(window=self._window(length), document_starts=attention_documents),
            auxiliary=auxiliary,
            mtp=mtp,
            row_counts=row_counts,
        )

    def generation_context(self, length: int, lengths: Sequence[int] | None = None) -> ForwardContext:
        """Build the context of the first `length` tokens of texts that may get longer; no dropout; cp must be 1.

        `lengths`: tokens of each row before its padding, if tokens follow; None: all."""
        positions = torch.arange(length, device=self.device)
        visibility = Visibility(window=self._window(length))
        places: dict[str, Any] = {"spans": (((0, length),),), "positions": positions, "position_ids": positions}
        places["lengths"] = None if lengths is None else torch.tensor(lengths, device=self.device)
        return self._build_context(length, seq_length=length, **places, visibility=visibility, generating=True)

    def next_token_context(self, lengths: Sequence[int]) -> ForwardContext:
        """Build the context of one new token per row, after `lengths` cached tokens of each row; cp must be 1."""
        window = self.config.sliding_window if self._windowed else None
        new = NextTokens.after(lengths, window=window, device=self.device)
        unwindowed = NextTokens.after(lengths, window=None, device=self.device) if self._mixed else None
        places: dict[str, Any] = {"spans": (((0, 1),),), "positions": new.positions[:1]}
        places["position_ids"] = new.positions.unsqueeze(0)
        return self._build_context(new.stop, unwindowed, seq_length=1, **places, generating=True, next_tokens=new)

    def _build_context(self, stop: int, unwindowed: NextTokens | None = None, **fields: Any) -> ForwardContext:
        """Build the context for position ids below `stop`.

        If only some layers of the stage have a window, `full` is the context of the others, with `unwindowed` tokens.
        """
        ids = fields["position_ids"]
        fields["query_factors"] = query_factors(self.config, ids, self.factory.dtype)
        context = ForwardContext(**fields, rope=self._rope_rows(ids, stop, self._windowed))
        if not self._mixed:
            return context
        rope, visibility = self._rope_rows(ids, stop, False), replace(context.visibility, window=None)
        return replace(context, full=replace(context, rope=rope, visibility=visibility, next_tokens=unwindowed))

    def _window(self, length: int) -> int | None:
        """Return the sliding window if it is shorter than `length`, else None."""
        window = self.config.sliding_window if self._windowed else None
        return window if window is not None and window < length else None

    def _rope_rows(self, position_ids: Tensor, stop: int, windowed: bool) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin [s, b or 1, 1, d/2] of position ids [s] or [s, b] below `stop`; None without RoPE.

        `windowed`: for layers with a sliding window."""
        config = self.config
        if config.position_embedding_type != "rope":
            return None
        local = windowed and config.rotary_base_local is not None
        tables = self._rope.get(local)
        if tables is None or tables[0].shape[0] < stop:
            dtype = torch.promote_types(self.factory.dtype, torch.float32)
            # Double the size: otherwise a long generation would rebuild the tables for each token.
            doubled = 0 if tables is None else 2 * tables[0].shape[0]
            positions = torch.arange(max(stop, self.seq_length, doubled), device=self.device)
            factor = 1.0 if local else attention_factor(config)
            frequencies = rope_frequencies(config, length=self.seq_length, local=local)
            tables = self._rope[local] = rope_tables(positions, frequencies, dtype, factor)
        cos, sin = (table[position_ids].unsqueeze(-2) for table in tables)
        return (cos, sin) if position_ids.dim() == 2 else (cos.unsqueeze(1), sin.unsqueeze(1))

    def activation_shape(self, micro_batch_size: int, seq_length: int | None = None) -> tuple[int, int, int]:
        """Return the shape of messages between stages: [s/cp, b, h], or [s/(cp·tp), b, h] with sequence parallelism."""
        parts = self.factory.cp.size * (self.tp.size if self.factory.sequence_parallel else 1)
        return ((seq_length or self.seq_length) // parts, micro_batch_size, self.config.hidden_size)

    def forward(
        self,
        x: Tensor,
        context: ForwardContext,
        *,
        labels: Tensor | None = None,
        cache: KeyValueCache | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Run the stage on tokens [b, s/cp] (first stage) or [s/cp, b, h] -> [s/cp, b, h], or losses [b, s/cp] (last).

        The last stage without labels returns logits [s/cp, b, V/tp], or [1, b, V/tp] at position `wanted` [b] of each
        row."""
        transformed = torch._C._are_functorch_transforms_active() or torch._C._is_any_autocast_enabled()
        if transformed and torch.is_grad_enabled():
            raise RuntimeError(
                "layers define their own backward, which supports neither autocast nor torch.func transforms; pass "
                "another dtype to ParameterFactory, or call model.to(dtype), and use backward()"
            )
        if self.embedding is not None:
            x = self.embedding(x, context)
        blocks = cast("list[Block]", list(self.layers.values()))
        x = run_layers(blocks, x, context, cache=cache, recompute=self.recompute)
        if self.head is None:
            return x
        if wanted is not None:
            x = x[wanted, torch.arange(x.shape[1], device=x.device)].unsqueeze(0)
        return self.head(x, context, labels)
