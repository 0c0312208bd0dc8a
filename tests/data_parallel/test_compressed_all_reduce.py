"""Compare training with lossy gradients with one process that simulates all ranks, in every layout."""

from typing import Any

import pytest
import torch

from megalite.data_parallel.compression import CompressedAllReduce
from megalite.optimizers.schedules import Progress
from tests.data_parallel.compression.oracles import EightBits, Largest, LowRank
from tests.data_parallel.toy import SHAPES, ToyRun, assert_same, gradient, initial, padded
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Runner, assemble, build, local_parts, tiny_config, words

CODECS = ("onebit", "uint8", "topk", "powersgd")

TOY: dict[str, Any] = {"ddp_bucket_size": 10_000, "reduction_order": "rank", "topk_density": 0.1, "powersgd_rank": 1}
"""One bucket of matrices and one of vectors."""

MATRICES = ("down", "up", "table")  # in the order of their bucket

VECTORS = ("norm", "bias")


def toy_steps(context: RankContext, ranks: int, settings: dict[str, Any], loss_scale: float = 1.0) -> dict[str, Any]:
    run = ToyRun(context.topology(dp=ranks), {**TOY, **settings})
    found: dict[str, Any] = {"weights": [], "phases": [], "bytes": []}
    for step in range(1, 5):
        run.step(loss_scale=loss_scale)
        found["weights"].append(run.weights())
        found["phases"].append(run.strategy.phase(step))
        found["bytes"].append(run.strategy.take_wire_bytes())
    found["codecs"] = [codec.wire_bytes for codec in getattr(run.strategy, "_codecs", {}).values()]
    run.strategy.close()
    return found


def flat(tensors: dict[str, torch.Tensor], names: tuple[str, ...], ranks: int) -> torch.Tensor:
    return padded(torch.cat([tensors[name].flatten() for name in names]), 64 * ranks)


