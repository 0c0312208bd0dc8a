"""The best learning rate at two widths, with muP and without, on Shakespeare by character. About 20 minutes on a CPU."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from megalite import Callback, RunConfig, Trainer
from megalite.config import files
from megalite.config.describe import replace

BASE = 64
"""The width that rates are found with."""


class LastLoss(Callback):
    """Keeps the last validation loss."""

    def __init__(self) -> None:
        self.loss = math.nan

    def on_evaluation(self, trainer: Any, record: dict[str, Any]) -> None:
        self.loss = record["valid_loss"]


def config_of(width: int, rate: float, steps: int, *, mup: bool) -> RunConfig:
    """The Shakespeare example's run with another width and rate, heads of 32 channels, and no checkpoints."""
    config = files.load("examples/shakespeare/run.yaml")
    alone = {"load": None, "run_dir": None, "save_interval": None, "fresh_if_missing": False}
    sizes = {"hidden_size": width, "num_attention_heads": width // 32}
    rates = {"lr": rate, "min_lr": rate / 10, "lr_warmup_iters": steps // 10}
    more = {"use_mup": mup, "mup_base_hidden_size": BASE, "mup_base_head_dim": 32} if mup else {}
    return replace(
        config,
        **alone,
        **sizes,
        **rates,
        **more,
        train_iters=steps,
        eval_interval=steps,
        eval_iters=20,
        log_interval=steps,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Train all, and print the validation losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[2**-9, 2**-8, 2**-7, 2**-6, 2**-5])
    flags = parser.parse_args(words)
    print("            width", *(f"lr {rate:<7.2g}" for rate in flags.rates), " best")
    for mup in (False, True):
        for width in flags.widths:
            losses = []
            for rate in flags.rates:
                last = LastLoss()
                Trainer(config_of(width, rate, flags.steps, mup=mup), callbacks=[last], log=lambda line: None).fit()
                losses.append(last.loss)
            best = flags.rates[losses.index(min(losses))]
            name = "with muP" if mup else "without"
            print(f"{name:>11} {width:5}", *(f"{loss:10.4f}" for loss in losses), f" {best:.2g}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
