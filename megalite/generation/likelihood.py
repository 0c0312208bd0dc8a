"""How likely a model finds the ends of given sequences: what benchmarks of language models ask for."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megalite.generation.generate import Chain, whole_vocabulary
from megalite.topology.topology import Topology


class Scored(NamedTuple):
    tokens: Sequence[int]
    last: int  # so many at the end are scored, given all those before


def likelihoods(
    chain: Chain, requests: Sequence[Scored], topology: Topology, *, batch_size: int
) -> list[tuple[float, bool]]:
    """Of each the sum of the log-probabilities of its last tokens, and whether each of them is the likeliest; the same on
    every rank, in the order of the requests.

    Sequences of like length go through together, padded at their ends, which nothing sees; batches are dealt out over dp.

    Collectives: those of the forward; for each request an all-gather over tp; an all-reduce over the world."""
    found = torch.zeros(len(requests), 2, dtype=torch.float64)
    order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].tokens), index))
    for first in range(topology.dp.rank * batch_size, len(order), topology.dp.size * batch_size):
        batch = order[first : first + batch_size]
        scores = _score(chain, [requests[index] for index in batch])
        if scores is not None and topology.tp.rank == 0:
            found[batch] = scores.cpu()
    chain.drain()
    found = found.to(topology.device)
    topology.world.all_reduce(found)  # one rank has a request's numbers, the others 0
    return [(total, bool(greedy)) for total, greedy in found.tolist()]


@torch.no_grad()
def _score(chain: Chain, batch: Sequence[Scored]) -> torch.Tensor | None:
    """This stage's part of a forward; on the last [b, 2] in float64."""
    stage, width = chain.stage, len(batch[0].tokens) - 1
    rows = [[*one.tokens, *[0] * (width + 1 - len(one.tokens))] for one in batch]
    tokens = torch.tensor(rows, dtype=torch.int64, device=stage.device)
    x = tokens[:, :-1] if chain.is_first else chain.activations(width, len(batch))
    x = stage(x, stage.generation_context(width))
    if not chain.is_last:
        chain.pass_on(x)
        return None
    found = []
    for row, one in enumerate(batch):
        end = len(one.tokens) - 1
        logits, labels = (
            whole_vocabulary(stage, x[end - one.last : end, row]),
            tokens[row, end - one.last + 1 : end + 1],
        )
        scores = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
        total, likeliest = scores.gather(1, labels.unsqueeze(1)).double().sum(), scores.argmax(dim=-1)
        found.append(torch.stack([total, (likeliest == labels).all().double()]))
    return torch.stack(found)
