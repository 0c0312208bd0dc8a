"""Which tokens of a sequence a context-parallel rank holds. No torch."""

Span = tuple[int, int]
"""Half-open range of true positions."""


def sequence_spans(seq_length: int, *, cp_rank: int, cp_size: int) -> tuple[Span, ...]:
    """The spans of true positions that rank `cp_rank` holds, in the order of its rows.

    The sequence is cut into 2·cp equal chunks and rank r holds chunks r and 2·cp-1-r: an early one, whose queries
    see few keys, with a late one, whose queries see many. So every rank has the same number of visible
    (query, key) pairs against the keys of every other rank. One rank holds the one span (0, s).

    Source: zigzag order of ring attention (arXiv 2310.01889 with the load balance of arXiv 2311.09431).
    """
    assert 0 <= cp_rank < cp_size, (cp_rank, cp_size)
    if cp_size == 1:
        return ((0, seq_length),)
    chunks = 2 * cp_size
    assert seq_length % chunks == 0, f"sequence of {seq_length} in {chunks} chunks"
    length = seq_length // chunks
    return tuple((chunk * length, (chunk + 1) * length) for chunk in (cp_rank, chunks - 1 - cp_rank))
