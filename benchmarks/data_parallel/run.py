"""Data parallelism over slow links: bytes, time and loss of megalite's strategies, and of torch's.

    python -m benchmarks.data_parallel.run [--parts volume speed ...] [--rounds 3] [--json benchmarks/results/FILE.json]

Four ranks, each in its own network namespace with a link of a given rate (links.py); one thread per rank.
Bytes are the interfaces' own counters. It needs root; otherwise it reports this and measures nothing.

    volume       LAMB and 1-bit LAMB with a warm-up of a sixth of the steps: bytes compared with the formula
    speed        the same, whole runs with their warm-up, over link rates
    convergence  validation loss of both on real text, learning rates swept, three seeds; and without error feedback
    strategies   the six of the GPT-2 study, and all others of megalite: tokens/s, bytes, memory, loss
    peers        torch DDP, its fp16 and PowerSGD hooks, ZeroRedundancyOptimizer and FSDP2 compared with megalite, in turn
    pulls        effect of a sharded server that first sends the parameters that the next forward needs first"""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.data_parallel.links import ShapedLinks, unavailable
from benchmarks.data_parallel.worker import PEERS
from benchmarks.data_parallel.worker import SETTINGS as PEER_SETTINGS

RANKS = 4
STEPS, FREEZE = 60, 10  # A warm-up of a sixth of the steps
GPT = common.settings(  # 0.87 million parameters on bytes of text
    "num_layers=4 hidden_size=128 num_attention_heads=4 vocab_size=257 seq_length=64 micro_batch_size=4 adam_beta2=0.95 "
    f"global_batch_size={4 * RANKS} lr=4e-3 lr_decay_style=constant train_iters=1000000 weight_decay=0.01"
)
WIDE = common.settings("num_layers=6 hidden_size=320 num_attention_heads=5 micro_batch_size=1")
WIDE["global_batch_size"] = RANKS
"""Alternative: 7.5 million parameters, so that small messages hardly count, and small batches."""
LAMB = {"optimizer": "lamb"}
ONEBIT = {"optimizer": "onebit-lamb", "freeze_step": FREEZE}
BF16 = {"wire_dtype": "bf16"}

Records = list[dict[str, Any]]


