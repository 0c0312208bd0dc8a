"""Check a layout without its cluster: `megalite parity` compares its numbers with those of one rank; `megalite rehearse` runs
a training step of any rank without devices or peers, and proves properties of all ranks."""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megalite.cli.display import table, working
from megalite.cli.dry_run import checked, world_size_of
from megalite.cli.output import json_text, show
from megalite.config.errors import ConfigError
from megalite.config.numbers import format_bytes
from megalite.config.run import RunConfig
from megalite.parity.fuzz import fuzz
from megalite.parity.pool import RankPool
from megalite.parity.report import Report, as_data, format_report, run_parity
from megalite.parity.shrink import shrink
from megalite.partition.memory import RankMemory, planned_memory
from megalite.partition.pipeline import layout_of
from megalite.rehearsal.communication import Operation, covered
from megalite.rehearsal.run import Rehearsal, check, rehearse, rehearse_world
from megalite.watchdog.processes import usable_cores

SAME, DIFFERENT = 0, 1


def parity(flags: Namespace) -> int:
    if flags.fuzz is not None:
        return _fuzz_layouts(flags)
    invocation = flags.invocation
    keep = {
        name
        for name in ("precision", "eod_mask_loss")
        if invocation.provenance[name] in (f"flag --{name}", "flag --no-eod-mask-loss")
    }
    shrunk = shrink(
        invocation.config, world_size=invocation.world_size, keep=frozenset(keep), explicit=invocation.explicit
    )
    with (
        working(f"training {flags.steps} steps on one rank and on {shrunk.world_size}"),
        RankPool(shrunk.world_size) as pool,
    ):
        report = run_parity(shrunk, steps=flags.steps, tolerance=flags.tolerance, pool=pool)
    show(json_text(as_data(report)) if invocation.json else format_report(report))
    return SAME if report.same else DIFFERENT


def _fuzz_layouts(flags: Namespace) -> int:
    sources = {name: source for name, source in flags.invocation.provenance.items() if source != "default"}
    if set(sources) - {"seed"}:
        wrong = next(source.removeprefix("flag ") for name, source in sources.items() if name != "seed")
        raise ConfigError(
            f"--fuzz draws all settings at random and accepts only --seed N and --steps N, got {wrong}; to try one layout "
            "leave --fuzz out"
        )
    seed = flags.invocation.config.training.seed if sources else 0

    def failed(line: str, report: Report) -> None:
        print(f"{line}\n  {report.verdict.splitlines()[0]}", flush=True)
        if report.failure is not None:
            print(report.failure, file=sys.stderr, flush=True)

    started = time.monotonic()
    tried, failures = fuzz(flags.fuzz, seed=seed, steps=flags.steps, tolerance=flags.tolerance, failed=failed)
    seconds = time.monotonic() - started
    show(f"{tried} layouts in {seconds:.0f} s with seed {seed}: {failures} different from one rank")
    return DIFFERENT if failures else SAME


FAULTY = 1
_SHOWN = 12  # maximum lines of a list


def rehearsal(flags: Namespace) -> int:
    """Rehearse and print. Return 1 if ranks would deadlock or start different operations."""
    invocation = flags.invocation
    world_size = world_size_of(invocation)
    config = checked(invocation.config, world_size, invocation.explicit)
    check(config, layout_of(config), invocation.rank)
    faults: list[str] | None = None
    if flags.all_kinds:
        workers = flags.workers or usable_cores()
        with working("rehearsing") as say:
            rehearsals, faults = rehearse_world(
                config, workers=workers, done=lambda count, total: say(f"{count} of {total} ranks")
            )
    else:
        rehearsals = [rehearse(config, invocation.rank or 0)]
    memory = planned_memory(config)
    facts = [_facts(config, each, memory) for each in rehearsals]
    if invocation.json:
        show(json_text({"world_size": world_size, "ranks": facts, "faults": faults}))
    else:
        show("\n".join(_text(layout_of(config).world_size, facts, faults)))
    return FAULTY if faults else 0


def _facts(config: RunConfig, found: Rehearsal, memory: Sequence[RankMemory]) -> dict[str, Any]:
    layout = layout_of(config)
    operations, save = found.journal.operations, found.save
    planned = memory[layout.coordinate(found.rank).pp]
    return {
        "rank": found.rank,
        "coordinate": layout.coordinate(found.rank)._asdict(),
        "parameters": found.parameters,
        "built_bytes": found.built_bytes,
        "build_peak_bytes": found.build_peak_bytes,
        "peak_bytes": found.peak_bytes,
        "peak_in": found.peak_place,
        "planned_bytes": planned.total_bytes,
        "host_bytes": found.host_bytes,
        "planned_host_bytes": planned.host_bytes,
        "kernels": dict(found.kernels),
        "synchronisations": _waits(found.synchronisations),
        "late_reads": [
            {"place": place, "count": count, "least_kernels": least}
            for place, (count, least) in found.late_reads.items()
        ],
        "communication": _communication(operations[found.second_step : save.first]),
        "overlap_lost": [each._asdict() for each in covered(found.journal, found.second_step)],
        "save": {
            "files": save.files,
            "bytes": sum(save.files.values()),
            "async_host_bytes": save.copies_bytes,
            "peak_bytes": save.peak_bytes,
            "synchronisations": _waits(save.synchronisations),
            "communication": _communication(operations[save.first :]),
        },
    }


