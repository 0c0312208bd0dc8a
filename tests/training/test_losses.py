"""A user's loss: the same numbers on every layout, what evaluation reports, its memory, and its errors."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.extend.smooth_z import smooth_z
from megalite import LOSSES, Callback, ConfigError, RunConfig, Trainer
from megalite.config.describe import replace
from megalite.config.errors import RankError
from megalite.parity.trajectory import RankTrajectory, one_rank_trajectory, rank_trajectory
from megalite.partition.activations import stage_activation_bytes
from megalite.partition.pipeline import plan_stages
from megalite.rehearsal.run import rehearse
from megalite.training.replica import build_replica
from tests.models.stages import LLAMA as STAGE
from tests.models.stages import B, S, build, varied
from tests.parity.factors import world_of
from tests.support.plugins import registered
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, Z1, assert_same_numbers, rows_of, tiny_config, whole
from tests.training.test_trainer_parts import RecordingCallback, fit, mock


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrites its logits, which it may."""
    losses = plain(logits.sub_(logits.detach().amax(-1, keepdim=True)), labels)
    return (1 - torch.exp(-losses)) ** 2 * losses


@contextmanager
def losses() -> Iterator[None]:
    """Registers them, on the ranks of a pool too."""
    with ExitStack() as stack:
        for loss in (plain, focal):
            stack.enter_context(registered(LOSSES, loss.__name__, loss))
        yield


def trajectory(context: RankContext, config: RunConfig) -> RankTrajectory:
    with losses():
        return rank_trajectory(context, config, 2)


LAYOUTS = rows_of(
    """
tp2-sp: tp=2 sequence_parallel loss=smooth-z
tp2-capped-dp2: tp=2 dp=2 final_logit_softcapping=2.0 logits_scaling=0.5 loss=focal Z1
tp4-ranks-of-padding: LLAMA tp=4 make_vocab_size_divisible_by=64 loss=focal
cp2-mtp: LLAMA cp=2 mtp_num_layers=2 loss=smooth-z
tp2-pp2-dp2-zb: tp=2 pp=2 dp=2 pipeline_schedule=zb-h1 loss=focal
tp2-pp2-mtp-recompute: LLAMA tp=2 pp=2 vpp=2 sequence_parallel mtp_num_layers=1 recompute_granularity=full loss=smooth-z
tp2-cp2-zero3: tp=2 cp=2 dp_strategy=fully-sharded loss=focal
""",
    {"LLAMA": LLAMA, "Z1": Z1},
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_numbers_of_one_rank(layout: str) -> None:
    with losses():
        config = tiny_config(world_of(LAYOUTS[layout]), global_batch_size=4, **LAYOUTS[layout])
        reference = one_rank_trajectory(config, 2)
        assert_same_numbers(whole(run_ranks(world_of(LAYOUTS[layout]), trajectory, config)), reference)
        other = one_rank_trajectory(replace(config, loss="cross-entropy"), 1).steps[0].loss
    assert abs(reference.steps[0].loss / other - 1) > 5e-4, "cross-entropy would do"


@pytest.mark.parametrize("changes", [{}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_cross_entropy_of_torch_equals_the_built_in(changes: dict[str, Any]) -> None:
    with losses():
        world = world_of(changes)
        found = (tiny_config(world, **changes, loss=loss) for loss in ("plain", "cross-entropy"))
        ours, built_in = (whole(run_ranks(world, trajectory, config)) for config in found)
    assert_same_numbers(ours, built_in)


@pytest.mark.parametrize(("loss", "function"), [("smooth-z", smooth_z), ("focal", focal)])
@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 3.0}], ids=str)
def test_gradients_equal_plain_torch(
    loss: str, function: Callable[[Tensor, Tensor], Tensor], changes: dict[str, Any]
) -> None:
    """The function gets [s, b, V] without the padding of 37 to 40 columns."""
    with losses():
        stage = build(varied(STAGE, **changes), loss=loss)
        tokens, weights = torch.arange(B * (S + 1)).view(B, -1) * 7 % 37, torch.rand(B, S, dtype=torch.float64)
        each = stage(tokens[:, :-1], stage.context(), labels=tokens[:, 1:])
    (each * weights).sum().backward()
    ours = {name: parameter.grad for name, parameter in stage.named_parameters()}
    stage.zero_grad()
    logits = stage(tokens[:, :-1], stage.context())
    assert logits.shape == (S, B, 40)
    expected = function(logits[..., :37].clone(), tokens[:, 1:].t())
    (expected.t() * weights).sum().backward()
    torch.testing.assert_close(each, expected.t(), rtol=1e-12, atol=1e-14)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-11, atol=1e-13)


