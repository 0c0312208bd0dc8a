"""The doctor under a launcher: every host looks at itself, all ranks test together, and rank 0 learns what is not alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from megalite.doctor import devices, ranks, versions
from megalite.doctor.host import Finding, Level, finding
from megalite.doctor.ranks import RankReport, measure
from megalite.topology.group import Group
from megalite.topology.lost_peers import lost_ranks

_found = partial(finding, "hosts")


class ExchangeFailed(Exception):
    """The ranks could not exchange something."""


def examine(
    world: Group, device: torch.device, own: Sequence[Finding], *, host: str, seconds: float
) -> Iterator[Finding]:
    """What the ranks (two or more) found together; the same on every rank.

    Args:
        own: what this rank found by itself: the first rank of each host everything, the others nothing.
        seconds: about how long all timings take together.

    Raises:
        ExchangeFailed: on each rank that has noticed, with its host.

    Collectives: over the world, those that are tested and gathers.
    """
    try:
        rows = world.gather_json([host, [asdict(each) for each in own]], device)
        reports = world.gather_json(measure(world, device, host=host, seconds=seconds).as_data(), device)
    except RuntimeError as error:
        gone = lost_ranks(world, device)
        lost = f"; gone: rank {', '.join(map(str, gone))}" if gone else ""
        raise ExchangeFailed(f"rank {world.rank} on {host}: {error}{lost}") from error
    by_host = {name: [Finding(**each) for each in found] for name, found in rows if found}
    yield from unlike(by_host)
    yield from elsewhere(by_host, here=rows[0][0])
    yield from ranks.findings([RankReport.from_data(report) for report in reports])


def unlike(by_host: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Versions and devices that differ between hosts, of what each host found by itself."""
    alike = True
    first, *others = by_host
    remedy = "install the same on all hosts, from one image or one lock file"
    for name in _compared(by_host[first]):
        texts = {host: _compared(found).get(name, "not there") for host, found in by_host.items()}
        odd = [host for host in others if texts[host] != texts[first]]
        if odd:
            alike = False
            shown = ", ".join(f"{texts[host]} on {host}" for host in odd[:4]) + (", ..." if len(odd) > 4 else "")
            level: Level = "error" if name in ("megalite", "torch", "nccl") else "warning"
            yield _found(name, f"{texts[first]} on {first}, {shown}", {"by_host": texts}, remedy, level)
    if alike:
        yield _found("alike", f"{len(by_host)} hosts have the same versions and GPUs")


def _compared(found: Sequence[Finding]) -> dict[str, str]:
    """What should be alike on all hosts -> its text."""
    compared = {}
    for each in found:
        if each.topic == versions.TOPIC and each.name != "python":
            compared[each.name] = str(each.data.get("version"))
        elif each.topic == devices.TOPIC and each.name == "nccl":
            compared["nccl"] = each.text
        elif each.topic == devices.TOPIC and each.name.startswith("cuda:"):
            compared[each.name] = str(each.data.get("name"))
    return compared


def elsewhere(by_host: Mapping[str, Sequence[Finding]], *, here: str) -> Iterator[Finding]:
    """What is to be fixed on the other hosts; that of rank 0 has been said."""
    for host, found in by_host.items():
        for each in found:
            if host != here and each.level != "ok":
                yield replace(each, name=f"{each.name} of {host}", data={**each.data, "host": host})
