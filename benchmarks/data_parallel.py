#!/usr/bin/env python3
"""Data parallelism over slow links: bytes, time, loss and overlap of the strategies, and torch's own beside them.

    python benchmarks/data_parallel.py [--parts volume speed ...] [--rounds 3] [--json benchmarks/results/FILE.json]

Four ranks, each in a network namespace of its own with a link of a given rate (shaped_links.py); one thread a rank.
Bytes are the interfaces' own counters. It needs root; without it, it says so and measures nothing.

    volume       LAMB and 1-bit LAMB with a warm-up of a sixth of the steps: bytes against the formula
    speed        the same, whole runs with their warm-up, over link rates
    convergence  validation loss of both on real text, learning rates swept, three seeds; and without error feedback
    strategies   the six of the GPT-2 study, and all others of ours: tokens/s, bytes, memory, loss
    peers        torch DDP, its fp16 and PowerSGD hooks, ZeroRedundancyOptimizer and FSDP2 beside ours, in turns
    overlap      share of the reduction that the backward hides
"""

import argparse
import json
import math
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from data_parallel_jobs import (
    BF16,
    FREEZE,
    GPT,
    LAMB,
    ONEBIT,
    RANKS,
    STEPS,
    WIDE,
    Bench,
    end_of,
    prepare_text,
    seconds,
    sent,
    steps_of,
)
from data_parallel_peers import PEERS
from data_parallel_peers import SETTINGS as PEER_SETTINGS
from shaped_links import ShapedLinks, unavailable


def volume(bench: Bench) -> dict[str, Any]:
    """Bytes of whole runs with a warm-up of w = 1/6, and what the formula 1/(w + (1 - w)/k) gives."""
    # The early measurement of what 1-bit brings sends as much as a step: it is counted.
    steps, frozen = 6 * STEPS, {**ONEBIT, "freeze_step": 6 * FREEZE}
    kinds: dict[str, dict[str, Any]] = {
        "LAMB fp32": LAMB,
        "LAMB bf16": {**LAMB, **BF16},
        "1-bit LAMB, fp32 warm-up": frozen,
        "1-bit LAMB, bf16 warm-up": {**frozen, **BF16},
    }
    cases = [bench.case(name, steps=steps, settings={**WIDE, **kind}) for name, kind in kinds.items()]
    found = bench.run(cases, rate=None)
    total = {name: sent(records) for name, records in found.items()}
    payload = {
        name: sum(r["wire"] for r in records if "step" in r) / RANKS for name, records in found.items()
    }
    w = FREEZE / STEPS
    rows = {}
    for kind, k in (("fp32", 32.0), ("bf16", 16.0)):
        ratio = total[f"LAMB {kind}"] / total[f"1-bit LAMB, {kind} warm-up"]
        formula = 1.0 / (w + (1.0 - w) / k)
        rows[kind] = {"times less": ratio, "formula": formula, "off by %": 100.0 * (ratio / formula - 1.0)}
    measured = {name: total[name] / payload[name] for name in total}
    return {"bytes a rank": total, "ratio": rows, "interface bytes / wire()": measured}


def speed(bench: Bench, rates: Sequence[float], rounds: int) -> dict[str, Any]:
    """Whole runs over link rates, in turns; medians over rounds."""
    cases = [
        bench.case("LAMB fp32", settings=LAMB),
        bench.case("LAMB bf16", settings={**LAMB, **BF16}),
        bench.case("1-bit LAMB", settings={**ONEBIT, **BF16}),
    ]
    rows = {}
    for rate in rates:
        times: dict[str, list[float]] = {case["name"]: [] for case in cases}
        frozen, notes = [], []
        for _ in range(rounds):
            found = bench.run(cases, rate=rate)
            for name, records in found.items():
                times[name].append(seconds(records))
            frozen.append(seconds(found["1-bit LAMB"], FREEZE + 1) / (STEPS - FREEZE))
            notes = end_of(found["1-bit LAMB"])["notes"]
        median = {name: statistics.median(values) for name, values in times.items()}
        rows[f"{rate:g} Mbit/s"] = {
            "seconds": median,
            "ms a compressed step": 1e3 * statistics.median(frozen),
            "over LAMB fp32": median["LAMB fp32"] / median["1-bit LAMB"],
            "over LAMB bf16": median["LAMB bf16"] / median["1-bit LAMB"],
            "notes": notes,
        }
        print(f"{rate:>6g} Mbit/s  " + json.dumps(rows[f"{rate:g} Mbit/s"]), flush=True)
    return rows


