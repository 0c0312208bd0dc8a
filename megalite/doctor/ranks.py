"""Tests collectives on ranks that it starts, or under a launcher, and combines the reports into findings."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch

from megalite.config.numbers import format_bytes
from megalite.doctor import devices
from megalite.doctor.devices import precisions, rate_of
from megalite.doctor.host import VERSIONS, Finding, Level, finding
from megalite.parity.pool import RankContext, RankFailure, RankPool
from megalite.profiling.collectives import OPERATIONS, collective
from megalite.profiling.timing import Timer
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.topology.lost_peers import lost_ranks
from megalite.topology.topology import Topology

PARTS = (1, 257, 1 << 14)  # elements per rank in checks of numbers
SMALL = 4 << 10  # bytes of the tensor in latency tests
LARGE = {"cpu": 8 << 20, "cuda": 256 << 20}  # bytes of the tensor in rate tests


@dataclass(kw_only=True)
class RankReport:
    """Results of one rank, convertible to JSON."""

    rank: int
    host: str
    device: str
    wrong: list[str] = field(default_factory=list)  # operations with wrong numbers
    latency: dict[str, float] = field(default_factory=dict)  # operation -> seconds with a small tensor
    rate: dict[str, float] = field(default_factory=dict)  # operation -> bytes per second sent with a large tensor
    products: float = 0.0  # FLOP/s while all ranks multiply
    # (this host, the next, bytes per second), on each host's first rank.
    pairs: Sequence[tuple[str, str, float]] = ()


def measure(world: Group, *, host: str, seconds: float) -> RankReport:
    """Check and time all operations over the world; every rank calls it at the same time. `seconds`: approximate time
    of all timings. Raises RuntimeError, with a message that begins with the failed operation.

    Collectives: the tested ones."""
    device = world.device
    timer, report = Timer(device, world), RankReport(rank=world.rank, host=host, device=str(device))
    for name in CHECKS:
        with _step(name):
            if not all(is_right(name, world, count) for count in PARTS):
                report.wrong.append(name)
    each = 0.6 * seconds / (2 * len(_SENT))
    for name, share in _SENT.items():
        with _step(name):
            report.latency[name] = _seconds(timer, name, SMALL, each)
            large = LARGE[device.type]
            report.rate[name] = share(world.size) * large / _seconds(timer, name, large, each)
    with _step("messages between hosts"):
        report.pairs = _pairs(timer, host, LARGE[device.type], 0.2 * seconds)
    with _step("products on all ranks at once"):
        report.products = rate_of(timer, precisions(device)[0].dtype, seconds=0.2 * seconds)
    return report


@contextmanager
def _step(name: str) -> Iterator[None]:
    """Add the name of a step, and the seconds since its start, to its RuntimeError."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        line = str(error).strip().partition("\n")[0]
        raise RuntimeError(f"{name} failed after {time.monotonic() - start:.0f} s: {line}") from error


def part_of(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Return [count] small integers as floats, so that sums over thousands of ranks are exact."""
    return (torch.arange(count, device=device) % 97 + rank % 13).float()


CHECKS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "messages")


def is_right(name: str, world: Group, count: int) -> bool:
    """Run one of `CHECKS` with `count` elements per rank, and return whether this rank's result is right."""
    rank, ranks = world.rank, range(world.size)
    parts = [part_of(each, count, world.device) for each in ranks]
    own, part = parts[rank].clone(), torch.empty(count, device=world.device)
    whole = torch.empty(world.size * count, device=world.device)
    match name:
        case "all-reduce":
            world.all_reduce(own)
            return torch.equal(own, torch.stack(parts).sum(0))
        case "all-gather":
            world.all_gather(whole, own)
            return torch.equal(whole, torch.cat(parts))
        case "reduce-scatter":
            world.reduce_scatter(part, torch.cat([own * (place % 7 + 1) for place in ranks]))
            return torch.equal(part, torch.stack(parts).sum(0) * (rank % 7 + 1))
        case "all-to-all":
            world.all_to_all_equal(whole, torch.cat([own + place % 7 for place in ranks]))
            return torch.equal(whole, torch.cat([each + rank % 7 for each in parts]))
        case "broadcast":
            world.broadcast(own, source=world.size - 1)
            return torch.equal(own, parts[-1])
    received, work = world.rotate_async(own)
    work.wait()
    return torch.equal(received, parts[rank - 1])


_SENT: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all-gather": lambda ranks: (ranks - 1) / ranks,
    "reduce-scatter": lambda ranks: (ranks - 1) / ranks,
    "messages": lambda ranks: 1.0,
}
"""Timed operation -> share of the tensor that a rank sends: in a ring, or all of a message."""


