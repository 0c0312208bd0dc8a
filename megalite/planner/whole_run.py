"""Predict a whole training run: its time with a batch ramp-up, failures and saves, and its cost and energy.

If failures are random with mean time M between them, a save of C seconds follows each T seconds of training, and a
restart takes R, then T seconds of training take M·e^(R/M)·(e^((T+C)/M) - 1) (J. T. Daly, 2006). The interval between
saves is sqrt(2·C·M) (J. W. Young, 1974), near the optimum for C far below M. No price or failure rate is assumed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.config.batch import batch_sizes, ramp
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.planner.cost.step import predict
from megalite.planner.hardware import Cluster, SoftwareStack

_PRICED = 6  # batch sizes of a ramp-up that are predicted; others are interpolated


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    tokens: float
    gpu_hour_price: float | None = None  # in any currency; default: the cluster file's
    mtbf_hours: float | None = None  # mean hours of one GPU between failures that stop the job
    save_seconds: float | None = None  # that a checkpoint stops training
    restart_seconds: float = 600.0  # from a failure until training continues from the last save

    def __post_init__(self) -> None:
        if (self.mtbf_hours is None) != (self.save_seconds is None):
            words = (
                ("--mtbf-hours", "--save-seconds 30") if self.mtbf_hours else ("--save-seconds", "--mtbf-hours 50000")
            )
            raise ConfigError("{} is set alone; goodput requires both: add {}".format(*words))

    def of(
        self, config: RunConfig, ranks: int, step_seconds: float, cluster: Cluster, stack: SoftwareStack
    ) -> dict[str, Any]:
        """Predict the training run with a validated config of which the steps of the largest batch take `step_seconds`.
        Keys: `seconds`, `gpu_hours`, and if their inputs are known `failures`, `cost` and `energy`."""
        computing = _computing(config, self.tokens, _by_size(config, step_seconds, cluster, stack))
        found: dict[str, Any] = {"computing_seconds": computing, "seconds": computing}
        if self.mtbf_hours is not None and self.save_seconds is not None:
            mtbf = 3600.0 * self.mtbf_hours / ranks
            interval = math.sqrt(2.0 * self.save_seconds * mtbf)
            share = goodput(interval, self.save_seconds, mtbf, self.restart_seconds)
            found["seconds"] = computing / share if share > 0.0 else math.inf
            found["failures"] = {
                "goodput": share,
                "mean_seconds_between": mtbf,
                "count": found["seconds"] / mtbf,
                "save_interval_seconds": interval,
                "save_interval": max(1, round(interval / step_seconds)),
            }
        found["gpu_hours"] = hours = ranks * found["seconds"] / 3600.0
        price = cluster.gpu_hour_price if self.gpu_hour_price is None else self.gpu_hour_price
        if price is not None:
            money = price * hours
            found["cost"] = {"gpu_hour_price": price, "whole": money, "million_tokens": money / self.tokens * 1e6}
        watts = cluster.accelerator.watts
        if watts is not None:
            watts = min(watts, cluster.accelerator.power_limit or watts)
            joules = watts * hours * 3600.0
            found["energy"] = {"watts": watts, "kilowatt_hours": joules / 3.6e6, "token_joules": joules / self.tokens}
        return found


def goodput(interval: float, save: float, mtbf: float, restart: float) -> float:
    """Return the fraction of time spent on training if a save of `save` seconds follows each `interval` seconds of it."""
    if (interval + save + restart) / mtbf > 700.0:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))


def _computing(config: RunConfig, tokens: float, seconds: Callable[[int], float]) -> float:
    """Return the seconds of training on `tokens`; `seconds` of a step by batch size."""
    left, taken = tokens / config.training.seq_length, 0.0
    for size, steps in ramp(config):
        now = min(float(steps), left / size)
        taken += now * seconds(size)
        left -= now * size
    final = batch_sizes(config)[-1]
    return taken + left / final * seconds(final)


def _by_size(config: RunConfig, largest: float, cluster: Cluster, stack: SoftwareStack) -> Callable[[int], float]:
    """Return a function from batch size to seconds of a step."""
    sizes = sorted(set(batch_sizes(config)))
    places = np.unique(np.linspace(0, len(sizes) - 1, _PRICED).round().astype(int)).tolist()
    known = {sizes[-1]: largest}
    for size in (sizes[place] for place in places[:-1]):
        fixed = replace(config, global_batch_size=size, rampup_batch_size=None, step_batch_size_schedule=None)
        known[size] = float(predict(fixed, cluster, stack).step_seconds)
    at = sorted(known)
    return lambda size: float(np.interp(size, at, [known[each] for each in at]))
