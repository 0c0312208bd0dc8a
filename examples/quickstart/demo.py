#!/usr/bin/env python3
"""The main job, start to end: corpus, tokenizer, token files, a GPT trained on four ranks, stopped half way, continued
on another layout, and text from it. `make demo` runs this; every command is printed before it runs.

Interrupted (kill it at any time), the same command continues from the last checkpoint. Once finished, it starts over.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from megalite.cli.runs import draw, read_run
from megalite.training.records import read_records

RUN = Path("runs/quickstart")
DATA = RUN / "data"
CONFIG = "examples/quickstart/run.yaml"
STEPS = 300
SWITCH = 150
BIN = Path(sys.executable).parent


def layouts() -> tuple[int, list[str], list[str]]:
    """Processes, and the layout flags of the first and the second half, for the devices of this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    precision = ["--bf16"] if gpus else []
    if gpus == 1:
        return 1, [*precision], [*precision, "--dp-strategy", "distributed-optimizer"]
    if gpus in (2, 3):
        return 2, ["--tp", "2", *precision], ["--tp", "1", "--pp", "2", *precision]
    return (
        4,
        ["--tp", "2", "--pp", "2", "--vpp", "2", *precision],
        ["--tp", "1", "--pp", "2", "--dp", "2", *precision],
    )


def say(text: str) -> None:
    """A line of the demo's own."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def run(*command: str | Path) -> None:
    """Show a command and run it."""
    words = [str(word) for word in command]
    shown = [Path(words[0]).name, *words[1:]]
    print("$ " + " ".join(f"'{word}'" if " " in word else word for word in shown), flush=True)
    # One thread per rank: four ranks share the cores.
    subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def prepare_data() -> None:
    """Corpus, tokenizer and token files, each unless it is there."""
    DATA.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer, tokens = DATA / "corpus.jsonl", DATA / "tokenizer.model", DATA / "corpus"
    say("1. A corpus of real text: the documentation and the source of Python's own library")
    if not corpus.exists():
        run(sys.executable, "examples/quickstart/build_corpus.py", "--output", corpus)
    say("2. A tokenizer trained on it")
    if not tokenizer.exists():
        prefix = tokenizer.with_suffix("")
        run(BIN / "megalite", "train-tokenizer", "--input", corpus, "--output-prefix", prefix, "--vocab-size", "2048")
    say("3. Token files in Megatron's .bin/.idx format")
    if not (DATA / "corpus_text_document.idx").exists():
        preprocess = [sys.executable, "tools/preprocess_data.py", "--input", corpus, "--output-prefix", tokens]
        run(*preprocess, "--tokenizer-model", tokenizer, "--append-eod")


def steps_done() -> int:
    """Step of the newest checkpoint."""
    latest = RUN / "checkpoints" / "latest"
    return int(latest.read_text().strip().rpartition("-")[2]) if latest.exists() else 0


def train() -> None:
    """Both halves of the run."""
    processes, first, second = layouts()
    launch = [BIN / "torchrun", "--nproc-per-node", str(processes), "pretrain_gpt.py", "--config", CONFIG]
    length = ["--train-iters", str(STEPS)]
    if steps_done() < SWITCH:
        say(f"4. Train on {processes} ranks: {' '.join(first)}")
        run(*launch, *first, *length, "--exit-interval", str(SWITCH))
    say(f"5. The same run from its checkpoint, on another layout: {' '.join(second)}")
    run(*launch, *second, *length)


def summary(seconds: float) -> str:
    """The table at the end."""
    records = read_records(RUN)
    train = {record["step"]: record for record in records if record["kind"] == "train"}
    valid: dict[int, list[float]] = {}
    for record in records:
        if record["kind"] == "valid":
            valid.setdefault(record["step"], []).append(float(record["valid_loss"]))
    draw([read_run(RUN, RUN.name)], "Two layouts of one run", RUN / "loss.png", marked=[SWITCH])

    def speed(first: int, last: int) -> float:
        rates = sorted(train[step]["tokens_per_second"] for step in range(first + 1, last + 1))
        return float(rates[len(rates) // 2])

    _, before, after = layouts()
    rows = [
        ("", "step", "train loss", "validation loss", "tokens/s"),
        ("start", "0", f"{train[1]['loss']:.4f}", f"{valid[0][0]:.4f}", ""),
        ("before the switch", f"{SWITCH}", f"{train[SWITCH]['loss']:.4f}", f"{valid[SWITCH][0]:.4f}",
         f"{speed(0, SWITCH):.0f}"),
        ("after the switch", f"{SWITCH}", f"{train[SWITCH + 1]['loss']:.4f}", f"{valid[SWITCH][-1]:.4f}", ""),
        ("end", f"{STEPS}", f"{train[STEPS]['loss']:.4f}", f"{valid[STEPS][-1]:.4f}", f"{speed(SWITCH, STEPS):.0f}"),
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    table = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    layout_line = f"layouts: {' '.join(before) or 'one rank'}  ->  {' '.join(after) or 'one rank'}"
    checkpoint = RUN / "checkpoints"
    return f"""{table}