def convergence(bench: Bench, steps: int, rates: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    """Validation loss after the same samples: the best learning rate of each, then all seeds at it."""
    freeze = steps // 6

    def settings(optimizer: Mapping[str, Any], lr: float, seed: int) -> dict[str, Any]:
        schedule = {"lr_decay_style": "cosine", "train_iters": steps, "lr_warmup_iters": steps // 20}
        reading = {"eval_interval": steps, "eval_iters": 20}
        return {**optimizer, **schedule, **reading, "lr": lr, "seed": seed}

    systems = {
        "LAMB": (LAMB, {}),
        "1-bit LAMB": ({**ONEBIT, "freeze_step": freeze}, {}),
        "1-bit LAMB without error feedback": ({**ONEBIT, "freeze_step": freeze}, {"forget_errors": True}),
    }

    def losses(names: Sequence[tuple[str, float, int]]) -> dict[tuple[str, float, int], float]:
        cases = [
            bench.case(
                f"{name} lr {lr:g} seed {seed}",
                steps=steps,
                settings=settings(systems[name][0], lr, seed),
                validate=True,
                **systems[name][1],
            )
            for name, lr, seed in names
        ]
        found = bench.run(cases, rate=None)
        # A run that diverges has no loss: it is worse than any.
        ends = [end_of(found[case["name"]]).get("validation_loss", math.inf) for case in cases]
        print(
            *(f"{case['name']}: {loss:.4f}" for case, loss in zip(cases, ends, strict=True)),
            sep="\n",
            flush=True,
        )
        return dict(zip(names, ends, strict=True))

    swept = losses([(name, lr, seeds[0]) for name in ("LAMB", "1-bit LAMB") for lr in rates])
    best = {name: min(rates, key=lambda lr: swept[name, lr, seeds[0]]) for name in ("LAMB", "1-bit LAMB")}
    best["1-bit LAMB without error feedback"] = best["1-bit LAMB"]
    rest = [
        (name, best[name], seed) for name in best for seed in seeds if (name, best[name], seed) not in swept
    ]
    every = {**swept, **losses(rest)}
    rows = {}
    for name, lr in best.items():
        values = [every[name, lr, seed] for seed in seeds]
        ended = [value for value in values if math.isfinite(value)]
        rows[name] = {
            "lr": lr,
            "losses": ended,
            "diverged": len(values) - len(ended),
            "mean": statistics.mean(ended) if ended else None,
            "deviation": statistics.stdev(ended) if len(ended) > 1 else None,
        }
    assert rows["1-bit LAMB"]["mean"] and rows["LAMB"]["mean"], (
        "the best learning rate of one diverges with other seeds"
    )
    difference = rows["1-bit LAMB"]["mean"] - rows["LAMB"]["mean"]
    allowed = max(rows["LAMB"]["deviation"], 0.005 * rows["LAMB"]["mean"])
    sweep = {
        f"{name} lr {lr:g}": loss if math.isfinite(loss) else "diverged"
        for (name, lr, _), loss in swept.items()
    }
    return {"sweep": sweep, "runs": rows, "difference": difference, "allowed": allowed, "steps": steps}


STRATEGIES: dict[str, dict[str, Any]] = {
    "single server": {"dp_strategy": "parameter-server"},
    "sharded server": {"dp_strategy": "sharded-parameter-server"},
    "Horovod": {"dp_strategy": "fused-all-reduce"},
    "sharded server + bf16 wire": {"dp_strategy": "sharded-parameter-server", **BF16},
    "Horovod + bf16 wire": {"dp_strategy": "fused-all-reduce", **BF16},
    "sharded server + bf16": {"dp_strategy": "sharded-parameter-server", "precision": "bf16", **BF16},
    "Horovod + bf16": {"dp_strategy": "fused-all-reduce", "precision": "bf16", **BF16},
    "all-reduce": {},
    "ZeRO-1": {"dp_strategy": "distributed-optimizer"},
    "ZeRO-2": {"dp_strategy": "distributed-optimizer", "shard_gradients": True},
    "ZeRO-3": {"dp_strategy": "fully-sharded"},
    "async server": {"dp_strategy": "async-parameter-server"},
    "local SGD, 8 steps": {"dp_strategy": "local-sgd", "sync_interval": 8},
    "DiLoCo, 8 steps": {"dp_strategy": "diloco", "sync_interval": 8},
    "gossip, ring": {"dp_strategy": "gossip"},
    "gossip, one peer": {"dp_strategy": "gossip", "gossip_graph": "one-peer"},
    "1-bit gradients": {"grad_compression": "onebit"},
    "8-bit gradients": {"grad_compression": "uint8"},
    "top 1 %": {"grad_compression": "topk"},
    "PowerSGD": {"grad_compression": "powersgd"},
    "1-bit Adam": {"optimizer": "onebit-adam", "freeze_step": 4},
    "0/1 Adam": {"optimizer": "zero-one-adam", "freeze_step": 4},
}
"""The study's rows first: its mixed precision is fp16 compute and wire; here wire and compute are told apart."""
TOKENS = GPT["global_batch_size"] * GPT["seq_length"]
"""Of a step."""
GENTLE = {"lr": 1e-3}
"""For AdamW; the others' learning rates are LAMB's."""


def strategies(bench: Bench, rates: Sequence[float | None], steps: int) -> dict[str, Any]:
    """Every strategy on the same batches: on one host without a limit, and over shaped links. The first four steps of each
    run are left out of the times."""
    rows: dict[str, Any] = {}
    for rate in rates:
        label = "no limit" if rate is None else f"{rate:g} Mbit/s"
        cases = [bench.case(name, steps=steps, settings={**GENTLE, **s}) for name, s in STRATEGIES.items()]
        for name, records in bench.run(cases, rate=rate).items():
            counted = steps_of(records)[4:]
            all_sent = [
                sum(r["sent"] for r in steps_of(records, rank)[4:]) / len(counted) for rank in range(RANKS)
            ]
            rows.setdefault(name, {})[label] = {
                "tokens/s": TOKENS * len(counted) / sum(r["seconds"] for r in counted),
                "MB sent a step, mean and most": [sum(all_sent) / RANKS / 1e6, max(all_sent) / 1e6],
                "state MB, ranks 0 and 1": [end_of(records, rank)["state_bytes"] / 1e6 for rank in (0, 1)],
                "last loss": counted[-1]["loss"],
            }
    return rows


def single(data: str, steps: int) -> dict[str, Any]:
    """The same batches on one rank, one thread."""
    with ShapedLinks(1) as links:
        alone = Bench(links, data)
        case = alone.case("single process", steps=steps, settings={**GENTLE, "dp": 1})
        records = alone.run([case], rate=None)["single process"]
    counted = steps_of(records)[4:]
    return {
        "no limit": {
            "tokens/s": TOKENS * len(counted) / sum(r["seconds"] for r in counted),
            "MB sent a step, mean and most": [0.0, 0.0],
            "state MB, ranks 0 and 1": [end_of(records)["state_bytes"] / 1e6],
            "last loss": counted[-1]["loss"],
        }
    }


PAIRS: dict[str, dict[str, Any]] = {
    "torch DDP": {},
    "torch DDP, fp16 hook": BF16,
    "torch DDP, PowerSGD hook": {"grad_compression": "powersgd", "compression_warmup_steps": 2},
    "torch ZeroRedundancyOptimizer": {"dp_strategy": "distributed-optimizer"},
    "torch FSDP2": {"dp_strategy": "fully-sharded"},
}
"""Peer -> ours that does the same."""


def peers(rates: Sequence[float | None], rounds: int, steps: int = 6) -> dict[str, Any]:
    """The peers and ours in turns, two ranks on two cores; the first two steps of each are left out."""
    rows: dict[str, Any] = {}
    with ShapedLinks(2) as links:
        bench = Bench(links, "")
        cases: list[dict[str, Any]] = []
        for peer, ours in PAIRS.items():
            assert peer in PEERS
            cases.append({"name": peer, "system": peer, "steps": steps})
            cases.append(
                {"name": f"ours: {peer}", "steps": steps, "settings": {**PEER_SETTINGS, "dp": 2, **ours}}
            )
        for rate in rates:
            label = "no limit" if rate is None else f"{rate:g} Mbit/s"
            times: dict[str, list[float]] = {case["name"]: [] for case in cases}
            bytes_sent: dict[str, float] = {}
            for _ in range(rounds):
                for name, records in bench.run(cases, rate=rate).items():
                    times[name] += [r["seconds"] for r in steps_of(records)[2:]]
                    bytes_sent[name] = statistics.median(r["sent"] for r in steps_of(records)[2:]) / 1e6
            for peer in PAIRS:
                theirs, ours_ = (statistics.median(times[name]) for name in (peer, f"ours: {peer}"))
                rows.setdefault(peer, {})[label] = {
                    "their ms": 1e3 * theirs,
                    "our ms": 1e3 * ours_,
                    "ours over theirs": theirs / ours_,
                    "MB sent a step, theirs and ours": [bytes_sent[peer], bytes_sent[f"ours: {peer}"]],
                }
    return rows


def overlap(bench: Bench, rates: Sequence[float]) -> dict[str, Any]:
    """Of the time in which buckets are being reduced, the part in which the step does not wait for them."""
    wide = {**PEER_SETTINGS, "dp": RANKS, "global_batch_size": 4 * RANKS, "ddp_bucket_size": 500_000}
    kinds = {"all-reduce": {}, "distributed-optimizer": {"dp_strategy": "distributed-optimizer"}}
    rows = {}
    for rate in rates:
        cases = [
            {"name": name, "steps": 6, "settings": {**wide, **more}, "trace": True}
            for name, more in kinds.items()
        ]
        for name, records in bench.run(cases, rate=rate).items():
            shares = [_hidden(step) for step in end_of(records)["reductions"][2:]]
            rows[f"{name}, {rate:g} Mbit/s"] = {"hidden": statistics.median(shares)}
    return rows


def _hidden(step: Mapping[str, Any]) -> float:
    """1 - waited/busy, where busy is the time in which any reduction is under way."""
    start, stop = step["exposed"]
    busy = waited = last = 0.0
    for begin, end in sorted(step["runs"]):
        begin = max(begin, last)
        if end > begin:
            busy += end - begin
            waited += max(0.0, min(end, stop) - max(begin, start))
            last = end
    return 1.0 - waited / busy


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["volume", "speed", "convergence", "strategies", "peers", "overlap"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[25, 50, 100, 250, 1000], metavar="MBIT")
    parser.add_argument("--steps", type=int, default=400, help="of a convergence run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        raise SystemExit(f"nothing measured: {reason}")
    facts: dict[str, Any] = {
        "command": shlex.join(["python", *map(str, sys.argv)]),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    results: dict[str, Any] = {**facts}
    if arguments.json is not None and arguments.json.exists():
        results = {**json.loads(arguments.json.read_text()), **facts}
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_text(Path(folder))

        def joined(part: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
            with ShapedLinks(RANKS) as links:
                return part(Bench(links, data), *args)

        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "volume": lambda: joined(volume),
            "speed": lambda: joined(speed, arguments.rates, arguments.rounds),
            "convergence": lambda: joined(
                convergence, arguments.steps, [4e-3, 8e-3, 1.6e-2, 3.2e-2], [1, 2, 3]
            ),
            "strategies": lambda: {
                "single process": single(data, 20),
                **joined(strategies, [None, 100.0], 20),
            },
            "overlap": lambda: joined(overlap, [250.0, 1000.0]),
            "peers": lambda: peers([None, 250.0], arguments.rounds),
        }
        for name in arguments.parts:
            results[name] = {**parts[name](), "command": facts["command"]}
            print(name, json.dumps(results[name], indent=1), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
