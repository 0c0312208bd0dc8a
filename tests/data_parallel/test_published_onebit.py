"""Compare `onebit_rule deepspeed` with the equations of arXiv 2102.02888, 2104.06069 and DeepSpeed 0.19.6 in numpy."""

from typing import Any

import numpy as np
import pytest

from megalite.config.describe import replace
from megalite.optimizers.base import Update
from megalite.planner.communication import norm_terms
from tests.data_parallel.onebit_oracles import Layout, layouts
from tests.data_parallel.toy import NO_DECAY, SHAPES, ToyRun, gradient
from tests.support.ranks import RankContext, run_ranks

FREEZE, STEPS, LR, DECAY, CLIP, EPS, B1 = 4, 9, 0.02, 0.1, 150.0, 1e-8, 0.9
Arrays = dict[str, Any]


def of_rank(rank: int) -> float:
    """Return a rank's gradient scale; they differ so that some ranks clip by their norm and others do not."""
    return 1.0 + 0.5 * rank


def run_published(context: RankContext, dp: int, settings: dict[str, Any]) -> tuple[list[Arrays], list[Layout]]:
    """Return the weights before the first step and after each step, and the buckets."""
    common = {"onebit_rule": "deepspeed", "freeze_step": FREEZE, "precision": "fp64", "clip_grad": CLIP}
    run = ToyRun(context.topology(dp=dp), {**common, **settings})
    found = [{name: value.numpy() for name, value in run.weights().items()}]
    for step in range(1, STEPS + 1):
        sums = run.gradients(scale=of_rank(context.rank))
        assert len(sums) == norm_terms(replace(run.config, dp=dp)), "the planner includes them"
        norm = run.strategy.norms(sums).clipping
        run.steps = step
        factor = min(1.0, CLIP / norm)
        run.strategy.update(run.optimizer, Update(step=step, lr=LR, weight_decay=DECAY, factor=factor))
        found.append({name: value.numpy() for name, value in run.weights().items()})
    run.strategy.close()
    return found, layouts(run)


class CompressedAllReduce:
    """Error-compensated signs of one flat buffer of `size` elements; those after the first `used` are padding."""

    def __init__(self, workers: int, used: int, size: int) -> None:
        self.used, self.chunk = used, size // workers
        self.worker_error, self.server_error = np.zeros((workers, used)), np.zeros(used)

    def __call__(self, buffers: Any) -> Any:
        if len(buffers) == 1:
            return buffers[0]
        corrected = buffers + self.worker_error
        scale = np.linalg.norm(corrected, axis=1, keepdims=True) / np.sqrt(self.used)
        sent = scale * np.where(corrected >= 0, 1.0, -1.0)
        self.worker_error = corrected - sent
        served = sent.mean(axis=0) + self.server_error
        result = np.empty(self.used)
        for start in range(0, self.used, self.chunk):
            part = served[start : start + self.chunk]
            signs = np.where(part >= 0, 1.0, -1.0)
            result[start : start + self.chunk] = np.linalg.norm(part) / np.sqrt(part.size) * signs
        self.server_error = served - result
        return result


def clipped(gradients: Arrays) -> Arrays:
    norm = np.sqrt(sum((value**2).sum() for value in gradients.values()))
    return {name: value * min(1.0, CLIP / norm) for name, value in gradients.items()}


