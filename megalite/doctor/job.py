"""The doctor under a launcher: every host looks at itself, all ranks test together, and rank 0 learns what is not alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

from megalite.doctor import devices, ranks, versions
from megalite.doctor.host import Finding
from megalite.doctor.ranks import RankReport, measure
from megalite.topology.group import Group
from megalite.topology.lost_peers import lost_ranks

TOPIC = "hosts"


class ExchangeFailed(Exception):
    """The ranks could not exchange something."""


def examine(
    world: Group, device: torch.device, own: Sequence[Finding], *, host: str, seconds: float
) -> Iterator[Finding]:
    """What the ranks found together; the same on every rank.

    Args:
        world: all ranks, more than one.
        device: of this rank.
        own: what this rank found by itself: the first rank of each host everything, the others nothing.
        host: name of this host.
        seconds: about how long all timings take together.

    Raises:
        ExchangeFailed: on each rank that has noticed, with its host.

    Collectives: over the world, those that are tested and gathers.
    """
    try:
        rows = world.gather_json([host, [asdict(finding) for finding in own]], device)
        reports = world.gather_json(measure(world, device, host=host, seconds=seconds).as_data(), device)
    except RuntimeError as error:
        gone = lost_ranks(world, device)
        lost = f"; gone: rank {', '.join(map(str, gone))}" if gone else ""
        raise ExchangeFailed(f"rank {world.rank} on {host}: {error}{lost}") from error
    by_host = {name: [Finding(**finding) for finding in found] for name, found in rows if found}
    yield from unlike(by_host)
    yield from elsewhere(by_host, here=rows[0][0])
    yield from ranks.findings([RankReport.from_data(report) for report in reports])


def unlike(by_host: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Versions and devices that differ between hosts.

    Args:
        by_host: host -> what it found by itself.
    """
    differ = 0
    first, *others = by_host
    for name in _compared(by_host[first]):
        texts = {host: _compared(found).get(name, "not there") for host, found in by_host.items()}
        if len(set(texts.values())) > 1:
            differ += 1
            odd = [host for host in others if texts[host] != texts[first]]
            shown = ", ".join(f"{texts[host]} on {host}" for host in odd[:4]) + (", ..." if len(odd) > 4 else "")
            yield Finding(
                topic=TOPIC,
                name=name,
                level="error" if name in ("megalite", "torch", "nccl") else "warning",
                text=f"{texts[first]} on {first}, {shown}",
                remedy="install the same on all hosts, from one image or one lock file",
                data={"by_host": texts},
            )
    if not differ:
        yield Finding(topic=TOPIC, name="alike", text=f"{len(by_host)} hosts have the same versions and GPUs")


def _compared(found: Sequence[Finding]) -> dict[str, str]:
    """What should be alike on all hosts -> its text."""
    compared = {}
    for finding in found:
        if finding.topic == versions.TOPIC and finding.name != "python":
            compared[finding.name] = str(finding.data.get("version"))
        elif finding.topic == devices.TOPIC and finding.name == "nccl":
            compared["nccl"] = finding.text
        elif finding.topic == devices.TOPIC and finding.name.startswith("cuda:"):
            compared[finding.name] = str(finding.data.get("name"))
    return compared


def elsewhere(by_host: Mapping[str, Sequence[Finding]], *, here: str) -> Iterator[Finding]:
    """What is to be mended on the other hosts; that of rank 0 has been said."""
    for host, found in by_host.items():
        for finding in found:
            if host != here and finding.level != "ok":
                data = {**finding.data, "host": host}
                yield Finding(**{**vars(finding), "name": f"{finding.name} of {host}", "data": data})