def _seconds(timer: Timer, name: str, size: int, seconds: float) -> float:
    if name in OPERATIONS:
        run, _ = collective(name, timer.world, size, timer.device)
    else:
        whole = torch.zeros(size // 4, device=timer.device)

        def run() -> None:
            timer.world.rotate_async(whole)[1].wait()

    return timer.together(run, seconds=seconds).seconds


def _pairs(timer: Timer, host: str, size: int, seconds: float) -> list[tuple[str, str, float]]:
    """Measure messages between each host and the next in a ring. A slow host makes both of its pairs slow."""
    world = timer.world
    first: dict[str, int] = {}
    for rank, name in enumerate(world.gather_json(host)):
        first.setdefault(name, rank)
    hosts = list(first)
    if len(hosts) == 1:
        return []
    edges = [(place, (place + 1) % len(hosts)) for place in range(len(hosts) if len(hosts) > 2 else 1)]
    # In a round each host is in at most one pair; the pair that closes the ring has a separate round.
    rounds = [edges[0 : len(hosts) - 1 : 2], edges[1 : len(hosts) - 1 : 2], edges[len(hosts) - 1 :]]
    tensor = torch.zeros(size // 4, device=timer.device)
    found = []
    for pairs in rounds:
        ends = [(first[hosts[one]], first[hosts[other]], hosts[other]) for one, other in pairs]
        pair = next((end for end in ends if world.rank in end[:2]), None)

        def round_trip(pair: tuple[int, int, str] | None = pair) -> None:
            if pair is None:
                return
            one, other, _ = pair
            if world.rank == one:
                world.send_async(tensor, to=other).wait()
                world.receive_async(tensor, source=other).wait()
            else:
                world.receive_async(tensor, source=one).wait()
                world.send_async(tensor, to=one).wait()

        took = timer.together(round_trip, seconds=seconds / len(rounds)).seconds
        if pair is not None and world.rank == pair[0]:
            found.append((host, pair[2], 2 * size / took))
    return found


_found = partial(finding, "collectives")
SLOW = 0.7  # share of the median rate below which a rank or a pair of hosts is reported
TIMEOUT = 90.0  # seconds until ranks that `examine` starts are given up


def examine(*, ranks: int, device_type: str, host: str, seconds: float) -> Iterator[Finding]:
    """Start `ranks` (at least 2) on this host, with gloo on the CPU or NCCL on a GPU each, and yield their findings."""
    try:
        with RankPool(ranks) as pool:
            found = pool.run(ranks, measured, ranks, device_type, host, seconds, timeout=TIMEOUT)
    except RankFailure as failure:
        text = f"{ranks} ranks on this host: {str(failure).strip().splitlines()[-1]}"
        remedy = "training on several ranks will fail like this; see the network above, and NCCL_DEBUG=INFO on GPUs"
        yield _found("self-test", text, None, remedy, "error")
        return
    yield from findings(found)


def measured(context: RankContext, ranks: int, device_type: str, host: str, seconds: float) -> RankReport:
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", context.rank)
        torch.cuda.set_device(device)
    layout = ParallelLayout(dp=ranks)
    world = Topology.create(layout, rank=context.rank, device=device, reuse=context.groups).world
    return measure(world, host=host, seconds=seconds)


def findings(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield the findings that follow from the reports of all ranks."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    kind = torch.device(reports[0].device).type
    backend = "NCCL" if kind == "cuda" else "gloo"
    text = f"{len(reports)} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}, {backend}"
    yield _found("ranks", text, {"ranks": [asdict(report) for report in reports]})
    for name in dict.fromkeys([*reports[0].latency, *(name for report in reports for name in report.wrong)]):
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
        sent = f"{rate / 1e9:.3g} GB/s sent by a rank with {format_bytes(large)}"
        text = f"{1e6 * latency:,.0f} µs for {format_bytes(SMALL)}, {sent}"
    if wrong:
        text = f"wrong numbers on rank {', '.join(f'{report.rank} ({report.host})' for report in wrong[:8])}"
    remedy = "leave those hosts out, or change the driver or NCCL's version"
    return _found(name, text, data, remedy if wrong else None, "error")


def _products(reports: Sequence[RankReport]) -> Finding:
    """Report ranks that compute slower than the others, because all others wait for them."""
    rates = [report.products for report in reports]
    median = statistics.median(rates)
    slow = [report for report in reports if report.products < SLOW * median]
    text = f"all ranks at once multiply at {min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s each"
    if slow:
        names = ", ".join(f"{each.rank} on {each.host} ({each.products / median:.0%})" for each in slow[:8])
        text += f"; slower than the others: rank {names}"
    remedy = "every step waits for the slowest: look for heat, low clocks or other programs there, or leave it out"
    data = {"flops_per_second": rates, "slow": [report.rank for report in slow]}
    return _found("products", text, data, remedy if slow else None)


def _between_hosts(pairs: Sequence[tuple[str, str, float]]) -> Finding:
    rates = [rate for _, _, rate in pairs]
    median = statistics.median(rates)
    slow = [(one, other, rate) for one, other, rate in pairs if rate < SLOW * median]
    text = f"messages between neighbouring hosts at {min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s"
    if slow:
        text += f"; slow: {', '.join(f'{one}-{other} ({rate / median:.0%})' for one, other, rate in slow[:8])}"
    ends = [host for one, other, _ in slow for host in (one, other)]
    twice = [host for host in dict.fromkeys(ends) if ends.count(host) > 1]
    remedy = f"look at {', '.join(twice) or 'both ends'}: adapter, cable, switch port, or leave it out"
    return _found("hosts", text, {"pairs": [list(pair) for pair in pairs]}, remedy if slow else None)


class ExchangeFailed(Exception):
    """The ranks could not communicate."""


def examine_job(world: Group, own: Sequence[Finding], *, host: str, seconds: float) -> Iterator[Finding]:
    """Test at least 2 ranks together, and yield the findings, the same on every rank. `own`: findings of this host on
    its first rank, empty on others. `seconds`: approximate time of all timings. Raises ExchangeFailed with the host on
    each rank that noticed a failure.

    Collectives: the tested ones and gathers, over the world."""
    try:
        rows = world.gather_json([host, [asdict(each) for each in own]])
        reports = world.gather_json(asdict(measure(world, host=host, seconds=seconds)))
    except RuntimeError as error:
        lost = lost_ranks(world)
        note = f"; lost: rank {', '.join(map(str, lost))}" if lost else ""
        raise ExchangeFailed(f"rank {world.rank} on {host}: {error}{note}") from error
    by_host = {name: [Finding(**each) for each in found] for name, found in rows if found}
    yield from compare_hosts(by_host)
    yield from findings_of_other_hosts(by_host, here=rows[0][0])
    yield from findings([RankReport(**report) for report in reports])


def compare_hosts(by_host: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Yield findings on versions and devices that differ between hosts."""
    alike = True
    first, *others = by_host
    remedy = "install the same on all hosts, from one image or one lock file"
    for name in _compared(by_host[first]):
        texts = {host: _compared(found).get(name, "missing") for host, found in by_host.items()}
        odd = [host for host in others if texts[host] != texts[first]]
        if odd:
            alike = False
            shown = ", ".join(f"{texts[host]} on {host}" for host in odd[:4]) + (", ..." if len(odd) > 4 else "")
            level: Level = "error" if name in ("megalite", "torch", "nccl") else "warning"
            yield finding("hosts", name, f"{texts[first]} on {first}, {shown}", {"by_host": texts}, remedy, level)
    if alike:
        yield finding("hosts", "alike", f"{len(by_host)} hosts have the same versions and GPUs")


def _compared(found: Sequence[Finding]) -> dict[str, str]:
    compared = {}
    for each in found:
        if each.topic == VERSIONS and each.name != "python":
            compared[each.name] = str(each.data.get("version"))
        elif each.topic == devices.TOPIC and each.name == "nccl":
            compared["nccl"] = each.text
        elif each.topic == devices.TOPIC and each.name.startswith("cuda:"):
            compared[each.name] = str(each.data.get("name"))
    return compared


def findings_of_other_hosts(by_host: Mapping[str, Sequence[Finding]], *, here: str) -> Iterator[Finding]:
    """Yield warnings and errors of other hosts than rank 0's, which has printed its own."""
    for host, found in by_host.items():
        for each in found:
            if host != here and each.level != "ok":
                yield replace(each, name=f"{each.name} of {host}", data={**each.data, "host": host})
