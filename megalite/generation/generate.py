"""Generate text token by token with a KV cache, on tensor- and pipeline-parallel ranks."""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from megalite.config.errors import ConfigError
from megalite.generation.continuation import (
    Batch,
    Continuation,
    MakeText,
    Sampling,
    batches_of,
    check_prompts,
    choose,
    continuations_of,
)
from megalite.models.gpt import GPTStage
from megalite.pipeline.messages import P2PCommunicator
from megalite.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megalite.topology.group import Group
from megalite.topology.topology import Topology

SEND_WINDOW = 64
"""Maximum number of pending sends on an edge. It exceeds those of the batches in flight, so that no send blocks on a stage
that waits for this one."""


class Chain:
    """This rank's pipeline stage and its connections to other stages.

    Activations are sent from stage to stage, tokens from the last stage to the first and from there to the stages
    between. All ranks derive the order of the messages from the tokens.

    `stage`: the only stage of this rank. `topology`: topology of the pipeline; None for a single stage. `send_window`:
    maximum of pending sends on an edge; a small value saves memory if no tokens are sent back."""

    def __init__(self, stage: GPTStage, topology: Topology | None = None, *, send_window: int = SEND_WINDOW) -> None:
        pp, edges = (Group.solo("pp"), {}) if topology is None else (topology.pp, dict(topology.edges))
        self.stage = stage
        self.size, self._rank = pp.size, pp.rank
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self._p2p = P2PCommunicator(edges, rank=pp.rank, send_window=send_window)
        self.drain = self._p2p.drain

    def receive_activations(self, length: int, rows: int) -> torch.Tensor:
        hidden_size, factory = self.stage.config.hidden_size, self.stage.factory
        x = torch.empty(length, rows, hidden_size, dtype=factory.dtype, device=factory.device)
        self._p2p.receive(x, source=self._rank - 1).wait()
        return x

    def send_activations(self, x: torch.Tensor) -> None:
        self._p2p.send(x.contiguous(), to=self._rank + 1)

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Send the chosen tokens from the last stage to the first."""
        if self.size > 1:
            self._p2p.send(tokens, to=0)

    def receive_tokens(self, rows: int) -> list[int]:
        """Receive the tokens of the last stage on another stage, and forward them to the next stage that lacks them."""
        tokens = torch.empty(rows, dtype=torch.int64, device=self.stage.device)
        source = self.size - 1 if self.is_first else self._rank - 1
        self._p2p.receive(tokens, source=source).wait()
        if self._rank < self.size - 2:
            self._p2p.send(tokens, to=self._rank + 1)
        return tokens.tolist()


BATCH_SIZE = 16  # default maximum of prompts in a batch


def generate_batch(
    chain: Chain,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop_token_ids: frozenset[int],
    batch_size: int = BATCH_SIZE,
    make_text: MakeText | None = None,
) -> Iterator[Continuation]:
    """Continue all prompts. Yield a continuation each time it gets another token or ends.

    Every rank must run this to the end with equal arguments and gets the same tokens. A text depends on its own prompt
    and the seed: other prompts, the batch size and the layout change logits only by rounding.

    With pp, as many batches are in flight as there are stages. The stages need no agreement: each receives all tokens
    and derives from them which rows have ended and which batch is next.

    `stop_token_ids`: tokens that end a text. `make_text`: creates the texts, also needed for stop strings. Raises ConfigError,
    on every rank: a prompt is empty, has unknown tokens or too many for learned positions; logits are NaN.

    Collectives: those of the forward; per batch and token on the last stage one all-gather of the logits and one
    broadcast of the tokens over tp; over pp one message of activations and one of tokens per edge."""
    check_prompts(chain.stage.config, prompts, sampling)
    chain.stage.eval()
    continuations = continuations_of(prompts, sampling, make_text)
    most = sampling.max_new_tokens
    waiting = deque(batches_of(continuations, batch_size=batch_size, in_flight=chain.size, max_new_tokens=most))
    in_flight: deque[Batch] = deque()
    try:
        while waiting or in_flight:
            if waiting and len(in_flight) < chain.size:
                batch = waiting.popleft()
            else:
                batch = in_flight.popleft()
                yield from batch.take(_tokens(chain, batch), stop_token_ids=stop_token_ids, max_new_tokens=most)
                if not batch.rows:
                    continue
            _step(chain, batch, sampling)
            in_flight.append(batch)
    except ConfigError:
        # All ranks raise at the same token. Receive the pending messages before the connections are closed.
        for batch in in_flight:
            _tokens(chain, batch)
        chain.drain()
        raise
    chain.drain()


def _tokens(chain: Chain, batch: Batch) -> list[int]:
    if not chain.is_last:
        return chain.receive_tokens(len(batch.rows))
    assert batch.chosen is not None
    return batch.chosen.tolist()


@torch.no_grad()
def _step(chain: Chain, batch: Batch, sampling: Sampling) -> None:
    """Run this stage's part of one step of a batch."""
    stage, width = chain.stage, batch.width
    x = batch.tokens(stage.device) if chain.is_first else chain.receive_activations(width, len(batch.rows))
    wanted = None
    if batch.is_new:
        lengths = [len(row.prompt) for row in batch.rows]
        context = stage.generation_context(width, lengths)
        wanted = torch.tensor(lengths, device=stage.device) - 1
    else:
        context = stage.next_token_context(batch.lengths)
    with _without_cudnn(), torch.inference_mode():  # without version counters and view tracking: saves CPU time
        x = stage(x, context, cache=batch.cache, wanted=wanted)
    if chain.is_last:
        batch.chosen = _chosen(stage, batch, x[0], sampling)
        chain.send_tokens(batch.chosen)
    else:
        chain.send_activations(x)
    batch.advance()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    """Leave attention to other kernels: cuDNN would build a plan for each number of keys, that is for each token."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _chosen(stage: GPTStage, batch: Batch, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the next token of each row, int64 [b]. One rank chooses for its tp group."""
    whole = whole_vocabulary(stage, logits)
    if sampling.repetition_penalty != 1.0:
        if batch.seen is None:
            batch.seen = torch.zeros_like(whole, dtype=torch.bool)
            for mark, row in zip(batch.seen, batch.rows, strict=True):
                mark[list(row.prompt)] = True
        else:
            last = torch.tensor([row.last for row in batch.rows], device=stage.device)
            batch.seen.scatter_(1, last.unsqueeze(1), True)
    chosen = torch.empty(len(batch.rows), dtype=torch.int64, device=stage.device)
    if stage.tp.rank == 0:
        draws = [row.draws(len(row.new)) for row in batch.rows] if sampling.temperature else []
        chosen.copy_(choose(whole, sampling, draws, seen=batch.seen))
    stage.tp.broadcast(chosen)
    return chosen


def whole_vocabulary(stage: GPTStage, logits: torch.Tensor) -> torch.Tensor:
    """Gather logits [b, V/tp] to [b, vocab_size], without padding. Collectives: an all-gather over tp."""
    assert stage.config.vocab_size is not None
    return gather_from_tensor_parallel_region(logits, size=stage.config.vocab_size, tp=stage.tp)