def published(
    x: Arrays, buckets: list[Layout], workers: int, *, lamb: bool, b2: float, highest: float
) -> tuple[list[Arrays], dict[str, float]]:
    """Return the weights after each step, and the r of LAMB after the last one."""
    x, found = {name: value.copy() for name, value in x.items()}, []
    m, v, fresh = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(3))
    coefficient, last_factor = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 1.0)
    scaling = dict.fromkeys(SHAPES, 1.0)
    reduces = [CompressedAllReduce(workers, max(end for _, end in b.places.values()), b.size) for b in buckets]
    for step in range(1, STEPS + 1):
        own = [
            {name: workers * gradient(name, step, rank, of_rank(rank)).double().numpy() for name in SHAPES}
            for rank in range(workers)
        ]
        if step <= FREEZE:
            g = clipped({name: sum(each[name] for each in own) / workers for name in SHAPES})
            for name in SHAPES:
                m[name] = B1 * m[name] + (1 - B1) * g[name]
                v[name] = b2 * v[name] + (1 - b2) * g[name] ** 2
                u = m[name] / (np.sqrt(v[name]) + EPS) + (0.0 if name in NO_DECAY else DECAY) * x[name]
                c = 1.0
                if lamb:
                    c = float(np.clip(np.linalg.norm(x[name]) / np.linalg.norm(u), 0.01, highest))
                    if c != 1.0:
                        coefficient[name] = 0.9 * coefficient[name] + 0.1 * c
                x[name] = x[name] - LR * c * u
        else:
            if step == FREEZE + 1 and lamb:
                fresh = {name: value.copy() for name, value in v.items()}
                sizes = {name: np.linalg.norm(m[name]) / np.sqrt(m[name].size) for name in SHAPES}
                scaling = {name: np.mean(list(sizes.values())) / sizes[name] for name in SHAPES}
            own = [clipped(each) for each in own]
            momenta = [{n: scaling[n] * (B1 * m[n] + (1 - B1) * each[n]) for n in SHAPES} for each in own]
            before, m = m, {}
            for bucket, reduce in zip(buckets, reduces, strict=True):
                buffers = np.stack([np.concatenate([each[n].ravel() for n in bucket.places]) for each in momenta])
                mean = reduce(buffers)
                for name, (start, stop) in bucket.places.items():
                    m[name] = mean[start:stop].reshape(SHAPES[name]) / scaling[name]
            for name in SHAPES:
                below, decay = np.sqrt(v[name]) + EPS, 0.0 if name in NO_DECAY else DECAY
                direction = m[name] / below
                u, rate = direction + decay * x[name], LR
                if lamb:
                    reconstructed = (m[name] - B1 * before[name]) / (1 - B1)
                    fresh[name] = b2 * fresh[name] + (1 - b2) * reconstructed**2
                    factor = float((below / (np.sqrt(fresh[name]) + EPS)).max())
                    if decay > 0:
                        ratio = min(1.0, np.linalg.norm(direction) / np.linalg.norm(u))
                        factor = factor * ratio + 1 - ratio
                    factor, last = min(max(factor, 0.5), 4.0), last_factor[name]
                    last_factor[name] = factor = min(max(factor, 0.9 * last), 1.1 * last)
                    rate = LR * coefficient[name] * factor
                x[name] = x[name] - rate * u
        found.append({name: value.copy() for name, value in x.items()})
    return found, last_factor


@pytest.mark.parametrize(
    ("workers", "lamb", "b2", "highest"),
    [(4, True, 0.9, 10.0), (3, True, 0.9, 10.0), (1, True, 0.9, 10.0), (2, True, 0.5, 1.0), (4, False, 0.9, 10.0)],
)
def test_weights_equal_the_published_algorithm(workers: int, lamb: bool, b2: float, highest: float) -> None:
    settings: dict[str, Any] = {"optimizer": "onebit-adam", "adam_beta2": b2}
    if lamb:
        settings |= {"optimizer": "onebit-lamb", "lamb_max_coeff": highest}
    runs = run_ranks(workers, run_published, workers, settings)
    (first, *_), buckets = runs[0]
    wanted, factors = published(first, buckets, workers, lamb=lamb, b2=b2, highest=highest)
    for (_, *found), _ in runs:
        for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True), start=1):
            for name in SHAPES:
                np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, err_msg=f"{name} after step {step}")
    frozen = [wanted[FREEZE - 1], wanted[-1]]
    if highest == 1.0:
        assert all((frozen[0][name] == frozen[1][name]).all() for name in SHAPES), "all coefficients are 1: no step"
    elif lamb:
        assert any(abs(factor - 1.0) > 0.2 for factor in factors.values()), "r must change"
        assert (frozen[0]["bias"] != frozen[1]["bias"]).any()
