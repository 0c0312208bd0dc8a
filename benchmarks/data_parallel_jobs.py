"""The runs that data_parallel.py measures: one model on real text, jobs of four ranks on shaped links, what they wrote."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shaped_links import ShapedLinks

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
STEPS, FREEZE = 60, 10
"""A warm-up of a sixth."""
GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 257,
    "seq_length": 64,
    "micro_batch_size": 4,
    "global_batch_size": 4 * RANKS,
    "adam_beta2": 0.95,
    "lr": 4e-3,
    "lr_decay_style": "constant",
    "train_iters": 10**6,
    "weight_decay": 0.01,
}
"""0.87 million parameters on bytes of text."""
WIDE: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 320,
    "num_attention_heads": 5,
    "micro_batch_size": 1,
    "global_batch_size": RANKS,
}
"""Instead: 7.5 million parameters, beside which messages of a few numbers weigh little, and small batches."""
LAMB = {"optimizer": "lamb"}
ONEBIT = {"optimizer": "onebit-lamb", "freeze_step": FREEZE}
BF16 = {"wire_dtype": "bf16"}

Records = list[dict[str, Any]]


class Bench:
    """Runs jobs on the links and keeps what they wrote."""

    def __init__(self, links: ShapedLinks, data: str) -> None:
        self.links, self.data = links, data

    def case(
        self, name: str, *, steps: int = STEPS, settings: Mapping[str, Any] = {}, **more: Any
    ) -> dict[str, Any]:
        """Our run on the real text."""
        merged = {**GPT, "dp": RANKS, "data_path": [self.data], "split": "9,1", **settings}
        return {"name": name, "steps": steps, "settings": merged, **more}

    def run(self, cases: Sequence[dict[str, Any]], *, rate: float | None) -> dict[str, Records]:
        """Cases one after the other; case name -> the lines of all ranks."""
        self.links.set_rate(rate)
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.json"
            job.write_text(json.dumps({"cases": cases}))
            worker = [sys.executable, str(ROOT / "benchmarks" / "data_parallel_worker.py"), str(job), folder]
            started = [self.links.start(rank, worker) for rank in range(self.links.ranks)]
            if any([process.wait() for process in started]):
                raise SystemExit("a rank failed (see above)")
            texts = [path.read_text() for path in Path(folder).glob("rank*.jsonl")]
            lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return {case["name"]: [line for line in lines if line["case"] == case["name"]] for case in cases}


def steps_of(records: Records, rank: int = 0) -> Records:
    """The steps of one rank, in order."""
    return sorted((r for r in records if r["rank"] == rank and "step" in r), key=lambda r: r["step"])


def end_of(records: Records, rank: int = 0) -> dict[str, Any]:
    """What a rank wrote at the end of the case."""
    return next(r for r in records if r["rank"] == rank and r.get("done"))


def seconds(records: Records, first: int = 1) -> float:
    """Of all steps from `first` on, on rank 0."""
    return sum(r["seconds"] for r in steps_of(records)[first - 1 :])


def sent(records: Records) -> float:
    """Mean bytes that a rank has sent."""
    return sum(r["sent"] for r in records if "step" in r) / RANKS


def prepare_text(folder: Path) -> str:
    """Bytes of the documentation and source of Python's own library; returns the prefix of the token files."""
    corpus, prefix = folder / "corpus.jsonl", folder / "bytes"
    build = ["examples/quickstart/build_corpus.py", "--output", str(corpus)]
    make = ["tools/preprocess_data.py", "--input", str(corpus), "--output-prefix", str(prefix)]
    for command in (build, [*make, "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return f"{prefix}_text_document"