def simulated(name: str, ranks: int, warmup: int) -> list[dict[str, torch.Tensor]]:
    """Run torch's AdamW over the means of an oracle; during warm-up, and for vectors, over sums.

    In flat tensors: it rounds the last elements of a tensor, which fill no register, in another way."""
    weights = {names: torch.nn.Parameter(flat(initial(), names, ranks)) for names in (MATRICES, VECTORS)}
    size = len(weights[MATRICES])
    oracle: EightBits | Largest | LowRank = {
        "uint8": EightBits(ranks, size),
        "topk": Largest(ranks, size, 90),
        "powersgd": LowRank(ranks, size, 1, {name: SHAPES[name] for name in MATRICES}),
    }[name]
    groups = [{"params": [weights[MATRICES]], "weight_decay": 0.1}, {"params": [weights[VECTORS]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, fused=True)
    found = []
    for step in range(1, 5):
        given = [{name: gradient(name, step, rank) for name in SHAPES} for rank in range(ranks)]
        for names, weight in weights.items():
            parts = [flat(part, names, ranks) for part in given]
            weight.grad = sum(parts[1:], start=parts[0])
            if names == MATRICES and step > warmup:
                weight.grad = oracle.mean([part * float(ranks) for part in parts])
        optimizer.step()
        found.append({})
        for names, weight in weights.items():
            sizes = [torch.Size(SHAPES[name]).numel() for name in names]
            for tensor, values in zip(
                names, weight.detach().clone().split([*sizes, len(weight) - sum(sizes)]), strict=False
            ):
                found[-1][tensor] = values.view(SHAPES[tensor])
    return found


@pytest.mark.parametrize("name", ["uint8", "topk", "powersgd"])
def test_weights_equal_the_simulation(name: str) -> None:
    ranks, settings = 3, {"grad_compression": name, "compression_warmup_steps": 1}
    wanted = simulated(name, ranks, 1)
    for found in run_ranks(ranks, toy_steps, ranks, settings):
        assert_same(found["weights"], wanted)
        assert found["phases"] == ["gradients", "compressed", "compressed", "compressed"]
        vectors = 2 * (ranks - 1) / ranks * 4 * 64 * ranks
        matrices = 2 * (ranks - 1) / ranks * 4 * (-(-900 // (64 * ranks)) * 64 * ranks)
        assert found["bytes"] == [vectors + matrices] + 3 * [vectors + sum(found["codecs"])]


@pytest.mark.parametrize("name", CODECS)
def test_overlap_loss_scale_and_order_change_no_weights(name: str) -> None:
    """A sum of two has only one order, and a power of 2 does not round."""
    plain = run_ranks(2, toy_steps, 2, {"grad_compression": name})[0]["weights"]
    late = {"grad_compression": name, "overlap_grad_reduce": False}
    backend = {"grad_compression": name, "reduction_order": "backend"}
    for settings, scale in ((late, 1.0), (backend, 1.0), (late, 0.25)):
        for found in run_ranks(2, toy_steps, 2, settings, scale):
            assert_same(found["weights"], plain)


def test_one_rank_equals_a_plain_all_reduce() -> None:
    plain = run_ranks(1, toy_steps, 1, {})[0]["weights"]
    for name in CODECS:
        found = run_ranks(1, toy_steps, 1, {"grad_compression": name})[0]
        assert_same(found["weights"], plain)
        assert found["bytes"] == [0.0] * 4


TINY: dict[str, Any] = words("precision=fp32 num_layers=2 micro_batch_size=2 weight_decay=0.0 clip_grad=1.0")

OWN: dict[str, dict[str, Any]] = {"topk": {"topk_density": 0.1}, "powersgd": {"powersgd_rank": 2}}
"""Settings of codecs."""


def compressed(name: str) -> dict[str, Any]:
    return {"grad_compression": name, **OWN.get(name, {})}


def trained(context: RankContext, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return losses and this rank's slices of the weights; the caller compares all copies when it assembles them."""
    runner = Runner(build(context, tiny_config(4, **TINY, **settings)))
    losses = []
    for _ in range(steps):
        losses.append(runner.step().loss)
        runner.progress = Progress(runner.progress.step, 0)  # the same batch again, which can be learned
    strategy = runner.replica.strategy
    held = [*strategy.states(), *strategy.tensor_states()]
    strategy.close()
    return {"losses": losses, "weights": local_parts(runner.replica, "weight"), "states": len(held)}


STEPS = 8

SHARE = {"onebit": 0.7, "uint8": 0.99, "topk": 0.7, "powersgd": 0.65}
"""Share of the loss reduction without compression, for few steps and small matrices."""


@pytest.mark.parametrize(
    ("layout", "names"),
    [({"tp": 2, "dp": 2, "sequence_parallel": True}, ("onebit", "topk")), ({"pp": 2, "dp": 2}, ("uint8", "powersgd"))],
    ids=["tp2-dp2", "pp2-dp2"],
)
def test_network_learns_and_copies_stay_equal(layout: dict[str, Any], names: tuple[str, ...]) -> None:
    """Copies over dp, tp ranks and both ends of the pipeline are bit-equal (`assemble` compares them)."""
    plain = run_ranks(4, trained, layout, STEPS)[0]["losses"]
    for name in names:
        ranks = run_ranks(4, trained, {**layout, **compressed(name), "compression_warmup_steps": 2}, STEPS)
        losses = ranks[0]["losses"]
        assert losses[:3] == plain[:3], "warm-up is plain"
        assert losses[3:] != plain[3:]
        assert losses[0] - losses[-1] > SHARE[name] * (plain[0] - plain[-1]), name
        assert all(found["losses"] == losses and found["states"] for found in ranks)
        assemble([found["weights"] for found in ranks])


def compressed_names(context: RankContext) -> list[str]:
    settings = {
        **LLAMA,
        "num_layers": 2,
        "qk_norm": True,
        "apply_wd_to_qk_layernorm": True,
        "grad_compression": "powersgd",
    }
    replica = build(context, tiny_config(2, dp=2, **settings))
    assert isinstance(replica.strategy, CompressedAllReduce)
    buckets = replica.strategy._codecs
    replica.strategy.close()
    return [placed.parameter.info.spec.name for bucket in buckets for placed in bucket.placed]


def test_decayed_norms_are_sent_whole() -> None:
    for names in run_ranks(2, compressed_names):
        assert "layers.0.attention.qkv.weight" in names and "layers.0.attention.q_norm.weight" not in names
