"""Text token by token, with a key/value cache, over tensor and pipeline parallel ranks."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from megalite.config.errors import ConfigError
from megalite.generation.continuation import (
    Continuation,
    Lane,
    MakeText,
    Sampling,
    check_prompts,
    choose,
    continuations_of,
    lanes_of,
)
from megalite.models.gpt import GPTStage
from megalite.pipeline.executor import Channels
from megalite.topology.group import Group
from megalite.topology.topology import Topology

SEND_WINDOW = 64
"""Sends that may be under way on an edge: more than batches of a generation in flight ever have, so that none waits for
a stage that waits for this one."""


class Chain:
    """This rank's stage and its neighbours.

    Activations go from stage to stage, tokens from the last round to the first and on to those between: a message on
    each edge at a time, in the one order that all ranks know from the tokens.

    `stage`: the one stage here. `topology`: of the pipeline; None: the model is in one stage. `send_window`: sends that
    may be under way on an edge; where nothing goes round, few of them save memory."""

    def __init__(self, stage: GPTStage, topology: Topology | None = None, *, send_window: int = SEND_WINDOW) -> None:
        pp, edges = (Group.solo("pp"), {}) if topology is None else (topology.pp, dict(topology.edges))
        self.stage = stage
        self.size, self._rank = pp.size, pp.rank
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self._channels = Channels(edges, rank=pp.rank, send_window=send_window)
        self.drain = self._channels.drain

    def activations(self, length: int, rows: int) -> torch.Tensor:
        hidden_size, factory = self.stage.config.hidden_size, self.stage.factory
        x = torch.empty(length, rows, hidden_size, dtype=factory.dtype, device=factory.device)
        self._channels.receive(x, source=self._rank - 1).wait()
        return x

    def pass_on(self, x: torch.Tensor) -> None:
        self._channels.send(x.contiguous(), to=self._rank + 1)

    def announce(self, tokens: torch.Tensor) -> None:
        """On the last stage: send the tokens that were chosen round to the first."""
        if self.size > 1:
            self._channels.send(tokens, to=0)

    def hear(self, rows: int) -> list[int]:
        """On the other stages: the tokens of the last one, passed to the next stage that does not have them."""
        tokens = torch.empty(rows, dtype=torch.int64, device=self.stage.device)
        source = self.size - 1 if self.is_first else self._rank - 1
        self._channels.receive(tokens, source=source).wait()
        if self._rank < self.size - 2:
            self._channels.send(tokens, to=self._rank + 1)
        heard: list[int] = tokens.tolist()
        return heard


BATCH_SIZE = 16  # default of the prompts in a batch at most


def generate_batch(
    chain: Chain,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    end_ids: frozenset[int],
    batch_size: int = BATCH_SIZE,
    make_text: MakeText | None = None,
) -> Iterator[Continuation]:
    """Continue all prompts; gives a continuation each time that it has one more token or has ended.

    Every rank runs this to its end with equal arguments and gets the same tokens. A text depends on its own prompt and the
    seed: other prompts, the batch size and the layout change logits by rounding alone.

    Over pp as many batches are in flight as there are stages. The stages agree on nothing: each hears all tokens, and what
    follows from them (who has ended, which batch is next) is the same arithmetic everywhere.

    `end_ids`: tokens that end a text. `make_text`: where texts are wanted as such, and for stop strings. Raises
    ConfigError: a prompt is empty, has unknown tokens or too many for learned positions; logits that are not numbers.
    The same on every rank.

    Collectives: those of the forward; for each batch and token on the last stage one all-gather of the logits and one
    broadcast of the tokens over tp; over pp one message of activations, and one of tokens, an edge."""
    check_prompts(chain.stage.config, prompts, sampling)
    chain.stage.eval()
    continuations = continuations_of(prompts, sampling, make_text)
    most = sampling.max_new_tokens
    waiting = deque(lanes_of(continuations, batch_size=batch_size, in_flight=chain.size, max_new_tokens=most))
    flying: deque[Lane] = deque()
    try:
        while waiting or flying:
            if waiting and len(flying) < chain.size:
                lane = waiting.popleft()
            else:
                lane = flying.popleft()
                yield from lane.take(_tokens(chain, lane), end_ids=end_ids, max_new_tokens=most)
                if not lane.rows:
                    continue
            _step(chain, lane, sampling)
            flying.append(lane)
    except ConfigError:
        # Every rank has come here at the same token: what is under way arrives before the connections are let go.
        for lane in flying:
            _tokens(chain, lane)
        chain.drain()
        raise
    chain.drain()


def _tokens(chain: Chain, lane: Lane) -> list[int]:
    if not chain.is_last:
        return chain.hear(len(lane.rows))
    assert lane.chosen is not None
    chosen: list[int] = lane.chosen.tolist()
    return chosen


@torch.no_grad()
def _step(chain: Chain, lane: Lane, sampling: Sampling) -> None:
    """This stage's part of one step of a lane."""
    stage, width = chain.stage, lane.width
    x = lane.tokens(stage.device) if chain.is_first else chain.activations(width, len(lane.rows))
    wanted = None
    if lane.is_new:
        context = stage.generation_context(width)
        wanted = torch.tensor([len(row.prompt) - 1 for row in lane.rows], device=stage.device)
    else:
        context = stage.next_token_context(lane.lengths)
    with torch.inference_mode():  # no counts of versions, no records of views: less of the host's time
        x = stage(x, context, cache=lane.cache, wanted=wanted)
    if chain.is_last:
        lane.chosen = _chosen(stage, lane, x[0], sampling)
        chain.announce(lane.chosen)
    else:
        chain.pass_on(x)
    lane.advance()


def _chosen(stage: GPTStage, lane: Lane, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The next token of each row, int64 [b]: one rank chooses for its tp group."""
    whole = whole_vocabulary(stage, logits)
    if sampling.repetition_penalty != 1.0:
        if lane.seen is None:
            lane.seen = torch.zeros_like(whole, dtype=torch.bool)
            for mark, row in zip(lane.seen, lane.rows, strict=True):
                mark[list(row.prompt)] = True
        else:
            last = torch.tensor([row.last for row in lane.rows], device=stage.device)
            lane.seen.scatter_(1, last.unsqueeze(1), True)
    chosen = torch.empty(len(lane.rows), dtype=torch.int64, device=stage.device)
    if stage.tp.rank == 0:
        draws = [row.draws(len(row.new)) for row in lane.rows] if sampling.temperature else []
        chosen.copy_(choose(whole, sampling, draws, seen=lane.seen))
    stage.tp.broadcast(chosen)
    return chosen


def whole_vocabulary(stage: GPTStage, logits: torch.Tensor) -> torch.Tensor:
    """[b, V/tp] -> [b, vocab_size], without the padding.

    Collectives: an all-gather over tp."""
    parts = logits.new_empty(stage.tp.size * logits.shape[0], logits.shape[1])
    stage.tp.all_gather(parts, logits.contiguous())
    whole = parts.view(stage.tp.size, *logits.shape).transpose(0, 1).flatten(1)
    return whole[:, : stage.config.vocab_size]
