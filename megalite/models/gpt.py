"""`GPTStage`: the part of a GPT that one virtual pipeline stage holds. With one stage it is the whole model."""

import torch

from megalite.config.model import ModelConfig
from megalite.kernels.rope import rope_tables
from megalite.models.block import Block
from megalite.models.cache import KeyValueCache
from megalite.models.context import ForwardContext
from megalite.models.norm import Norm
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.tensor_parallel.layers import VocabParallelEmbedding, linear
from megalite.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tensor_parallel.random import DropoutStream


class Embedding(torch.nn.Module):
    """Word plus learned position embedding (if any), then dropout: tokens [b, s] -> [s, b, h]."""

    def __init__(self, config: ModelConfig, *, make: ParameterFactory, tied: bool, uses: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.dropout = config.hidden_dropout
        self.tp, self.sequence_parallel = make.tp, make.sequence_parallel
        self.word = VocabParallelEmbedding(
            "embedding.word",
            (config.padded_vocab_size, h),
            std=config.init_method_std,
            make=make,
            tied=tied,
            uses=uses,
        )
        self.position: ShardedParameter | None = None
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings is not None
            shape = (config.max_position_embeddings, h)
            self.position = make.make("embedding.position.weight", shape, std=config.init_method_std)

    def forward(self, tokens: torch.Tensor, context: ForwardContext, first_position: int = 0) -> torch.Tensor:
        """Tokens [b, s] -> [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        x = self.word(tokens)
        if self.position is not None:
            rows = self.position[first_position : first_position + tokens.shape[1]].unsqueeze(1)
            if self.sequence_parallel:
                rows = scatter_to_sequence_parallel_region(rows, tp=self.tp)
            x = x + rows
        return context.hidden_dropout(
            x, self.dropout, site="embedding", tp=self.tp, sequence_parallel=self.sequence_parallel
        )


class Head(torch.nn.Module):
    """Final norm and the projection to the vocabulary, whose weight may be the word embedding's."""

    def __init__(self, config: ModelConfig, *, make: ParameterFactory, weight: ShardedParameter) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.tp = make.tp
        self.enter = "gather" if make.sequence_parallel else "copy"
        self.vocab_size = config.vocab_size
        self.norm = Norm("final_norm", config, make=make)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (or split over s) -> logits [s, b, V/tp]."""
        return linear(self.norm(x), self.weight, None, tp=self.tp, enter=self.enter)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each token: labels [b, s] -> [b, s]."""
        first = self.weight.info.spec.slice[0][0]
        losses = vocab_parallel_cross_entropy(
            self(x), labels.t().contiguous(), first=first, vocab_size=self.vocab_size, tp=self.tp
        )
        return losses.t()


class GPTStage(torch.nn.Module):
    """Layers [first_layer, last_layer) with the embedding before or the head after them where they belong.

    Args:
        make: where and how parameters are made; also carries the tp group.
        has_embedding, has_head: with tied embeddings and one of the two, the weight here is one of two copies.
        recompute: activation recompute of the blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        first_layer: int,
        last_layer: int,
        has_embedding: bool,
        has_head: bool,
        make: ParameterFactory,
        seq_length: int,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.seq_length = seq_length
        self.dtype = make.dtype
        self.device = make.device
        self.sequence_parallel = make.sequence_parallel
        self.tp = make.tp
        self.seed = make.seed
        self.embedding: Embedding | None = None
        if has_embedding:
            tied, shared_here = config.tie_embeddings, config.tie_embeddings and has_head
            uses = 2 if shared_here else 1
            self.embedding = Embedding(config, make=make, tied=tied and not shared_here, uses=uses)
        self.layers = torch.nn.ModuleDict(
            {
                str(index): Block(index, config, make=make, recompute=recompute)
                for index in range(first_layer, last_layer)
            }
        )
        self.head: Head | None = None
        if has_head:
            self.head = Head(config, make=make, weight=self._head_weight(make))
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def _head_weight(self, make: ParameterFactory) -> ShardedParameter:
        shape = (self.config.padded_vocab_size, self.config.hidden_size)
        std = self.config.init_method_std
        if not self.config.tie_embeddings:
            return make.make("head.weight", shape, shard_dim=0, std=std)
        if self.embedding is not None:
            return self.embedding.word.weight
        return make.make("embedding.word.weight", shape, shard_dim=0, std=std, tied=True)

    def context(
        self, sample_ids: tuple[int, ...] = (), *, first_position: int = 0, length: int | None = None
    ) -> ForwardContext:
        """The context of a microbatch; its samples' global indices key the dropout masks in training mode."""
        length = length or self.seq_length
        stream = DropoutStream(self.seed, sample_ids) if self.training else None
        return ForwardContext(seq_length=length, stream=stream, rope=self._rope_rows(first_position, length))

    def _rope_rows(self, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        if self._rope is None or self._rope[0].shape[0] < first + length:
            positions = torch.arange(max(first + length, self.seq_length), device=self.device)
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            self._rope = rope_tables(positions, self.config.head_size, self.config.rotary_base, dtype)
        return self._rope[0][first : first + length], self._rope[1][first : first + length]

    def activation_shape(self, micro_batch_size: int) -> tuple[int, int, int]:
        """Shape of what travels between stages: [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        s = self.seq_length // (self.tp.size if self.sequence_parallel else 1)
        return (s, micro_batch_size, self.config.hidden_size)

    def forward(
        self,
        x: torch.Tensor,
        context: ForwardContext,
        *,
        labels: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        first_position: int = 0,
    ) -> torch.Tensor:
        """Tokens [b, s] on the first stage, else [s, b, h] -> [s, b, h], or on the last stage the losses [b, s].

        On the last stage without labels: logits [s, b, V/tp].
        """
        if self.embedding is not None:
            x = self.embedding(x, context, first_position)
        for layer in self.layers.values():
            x = layer(x, context, cache)
        if self.head is None:
            return x
        return self.head(x) if labels is None else self.head.loss(x, labels)
