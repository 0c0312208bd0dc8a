"""The ranks that test collectives: some that are started here, or those of the job; and what their reports say."""

import statistics
from collections.abc import Iterator, Sequence

import torch

from megalite.config.byte_size import format_bytes
from megalite.doctor.exchange import LARGE, SMALL, RankReport, measure
from megalite.doctor.finding import Finding
from megalite.parity.pool import RankContext, RankFailure, RankPool
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology

TOPIC = "collectives"
SLOW = 0.7
"""Of the median rate: a rank or a pair of hosts below it is named."""
TIMEOUT = 90.0
"""Seconds until ranks that are started here are given up."""


def examine(*, ranks: int, device_type: str, host: str, seconds: float) -> Iterator[Finding]:
    """Start ranks on this host, gloo on the CPU or NCCL with a GPU each, and let them test.

    Args:
        ranks: how many, at least two.
        device_type: cpu or cuda.
        host: its name.
        seconds: about how long all timings take together.
    """
    try:
        with RankPool(ranks) as pool:
            found = pool.run(ranks, measured, ranks, device_type, host, seconds, timeout=TIMEOUT)
    except RankFailure as failure:
        line = str(failure).strip().splitlines()[-1]
        yield Finding(
            topic=TOPIC,
            name="self-test",
            level="error",
            text=f"{ranks} ranks on this host: {line}",
            remedy="training on several ranks will fail like this; see the network above, and NCCL_DEBUG=INFO on GPUs",
        )
        return
    yield from findings([RankReport.from_data(report) for report in found])


def measured(
    context: RankContext, ranks: int, device_type: str, host: str, seconds: float
) -> dict[str, object]:
    """The report of one rank of a pool."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", context.rank)
        torch.cuda.set_device(device)
    layout = ParallelLayout(dp=ranks)
    world = Topology.create(layout, rank=context.rank, device=device, made=context.made).world
    return measure(world, device, host=host, seconds=seconds).as_data()


def findings(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """What the reports of all ranks say together."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    kind = torch.device(reports[0].device).type
    backend = "NCCL" if kind == "cuda" else "gloo"
    text = f"{len(reports)} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}, {backend}"
    data = {"ranks": [report.as_data() for report in reports]}
    yield Finding(topic=TOPIC, name="ranks", text=text, data=data)
    timed = reports[0].latency
    names = [*timed, *(name for report in reports for name in report.wrong)]
    for name in dict.fromkeys(names):
        yield _operation(name, reports, LARGE[kind])
    yield _products(reports)
    pairs = [pair for report in reports for pair in report.pairs]
    if pairs:
        yield _between_hosts(pairs)


def _operation(name: str, reports: Sequence[RankReport], large: int) -> Finding:
    wrong = [report for report in reports if name in report.wrong]
    data: dict[str, object] = {"wrong_on": [report.rank for report in wrong]}
    text = "right numbers"
    if name in reports[0].latency:
        latency = max(report.latency[name] for report in reports)
        rate = min(report.rate[name] for report in reports)
        data |= {"seconds": latency, "bytes_per_second": rate}
        text = (
            f"{1e6 * latency:,.0f} µs for {format_bytes(SMALL)}, {rate / 1e9:.3g} GB/s sent by a rank with "
            f"{format_bytes(large)}"
        )
    if wrong:
        who = ", ".join(f"{report.rank} ({report.host})" for report in wrong[:8])
        text, remedy = (
            f"wrong numbers on rank {who}",
            "leave those hosts out, or change the driver or NCCL's version",
        )
        return Finding(topic=TOPIC, name=name, level="error", text=text, remedy=remedy, data=data)
    return Finding(topic=TOPIC, name=name, text=text, data=data)


def _products(reports: Sequence[RankReport]) -> Finding:
    """Ranks that compute slower than the others hold all of them up."""
    rates = [report.products for report in reports]
    median = statistics.median(rates)
    slow = [report for report in reports if report.products < SLOW * median]
    text = f"all ranks at once multiply at {min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s each"
    data = {"flops_per_second": rates, "slow": [report.rank for report in slow]}
    if not slow:
        return Finding(topic=TOPIC, name="products", text=text, data=data)
    who = ", ".join(f"{each.rank} on {each.host} ({each.products / median:.0%})" for each in slow[:8])
    return Finding(
        topic=TOPIC,
        name="products",
        level="warning",
        text=f"{text}; slower than the others: rank {who}",
        remedy="every step waits for the slowest: look for heat, low clocks or other programs there, or leave it out",
        data=data,
    )


def _between_hosts(pairs: Sequence[tuple[str, str, float]]) -> Finding:
    rates = [rate for _, _, rate in pairs]
    median = statistics.median(rates)
    slow = [(one, other, rate) for one, other, rate in pairs if rate < SLOW * median]
    text = f"messages between neighbouring hosts at {min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s"
    data = {"pairs": [list(pair) for pair in pairs]}
    if not slow:
        return Finding(topic=TOPIC, name="hosts", text=text, data=data)
    ends = [host for one, other, _ in slow for host in (one, other)]
    twice = [host for host in dict.fromkeys(ends) if ends.count(host) > 1]
    who = ", ".join(f"{one}-{other} ({rate / median:.0%})" for one, other, rate in slow[:8])
    return Finding(
        topic=TOPIC,
        name="hosts",
        level="warning",
        text=f"{text}; slow: {who}",
        remedy=f"look at {', '.join(twice) or 'both ends'}: adapter, cable, switch port, or leave it out",
        data=data,
    )
