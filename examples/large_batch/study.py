"""LAMB beside AdamW at growing batches, equal samples, on Shakespeare by character, and the gradient noise scale.

python examples/large_batch/study.py
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite import Callback, RunConfig, Trainer
from megalite.config import files
from megalite.config.describe import replace
from megalite.training.records import read_records

ROOT = Path(__file__).resolve().parents[2]
RATES = {"adam": (0.005, 0.0125, 0.03), "lamb": (0.025, 0.0625, 0.16)}
NAMES = {"adam": "AdamW", "lamb": "LAMB"}
MICRO, EVALUATED = 64, 1024
NOISE_BATCH, RANKS = 8, 4


class LastLoss(Callback):
    """Keeps the last validation loss."""

    def __init__(self) -> None:
        self.loss = math.nan

    def on_evaluation(self, trainer: Any, record: dict[str, Any]) -> None:
        self.loss = record["valid_loss"]


def settings_of(optimizer: str, rate: float, batch: int, samples: int) -> dict[str, Any]:
    """What differs from the Shakespeare example's run: a smaller model, and a schedule that lasts for `samples`."""
    return {
        "num_layers": 2,
        "hidden_size": 64,
        "optimizer": optimizer,
        "lr": rate,
        "min_lr": rate / 10,
        "lr_warmup_iters": None,
        "lr_warmup_fraction": 0.1,
        "adam_beta2": 0.98,
        "micro_batch_size": min(batch, MICRO),
        "global_batch_size": batch,
        "train_iters": samples // batch,
        "eval_interval": samples // batch,
        "eval_iters": max(1, EVALUATED // batch),
        "log_interval": 16,
        "load": None,
        "run_dir": None,
        "save_interval": None,
        "fresh_if_missing": False,
    }


def validation_loss(config: RunConfig) -> float:
    last = LastLoss()
    Trainer(config, callbacks=[last], log=lambda line: None).fit()
    return last.loss


def noise_scales(config: RunConfig, folder: Path) -> list[float]:
    """Estimates of all steps that have one, from a run on `RANKS` ranks: it needs gradients of several."""
    more = {
        "dp": RANKS,
        "micro_batch_size": NOISE_BATCH // RANKS,
        "log_gradient_noise_scale": True,
        "run_dir": str(folder),
    }
    file = folder.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(files.dump(replace(config, **more)), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    words = [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), "--config", str(file)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    found = [record.get("gradient_noise_scale") for record in read_records(folder, "train")]
    return [each for each in found if each is not None]


LEFT, TOP, WIDTH, HEIGHT = 64.0, 56.0, 500.0, 210.0


def draw(losses: dict[str, list[float]], batches: Sequence[int], noise: Sequence[float], path: Path) -> None:
    """Losses over batch sizes, and where the noise scale moved."""
    sys.path.append(str(ROOT / "docs" / "images"))
    from drawings.canvas import DARK, FAINT, GREY, MUTED, Drawing

    bottom, low, high = TOP + HEIGHT, min(map(min, losses.values())), max(map(max, losses.values()))
    first, last = noise
    said = "; ".join(f"{NAMES[name]} {' '.join(f'{each:.3f}' for each in losses[name])}" for name in losses)
    drawing = Drawing(
        bottom + 52,
        f"Validation losses of equal samples at batch sizes {' '.join(map(str, batches))}: {said}. The gradient noise scale "
        f"grew from {first:.0f} to {last:.0f} samples.",
    )

    def x(size: float) -> float:
        return LEFT + 20 + (WIDTH - 40) * math.log(size / batches[0]) / math.log(batches[-1] / batches[0])

    def y(loss: float) -> float:
        return bottom - 12 - (HEIGHT - 24) * (loss - low) / (high - low)

    drawing.text(
        24, 26, "Validation loss after the same samples, best of three rates", size=14, align="left", bold=True
    )
    start = max(x(first), LEFT)
    drawing.box(start, TOP, x(last) - start, HEIGHT, fill=GREY)
    what = f"grey: the gradient noise scale, {first:.0f} to {last:.0f} samples"
    drawing.text(LEFT + 8, TOP + 26, what, size=11, align="left", colour=MUTED)
    for part in range(5):
        loss = low + (high - low) * part / 4
        drawing.line((LEFT, y(loss)), (LEFT + WIDTH, y(loss)), colour=FAINT)
        drawing.text(LEFT - 8, y(loss), f"{loss:.2f}", size=11, align="right", colour=MUTED)
    for size in batches:
        drawing.text(x(size), bottom + 16, str(size), size=11, colour=MUTED)
    drawing.text(LEFT + WIDTH / 2, bottom + 36, "batch size, samples", size=11, colour=MUTED)
    for (name, row), colour in zip(losses.items(), DARK, strict=False):
        points = [(x(size), y(loss)) for size, loss in zip(batches, row, strict=True)]
        drawing.line(*points, colour=colour, line=2.0)
        for point in points:
            drawing.circle(*point, 3.5, fill=colour, edge=colour)
        drawing.text(LEFT + WIDTH + 12, points[-1][1], NAMES[name], align="left", colour=colour, bold=True)
    drawing.save(path)


def main(words: Sequence[str] | None = None) -> int:
    """Train all, print the losses, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/large_batch"), help="folder of the picture")
    parser.add_argument("--samples", type=int, default=4096, help="that each run trains on")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128, 512])
    flags = parser.parse_args(words)
    base, losses = files.load("examples/shakespeare/run.yaml"), dict[str, list[float]]()
    print("optimizer  batch  steps    loss   rate")
    for optimizer, rates in RATES.items():
        for batch in flags.batches:
            runs = {
                rate: validation_loss(replace(base, **settings_of(optimizer, rate, batch, flags.samples)))
                for rate in rates
            }
            best = min(runs, key=runs.__getitem__)
            losses.setdefault(optimizer, []).append(runs[best])
            print(f"{NAMES[optimizer]:9} {batch:6} {flags.samples // batch:6}  {runs[best]:.4f}  {best:g}", flush=True)
    config = replace(base, **settings_of("adam", RATES["adam"][1], NOISE_BATCH, flags.samples))
    noise = noise_scales(config, flags.output / "noise")
    if not noise:
        raise SystemExit("no step has an estimate of the noise scale; give more --samples")
    ends = noise[len(noise) // 4], noise[-1]
    print(
        f"gradient noise scale at batch {NOISE_BATCH}: {ends[0]:.0f} samples after a quarter of the steps, {ends[1]:.0f} at the end"
    )
    draw(losses, flags.batches, ends, flags.output / "losses.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
