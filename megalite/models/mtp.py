"""Multi-token prediction (MTP): layers after the last predict later tokens (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.bases import Module
from megalite.models.block import Block
from megalite.models.context import MTP_LOSS, ForwardContext
from megalite.models.norm import Norm
from megalite.models.recompute import Recompute, recomputed
from megalite.tensor_parallel.layers import ReplicatedLinear, vocab_parallel_lookup
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter

TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""(normalized hidden states, labels [b, s/cp]) -> loss of each token [b, s/cp]."""


class MTPLayer(Module):
    """One depth: depth k predicts token i + k + 1 at position i.

    norm(embedding of token i + k) and norm(hidden state of the previous depth) are projected to one hidden state, which
    passes through a block and a final norm. Parameters are named like layer num_layers + k - 1. The projection is
    replicated over tp; with sequence parallelism it runs on the rank's part of the sequence."""

    def __init__(
        self, index: int, config: ModelConfig, *, factory: ParameterFactory, recompute: Recompute, cp_comm_type: str
    ) -> None:
        super().__init__()
        name, h = f"layers.{index}", config.hidden_size
        self.recompute_whole = recompute.granularity == "full"
        self.embedding_norm = Norm(f"{name}.embedding_norm", config, factory=factory)
        self.hidden_norm = Norm(f"{name}.hidden_norm", config, factory=factory)
        self.projection = ReplicatedLinear(f"{name}.projection", (h, 2 * h), std=config.hidden_std, factory=factory)
        self.block = Block(index, config, factory=factory, recompute=recompute, cp_comm_type=cp_comm_type)
        self.final_norm = Norm(f"{name}.final_norm", config, factory=factory)

    def forward(self, x: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states and embeddings [s/cp, b, h] -> normalized hidden states [s/cp, b, h].

        With sequence parallelism all are split over tp as well."""
        if self.recompute_whole and torch.is_grad_enabled():
            return self.final_norm(recomputed(self._block, x, embedded, context))
        return self.final_norm(self._block(x, embedded, context))

    def _block(self, x: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)
        return self.block(self.projection(both), context)


class MTPBlock(Module):
    """The `mtp_num_layers` depths of a model, on its last stage; they share the model's embedding and head.

    `word`: weight of the word embedding, or the last stage's copy of it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        word: ShardedParameter,
        recompute: Recompute,
        cp_comm_type: str,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.scale = config.embedding_scale
        self.word = word
        self.depths = torch.nn.ModuleList(
            MTPLayer(index, config, factory=factory, recompute=recompute, cp_comm_type=cp_comm_type)
            for index in config.mtp_layers
        )

    def forward(self, x: Tensor, context: ForwardContext, losses: TokenLosses) -> Tensor:
        """Return x [s/cp, b, h], the normalized hidden states, with the depths' losses attached to it."""
        inputs, auxiliary = context.mtp, context.auxiliary
        assert inputs is not None and auxiliary is not None
        hidden, total = x, None
        for depth, labels, tokens, weights in zip(
            self.depths, inputs.labels, inputs.tokens, inputs.weights, strict=True
        ):
            embedded = vocab_parallel_lookup(tokens, self.word, tp=self.tp, sequence_parallel=self.sequence_parallel)
            if self.scale != 1.0:
                embedded = embedded * self.scale
            hidden = depth(hidden, embedded, context)
            each = losses(hidden, labels)
            term = (each * weights.to(each.dtype)).sum()
            total = term if total is None else total + term
        assert total is not None
        # Every tp rank computes the same loss, so only one counts it.
        return auxiliary.attach(x, MTP_LOSS, total, counts=self.tp.rank == 0)