def test_half_precision_logits_arrive_in_fp32() -> None:
    seen: list[torch.dtype] = []

    def noting(logits: Tensor, labels: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return plain(logits, labels)

    with registered(LOSSES, "noting", noting):
        ours, built_in = (fit(mock(precision="bf16", loss=loss)) for loss in ("noting", "cross-entropy"))
    assert set(seen) == {torch.float32}
    assert [one["loss"] for one in ours] == pytest.approx([one["loss"] for one in built_in], rel=1e-4)


def test_evaluation_reports_the_loss_without_a_perplexity() -> None:
    def doubled(logits: Tensor, labels: Tensor) -> Tensor:
        return 2 * plain(logits, labels)

    def measured(loss: Any) -> tuple[float, dict[str, Any], str]:
        noted, evaluations, said = RecordingCallback(), list[dict[str, Any]](), list[str]()
        evaluated = {"on_evaluation": lambda self, trainer, record: evaluations.append(record)}
        config = mock(train_iters=1, lr=1e-12, eval_interval=1, eval_iters=1)
        Trainer(config, loss=loss, callbacks=[noted, type("Noted", (Callback,), evaluated)()], log=said.append).fit()
        return noted.records[0]["loss"], evaluations[-1], next(line for line in said if "validation" in line)

    with registered(LOSSES, "doubled", doubled):
        (ours, valid, line), (one, other, of_other) = measured(doubled), measured("cross-entropy")
    assert ours == pytest.approx(2 * one, rel=1e-6) and valid["valid_loss"] == pytest.approx(2 * other["valid_loss"])
    assert set(other) - set(valid) == {"valid_perplexity"}
    assert "perplexity" in of_other and "perplexity" not in line


@pytest.mark.parametrize("settings", [{}, {"tp": 4, "precision": "bf16", "final_logit_softcapping": 9.0}], ids=str)
@pytest.mark.parametrize("loss", ["plain", "smooth-z"])
def test_memory_is_that_of_its_registration(loss: str, settings: dict[str, Any]) -> None:
    sizes = {"num_layers": 1, "vocab_size": 65536, "seq_length": 128, "micro_batch_size": 2, "global_batch_size": 2}
    with losses():
        config = tiny_config(world_of(settings), **{"precision": "fp32", **sizes, **settings, "loss": loss})
        found = rehearse(config, 0)
        assert stage_activation_bytes(config, plan_stages(config)[0]) == pytest.approx(
            found.peak_bytes - found.end_bytes, rel=0.03
        )


def failing(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[..., logits.shape[-1]].neg()


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "failing": (failing, r"fails \(failing, .*test_losses.py:\d+\): IndexError: index 93 is out of bounds"),
    "no function": (lambda: 0, r"fails: TypeError: .* takes 0 positional arguments but 2 were given"),
    "of torch": (cross_entropy, r"fails: \w+Error: "),  # no frame of the user
    "means": (
        lambda logits, labels: plain(logits, labels).mean(0),
        r"returns \[2\] in torch.float32 for logits \[3, 2, 93\] and labels \[3, 2\]; it must return \[3, 2\] in "
        "torch.float32, the loss of each token",
    ),
    "rounded": (
        lambda logits, labels: plain(logits, labels).bfloat16(),
        r"returns \[3, 2\] in torch.bfloat16 .* must return \[3, 2\] in torch.float32",
    ),
    "number": (lambda logits, labels: 1.0, r"returns float for .* must return \[3, 2\] in torch.float32"),
    "detached": (lambda logits, labels: plain(logits.detach(), labels), "has no gradient for its logits"),
}


def refusal(context: RankContext, config: RunConfig) -> str:
    name = config.training.loss
    with registered(LOSSES, name, WRONG[name][0]), pytest.raises(ConfigError) as refused:
        build_replica(config, context.topology_of(config))
    return str(refused.value)


@pytest.mark.parametrize("name", WRONG)
def test_function_that_is_no_loss_is_refused_on_all_ranks(name: str) -> None:
    """Also on ranks that have no head, before the run begins."""
    with registered(LOSSES, name, WRONG[name][0]):
        config = tiny_config(2, pp=2, precision="fp32", loss=name)
    first, second = run_ranks(2, refusal, config)
    assert first == second and re.fullmatch(f"loss {name} {WRONG[name][1]}.*", first), first


def test_loss_that_fails_in_a_step_is_the_error_of_its_rank() -> None:
    """Other ranks may have no head, or other data."""
    with registered(LOSSES, "failing", failing):
        stage, tokens = build(varied(STAGE), loss="failing"), torch.zeros(B, S, dtype=torch.long)
        with pytest.raises(RankError, match=r"loss failing fails \(failing, .*test_losses.py:\d+\): IndexError"):
            stage(tokens, stage.context(), labels=tokens)
    with registered(LOSSES, "failing", Mock(side_effect=ConfigError("no"))), pytest.raises(RankError, match=r"^no$"):
        stage(tokens, stage.context(), labels=tokens)
    with registered(LOSSES, "failing", Mock(side_effect=MemoryError)), pytest.raises(MemoryError):
        stage(tokens, stage.context(), labels=tokens)


def test_background_save_is_completed_if_the_loss_fails(tmp_path: Path) -> None:
    loss = Mock(wraps=plain, side_effect=[*[DEFAULT] * 6, IndexError])  # in step 2
    with registered(LOSSES, "later", loss), pytest.raises(RankError):
        fit(mock(loss="later", save=str(tmp_path), save_interval=1, async_save=True))
    assert (tmp_path / "latest").read_text().split()[0].endswith("1")


def test_loss_is_named_or_registered() -> None:
    with pytest.raises(ConfigError, match=r"loss cannot be 'focal'.*one of cross-entropy.*--import MODULE registers"):
        mock(loss="focal")
    with pytest.raises(ConfigError, match="loss is 'focal'; it must be one of cross-entropy"):
        Trainer(mock(), loss="focal")
    with pytest.raises(ConfigError, match="loss: focal is not registered; decorate it"):
        Trainer(mock(), loss=focal)
    with losses():
        assert Trainer(mock(), loss=focal).config == Trainer(mock(loss="focal")).config