def _waits(counts: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"place": place, "why": why, "count": count} for (place, why), count in counts.items()]


def _communication(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    counts, num_bytes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for operation in operations:
        key = operation.kind, operation.name, operation.dtype
        counts[key] += 1
        num_bytes[key] += operation.nbytes
    return [
        {"group": key[0], "operation": key[1], "dtype": key[2], "count": count, "bytes": num_bytes[key]}
        for key, count in counts.items()
    ]


def _text(ranks: int, facts: Sequence[dict[str, Any]], faults: list[str] | None) -> list[str]:
    lines = [f"two steps of {len(facts)} of {ranks} ranks, without devices or peers; the second is shown", ""]
    head = [
        *("rank", "tp cp dp pp", "parameters", "built", "peak", "in"),
        *("planned", "kernels F", "B", "step", "host waits", "operations"),
    ]
    lines += [*table([head, *map(_row, facts)], right=set(range(2, len(head))) - {5}), ""]
    if host := max(found["host_bytes"] for found in facts):
        planned = max(found["planned_host_bytes"] for found in facts)
        lines += [f"pinned host memory: at most {format_bytes(host)} on a rank, planned {format_bytes(planned)}", ""]
    places = Counter[tuple[str, str]]()
    for found in facts:
        places |= Counter({(each["place"], each["why"]): each["count"] for each in found["synchronisations"]})
    lines += ["host waits for the device (per step, maximum over ranks):"]
    lines += table([[f"  {place}", why, f"{count}"] for (place, why), count in places.most_common(_SHOWN)], right={2})
    late: dict[str, tuple[int, int]] = {}
    for each in (each for found in facts for each in found["late_reads"]):
        count, least = late.get(each["place"], (0, each["least_kernels"]))
        late[each["place"]] = max(count, each["count"]), min(least, each["least_kernels"])
    if late:
        lines += ["", "host reads of a copy that an earlier action started, with more kernels queued after the copy:"]
        lines += [f"  {place}: {count} times, {least} kernels or more" for place, (count, least) in late.items()]
    exchanged: dict[tuple[str, str, str], tuple[int, int]] = {}
    for found in facts:
        for each in found["communication"]:
            operation = each["group"], each["operation"], each["dtype"]
            exchanged[operation] = max(exchanged.get(operation, (0, 0)), (each["count"], each["bytes"]))
    lines += ["", "communication (maximum over ranks):"]
    lines += table(
        [["  group", "operation", "type", "count", "bytes"]]
        + [
            [f"  {kind}", name, dtype, f"{n}", format_bytes(size)]
            for (kind, name, dtype), (n, size) in exchanged.items()
        ],
        right={3, 4},
    )
    lost = {(each["waited"], each["covered"]): each for found in facts for each in found["overlap_lost"]}
    if lost:
        lines += ["", "overlap lost: on NCCL, waiting for the first operation also waits for the second"]
        lines += [
            f"  {each['waited']} | {each['covered']}: {each['times']} times, {each['kernels']} kernels or more too early"
            for each in lost.values()
        ]
    lines += _saves(facts)
    if faults is not None:
        lines += ["", *(f"fault: {fault}" for fault in faults)]
        if not faults:
            lines.append(
                "in every group all ranks start the same operations with the same sizes in the same order, and nothing deadlocks"
            )
    return lines


def _saves(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return what each rank writes to a checkpoint."""
    head = ["  rank", "bytes", "files", "host memory of --async-save", "peak", "host waits"]
    rows, exchanged = [head], Counter[tuple[str, str]]()
    for found in facts:
        save = found["save"]
        waits = sum(each["count"] for each in save["synchronisations"])
        written, copies, peak = (format_bytes(save[name]) for name in ("bytes", "async_host_bytes", "peak_bytes"))
        rows.append([f"  {found['rank']}", written, f"{len(save['files'])}", copies, peak, f"{waits}"])
        for each in save["communication"]:
            key = each["operation"], each["group"]
            exchanged[key] = max(exchanged[key], each["count"])
    lines = ["", "a checkpoint of these steps: what each rank writes", *table(rows, right=set(range(1, len(head))))]
    if exchanged:
        operations = ", ".join(f"{count} {name} over {kind}" for (name, kind), count in exchanged.items())
        lines.append(f"  its communication (maximum over ranks): {operations}")
    lines.append("  not rehearsed: writing and hashing, the manifest of rank 0, the removal of older checkpoints")
    return lines


def _row(found: dict[str, Any]) -> list[str]:
    kernels = found["kernels"]
    by_kind: dict[str, list[int]] = {"F": [], "B": []}
    for action, count in kernels.items():
        kind = action.lstrip("0123456789")[:1]
        if action[:1].isdigit() and kind in "FBIW":
            by_kind["F" if kind == "F" else "B"].append(count)
    each = [f"{max(counts)}" if counts else "-" for counts in by_kind.values()]
    return [
        f"{found['rank']}",
        " ".join(map(str, found["coordinate"].values())),
        f"{found['parameters'] / 1e9:.2f} B",
        format_bytes(found["built_bytes"]),
        format_bytes(found["peak_bytes"]),
        found["peak_in"],
        format_bytes(found["planned_bytes"]),
        *each,
        f"{sum(kernels.values())}",
        f"{sum(each['count'] for each in found['synchronisations'])}",
        f"{sum(each['count'] for each in found['communication'])}",
    ]