{layout_line}; {seconds:.0f} s in all
TensorBoard  {RUN}/tensorboard   (tensorboard --logdir {RUN})
metrics      {RUN}/metrics.jsonl
loss curve   {RUN}/loss.png
checkpoints  {checkpoint}
config       {RUN}/config.yaml

Next:
  another layout, checked and sized before it runs:
    megalite train --config {CONFIG} --tp 4 --pp 2 --dry-run
  your own text: tools/preprocess_data.py --help, then --data-path and --tokenizer-model
  a real model, sized for 1,024 ranks on this machine:
    megalite train --preset gpt3-175b --tp 8 --pp 16 --micro-batch-size 1 --global-batch-size 1536 --dry-run --world-size 1024
  more text: tools/generate_text.py --load {checkpoint} --prompt "class "
The commands are in .venv/bin; README.md has the rest."""


def check(records: list[dict[str, float]]) -> None:
    """The demo's own promises: validation loss falls by a good margin and does not jump at the switch."""
    valid = [(int(record["step"]), float(record["valid_loss"])) for record in records if record["kind"] == "valid"]
    at_switch = [loss for step, loss in valid if step == SWITCH]
    start, end = valid[0][1], valid[-1][1]
    if not end < start - 1.0:
        raise SystemExit(f"validation loss fell from {start:.4f} to {end:.4f} only: something is wrong")
    if len(at_switch) < 2:
        raise SystemExit(f"no validation loss before and after the switch at step {SWITCH}: something is wrong")
    jump = max(at_switch) - min(at_switch)
    # fp32 sums in another order; bf16 rounds them
    tolerance = 1e-4 if not torch.cuda.is_available() else 2e-2
    if jump > tolerance:
        raise SystemExit(f"validation loss jumped by {jump:.2e} at the switch of layouts: something is wrong")


def main() -> None:
    """Run the demo."""
    started = time.monotonic()
    os.chdir(Path(__file__).resolve().parents[2])
    if steps_done() >= STEPS:
        say(f"{RUN} holds a finished demo: starting over")
        shutil.rmtree(RUN)
    elif steps_done():
        say(f"{RUN} holds an unfinished demo at step {steps_done()}: continuing")
    prepare_data()
    train()
    say("6. Text from it")
    prompt = "def read(self"
    generate = [sys.executable, "tools/generate_text.py", "--load", RUN / "checkpoints", "--prompt", prompt]
    run(*generate, "--max-new-tokens", "80", "--top-k", "40")
    say("Done")
    print(summary(time.monotonic() - started))
    check(read_records(RUN))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"the command above failed with status {error.returncode}; run `make demo` again to continue from the "
                 "last checkpoint")  # fmt: skip
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; run `make demo` again to continue from the last checkpoint")