class Bench:
    """Runs jobs on the links and keeps their results."""

    def __init__(self, links: ShapedLinks, data: str) -> None:
        self.links, self.data = links, data

    def case(self, name: str, *, steps: int = STEPS, settings: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
        merged = {**GPT, "dp": RANKS, "data_path": [self.data], "split": "9,1", **settings}
        return {"name": name, "steps": steps, "settings": merged, **more}

    def run(self, cases: Sequence[dict[str, Any]], *, rate: float | None) -> dict[str, Records]:
        """Run cases one after the other. Returns case name -> records of all ranks."""
        self.links.set_rate(rate)
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.json"
            job.write_text(json.dumps({"cases": cases}))
            worker = common.python("-m", "benchmarks.data_parallel.worker", str(job), folder)
            started = [self.links.start(rank, worker) for rank in range(self.links.ranks)]
            if any([process.wait() for process in started]):
                raise SystemExit("a rank failed (see above)")
            texts = [path.read_text() for path in Path(folder).glob("rank*.jsonl")]
            lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return {case["name"]: [line for line in lines if line["case"] == case["name"]] for case in cases}


def steps_of(records: Records, rank: int = 0) -> Records:
    return sorted((r for r in records if r["rank"] == rank and "step" in r), key=lambda r: r["step"])


def end_of(records: Records, rank: int = 0) -> dict[str, Any]:
    """A rank's record at the end of the case."""
    return next(r for r in records if r["rank"] == rank and r.get("done"))


def seconds(records: Records, first: int = 1) -> float:
    """Seconds of all steps from `first` on rank 0."""
    return sum(r["seconds"] for r in steps_of(records)[first - 1 :])


def sent(records: Records) -> float:
    return sum(r["sent"] for r in records if "step" in r) / RANKS


def prepare_text(folder: Path) -> str:
    """Write documentation and source of Python's library as bytes. Returns the prefix of the token files."""
    corpus, prefix = folder / "corpus.jsonl", folder / "bytes"
    build = ["examples/quickstart/build_corpus.py", "--output", str(corpus)]
    make = ["tools/preprocess_data.py", "--input", str(corpus), "--output-prefix", str(prefix)]
    for command in (build, [*make, "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]):
        common.run_python(*command)
    return f"{prefix}_text_document"


def volume(bench: Bench) -> dict[str, Any]:
    """Bytes of whole runs with a warm-up of w = 1/6, and by the formula 1/(w + (1 - w)/k)."""
    # The early measurement of the 1-bit break-even sends as much as a step: it is included.
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
    rows = {}
    for kind, k in (("fp32", 32.0), ("bf16", 16.0)):
        ratio = total[f"LAMB {kind}"] / total[f"1-bit LAMB, {kind} warm-up"]
        formula = 1.0 / (FREEZE / STEPS + (1.0 - FREEZE / STEPS) / k)
        rows[kind] = {"times less": ratio, "formula": formula, "off by %": 100.0 * (ratio / formula - 1.0)}
    payload = {name: sum(r["wire"] for r in records if "step" in r) / RANKS for name, records in found.items()}
    measured = {name: total[name] / payload[name] for name in total}
    return {"bytes per rank": total, "ratio": rows, "interface bytes / wire()": measured}


def speed(bench: Bench, rates: Sequence[float], rounds: int) -> dict[str, Any]:
    """Times of whole runs over link rates, in turn; medians over rounds."""
    kinds = {"LAMB fp32": LAMB, "LAMB bf16": {**LAMB, **BF16}, "1-bit LAMB": {**ONEBIT, **BF16}}
    cases = [bench.case(name, settings=settings) for name, settings in kinds.items()]
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
        row = {"seconds": median, "ms a compressed step": 1e3 * statistics.median(frozen), "notes": notes}
        row |= {f"over {name}": median[name] / median["1-bit LAMB"] for name in ("LAMB fp32", "LAMB bf16")}
        rows[f"{rate:g} Mbit/s"] = row
        print(f"{rate:>6g} Mbit/s  " + json.dumps(row), flush=True)
    return rows


def convergence(bench: Bench, steps: int, rates: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    """Validation loss after the same number of samples: the best learning rate of each method, then all seeds with it."""
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
        cases = []
        for name, lr, seed in names:
            optimizer, more = systems[name]
            own, title = settings(optimizer, lr, seed), f"{name} lr {lr:g} seed {seed}"
            cases.append(bench.case(title, steps=steps, settings=own, validate=True, **more))
        found = bench.run(cases, rate=None)
        # A diverged run has no loss and counts as the worst.
        ends = [end_of(found[case["name"]]).get("validation_loss", math.inf) for case in cases]
        for case, loss in zip(cases, ends, strict=True):
            print(f"{case['name']}: {loss:.4f}", flush=True)
        return dict(zip(names, ends, strict=True))

    swept = losses([(name, lr, seeds[0]) for name in ("LAMB", "1-bit LAMB") for lr in rates])
    best = {name: min(rates, key=lambda lr: swept[name, lr, seeds[0]]) for name in ("LAMB", "1-bit LAMB")}
    best["1-bit LAMB without error feedback"] = best["1-bit LAMB"]
    wanted = [(name, best[name], seed) for name in best for seed in seeds]
    every = {**swept, **losses([key for key in wanted if key not in swept])}
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
    means = [rows[name]["mean"] for name in ("1-bit LAMB", "LAMB")]
    assert all(means), "the best learning rate of one diverges with other seeds"
    allowed = max(rows["LAMB"]["deviation"], 0.005 * means[1])
    sweep = {f"{name} lr {lr:g}": loss if math.isfinite(loss) else "diverged" for (name, lr, _), loss in swept.items()}
    return {"sweep": sweep, "runs": rows, "difference": means[0] - means[1], "allowed": allowed, "steps": steps}


_SERVER, _HOROVOD = "dp_strategy=sharded-parameter-server", "dp_strategy=fused-all-reduce"
STRATEGIES = {
    "single server": "dp_strategy=parameter-server",
    "sharded server": _SERVER,
    "Horovod": _HOROVOD,
    "sharded server + bf16 wire": f"{_SERVER} wire_dtype=bf16",
    "Horovod + bf16 wire": f"{_HOROVOD} wire_dtype=bf16",
    "sharded server + bf16": f"{_SERVER} wire_dtype=bf16 precision=bf16",
    "Horovod + bf16": f"{_HOROVOD} wire_dtype=bf16 precision=bf16",
    "all-reduce": "",
    "ZeRO-1": "dp_strategy=distributed-optimizer",
    "ZeRO-2": "dp_strategy=distributed-optimizer shard_gradients=true",
    "ZeRO-3": "dp_strategy=fully-sharded",
    "async server": "dp_strategy=async-parameter-server",
    "local SGD, 8 steps": "dp_strategy=local-sgd sync_interval=8",
    "local SGD, 8 steps, late": "dp_strategy=local-sgd sync_interval=8 sync_delay=6",
    "DiLoCo, 8 steps": "dp_strategy=diloco sync_interval=8",
    "gossip, ring": "dp_strategy=gossip",
    "gossip, one peer": "dp_strategy=gossip gossip_graph=one-peer",
    "gossip, ring, 8 bits": "dp_strategy=gossip gossip_algorithm=choco-sgd",
    "gossip, two instances, 8 bits": "dp_strategy=gossip gossip_algorithm=choco-sgd dp_instances=2",
    "1-bit gradients": "grad_compression=onebit",
    "8-bit gradients": "grad_compression=uint8",
    "top 1 %": "grad_compression=topk",
    "PowerSGD": "grad_compression=powersgd",
    "1-bit Adam": "optimizer=onebit-adam freeze_step=4",
    "0/1 Adam": "optimizer=zero-one-adam freeze_step=4",
}
"""The study's rows first: its mixed precision is fp16 compute and wire; here wire and compute are distinguished."""
TOKENS = GPT["global_batch_size"] * GPT["seq_length"]  # per step
GENTLE = {"lr": 1e-3}  # for AdamW; the others have the learning rates of LAMB


def _strategy_row(records: Records, ranks: int) -> dict[str, Any]:
    """Results of a strategy; times exclude the first four steps of each run."""
    counted = steps_of(records)[4:]
    all_sent = [sum(r["sent"] for r in steps_of(records, rank)[4:]) / len(counted) for rank in range(ranks)]
    if ranks == 1:
        all_sent = [0.0]
    return {
        "tokens/s": TOKENS * len(counted) / sum(r["seconds"] for r in counted),
        "MB sent a step, mean and most": [sum(all_sent) / ranks / 1e6, max(all_sent) / 1e6],
        "state MB, ranks 0 and 1": [end_of(records, rank)["state_bytes"] / 1e6 for rank in range(min(ranks, 2))],
        "last loss": counted[-1]["loss"],
    }


def strategies(bench: Bench, rates: Sequence[float | None], steps: int) -> dict[str, Any]:
    """Every strategy on the same batches: on one host without a limit, and over shaped links."""
    rows: dict[str, Any] = {}
    for rate in rates:
        cases = [bench.case(name, steps=steps, settings={**GENTLE, **common.settings(own)}) for name, own in STRATEGIES.items()]
        for name, records in bench.run(cases, rate=rate).items():
            rows.setdefault(name, {})[_label(rate)] = _strategy_row(records, RANKS)
    return rows


def _label(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s"


def single(data: str, steps: int) -> dict[str, Any]:
    """The same batches on one rank with one thread."""
    with ShapedLinks(1) as links:
        alone = Bench(links, data)
        case = alone.case("single process", steps=steps, settings={**GENTLE, "dp": 1})
        return {_label(None): _strategy_row(alone.run([case], rate=None)["single process"], 1)}


PAIRS: dict[str, dict[str, Any]] = {  # peer -> equivalent of megalite
    "torch DDP": {},
    "torch DDP, fp16 hook": BF16,
    "torch DDP, PowerSGD hook": {"grad_compression": "powersgd", "compression_warmup_steps": 2},
    "torch ZeroRedundancyOptimizer": {"dp_strategy": "distributed-optimizer"},
    "torch FSDP2": {"dp_strategy": "fully-sharded"},
}


def peers(rates: Sequence[float | None], rounds: int, steps: int = 6) -> dict[str, Any]:
    """The peers and megalite in turn, two ranks on two cores; times exclude the first two steps of each."""
    rows: dict[str, Any] = {}
    with ShapedLinks(2) as links:
        bench = Bench(links, "")
        cases: list[dict[str, Any]] = []
        for peer, ours in PAIRS.items():
            assert peer in PEERS
            cases.append({"name": peer, "system": peer, "steps": steps})
            settings = {**PEER_SETTINGS, "dp": 2, **ours}
            cases.append({"name": f"ours: {peer}", "steps": steps, "settings": settings})
        for rate in rates:
            times: dict[str, list[float]] = {case["name"]: [] for case in cases}
            bytes_sent: dict[str, float] = {}
            for _ in range(rounds):
                for name, records in bench.run(cases, rate=rate).items():
                    times[name] += [r["seconds"] for r in steps_of(records)[2:]]
                    bytes_sent[name] = statistics.median(r["sent"] for r in steps_of(records)[2:]) / 1e6
            for peer in PAIRS:
                theirs, ours_ = (statistics.median(times[name]) for name in (peer, f"ours: {peer}"))
                rows.setdefault(peer, {})[_label(rate)] = {
                    "their ms": 1e3 * theirs,
                    "our ms": 1e3 * ours_,
                    "ours over theirs": theirs / ours_,
                    "MB sent a step, theirs and ours": [bytes_sent[peer], bytes_sent[f"ours: {peer}"]],
                }
    return rows


_PULLS = common.settings("num_layers=8 hidden_size=384 num_attention_heads=6 vocab_size=257 seq_length=32 global_batch_size=2")
_PULLS = {**PEER_SETTINGS, **_PULLS, "dp": 2, "dp_strategy": "sharded-parameter-server"}
ORDERS: list[dict[str, Any]] = [
    {"name": "first needed first", "settings": _PULLS},
    {"name": "as pushed", "settings": _PULLS, "as_pushed": True},
    {"name": "before the forward", "settings": {**_PULLS, "overlap_param_gather": False}},
]


def pulls(rates: Sequence[float], rounds: int, steps: int = 6, sleep: float = 0.1) -> dict[str, Any]:
    """Step times of a sharded server by the order in which it sends parameters, on two ranks with sleeping layers; the first
    two steps are excluded."""
    cases = [{"steps": steps, "sleep": sleep, **order} for order in ORDERS]
    first, *others = [order["name"] for order in ORDERS]
    rows: dict[str, Any] = {"seconds of a layer's forward": sleep}
    with ShapedLinks(2) as links:
        for rate in rates:
            times: dict[str, list[float]] = {case["name"]: [] for case in cases}
            for turns in common.shuffled(cases, rounds):
                found = Bench(links, "").run(turns, rate=rate)
                same = {name: [(r["loss"], r["wire"]) for r in steps_of(records)] for name, records in found.items()}
                assert same[first] == same[others[0]] == same[others[1]], f"losses or bytes differ: {same}"
                for name, records in found.items():
                    times[name].append(1e3 * seconds(records, 3) / (steps - 2))
            row: dict[str, Any] = {"ms": {name: statistics.median(each) for name, each in times.items()}, "rounds": times}
            row |= {f"over {name}": common.ratio(times[name], times[first]) for name in others}
            row["MB per step"] = same[first][-1][1] / 1e6
            rows[_label(rate)] = row
            print(_label(rate), json.dumps(row), flush=True)
    return rows


def measure(names: Sequence[str], rates: Sequence[float], rounds: int, steps: int) -> Iterator[tuple[str, Any]]:
    """Yield (part, result), one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_text(Path(folder))

        def joined(part: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
            with ShapedLinks(RANKS) as links:
                return part(Bench(links, data), *args)

        swept = [4e-3, 8e-3, 1.6e-2, 3.2e-2]
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "volume": lambda: joined(volume),
            "speed": lambda: joined(speed, rates, rounds),
            "convergence": lambda: joined(convergence, steps, swept, [1, 2, 3]),
            "strategies": lambda: {"single process": single(data, 20), **joined(strategies, [None, 100.0], 20)},
            "peers": lambda: peers([None, 1000.0], rounds),
            "pulls": lambda: pulls([250.0, 500.0], rounds),
        }
        for name in names:
            yield name, parts[name]()


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write here what was measured; other parts of the file stay")
    names = ["volume", "speed", "convergence", "strategies", "peers", "pulls"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[25, 50, 100, 250, 1000], metavar="MBIT")
    parser.add_argument("--steps", type=int, default=400, help="of a convergence run")
    flags = parser.parse_args(words)
    reason = unavailable()
    if reason is not None:
        raise SystemExit(f"nothing measured: {reason}")
    results: dict[str, Any] = {}
    if flags.json is not None and flags.json.exists():
        results = {key: value for key, value in json.loads(flags.json.read_text()).items() if key in names}
    for name, found in measure(flags.parts, flags.rates, flags.rounds, flags.steps):
        results[name] = {**found, "command": common.command("data_parallel.run", words)}
        print(name, json.dumps(results[name], indent=1), flush=True)
        common.write_json(flags.json, "data_parallel.run", words, results)


if __name__ == "__main__":
    main()
