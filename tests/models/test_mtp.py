"""MTP layers against the written-out formula, and their inputs."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megalite.data.loader import BatchLoader, Microbatch
from megalite.models.context import AuxiliaryLosses
from megalite.models.gpt import GPTStage
from megalite.models.shapes import end_forward_flops, head_forward_flops, layer_forward_flops
from megalite.topology.group import Group
from megalite.training.step import mtp_inputs, token_denominators
from tests.models.stages import LLAMA, B, S, build, varied

CPU = torch.device("cpu")
FACTOR = 0.3


class Numbers:
    """Sample k is k·100 + 0, 1, 2, ...; documents end with 7."""

    def sample(self, k: int) -> np.ndarray:
        return (np.arange(S + 1) + k * 100) % 37


def microbatch(*, find: bool = False) -> Microbatch:
    sizes: dict[str, int] = {"seq_length": S, "micro_batch_size": B, "dp_rank": 0, "dp_size": 1, "mtp_num_layers": 2}
    loader = BatchLoader(Numbers(), eod_token=7, eod_mask_loss=True, find_documents=find, **sizes)  # type: ignore[arg-type]
    return loader.load(0, B)[0]


def test_inputs_of_each_depth() -> None:
    batch = microbatch()
    assert batch.mtp_labels is not None and batch.mtp_mask is not None
    for k in (1, 2):
        assert torch.equal(batch.mtp_labels[k - 1, :, :-k], batch.labels[:, k:])
        assert torch.equal(batch.mtp_mask[k - 1, :, :-k], batch.loss_mask[:, k:])
        assert not batch.mtp_labels[k - 1, :, -k:].any() and not batch.mtp_mask[k - 1, :, -k:].any()
    # In sample 0 a document ends at position 7: position 7 - k would predict beyond it, and is masked.
    assert batch.mtp_mask[0, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 1, 0]
    apart = microbatch(find=True)
    assert apart.mtp_mask is not None
    # If documents are separate, position 7, the end itself, does not predict the next document either.
    assert apart.mtp_mask[0, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 0]
    assert apart.mtp_mask[1, 0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_formula(tied: bool) -> None:
    changes = {"mtp_num_layers": 2, "tie_embeddings": tied, "scale_embeddings": True}
    stage = build(varied(LLAMA, **changes)).train()
    batch = microbatch()
    counts = token_denominators([batch], mtp_num_layers=2, dp=Group.solo("dp"), device=CPU)
    assert batch.mtp_mask is not None
    assert counts.tolist() == [batch.loss_mask.sum().item(), *(mask.sum().item() for mask in batch.mtp_mask)]
    losses = AuxiliaryLosses(1.0, 1.0, 1.0, CPU)
    inputs = mtp_inputs(batch, counts, factor=FACTOR, device=CPU)
    each = stage(batch.tokens, stage.context((0, 1), auxiliary=losses, mtp=inputs), labels=batch.labels)
    (each * batch.loss_mask.double()).sum().div(counts[0]).backward()
    ours = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert all(grad is not None for grad in ours.values())
    stage.zero_grad()
    main, mtp_loss = written_out(stage, batch)
    (main + mtp_loss).backward()
    assert losses.totals["mtp_loss"].item() == pytest.approx(mtp_loss.item(), rel=1e-12)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        plain = stage.eval()(batch.tokens, stage.context(), labels=batch.labels)
    torch.testing.assert_close(plain, each.detach(), rtol=0, atol=0)


def written_out(stage: GPTStage, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute both loss terms for whole sequences, token by token."""
    assert stage.embedding is not None and stage.head is not None and isinstance(stage.head.mtp, torch.nn.Module)
    context, mask = dataclasses.replace(stage.context((0, 1))), batch.loss_mask.double()
    table, head, size = stage.embedding.word.weight, stage.head.weight, 37

    def embedded(tokens: torch.Tensor) -> torch.Tensor:
        return (table[tokens] * table.shape[1] ** 0.5).transpose(0, 1)

    def loss(hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = (hidden.transpose(0, 1) @ head.t())[..., :size]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    x = embedded(batch.tokens)
    for block in stage.layers.values():
        x = block(x, context)
    hidden = stage.head.norm(x)
    main, terms = loss(hidden, batch.labels, mask), []
    for k, depth in enumerate(stage.head.mtp.depths, start=1):
        shifted = torch.zeros_like(batch.tokens)
        shifted[:, : S - k + 1] = batch.labels[:, k - 1 :]
        both = torch.cat((depth.embedding_norm(embedded(shifted)), depth.hidden_norm(hidden)), dim=-1)
        hidden = depth.final_norm(depth.block(both @ depth.projection.weight.t(), context))
        labels, counted = torch.zeros_like(batch.labels), torch.zeros_like(mask)
        labels[:, : S - k], counted[:, : S - k] = batch.labels[:, k:], mask[:, k:]
        terms.append(loss(hidden, labels, counted))
    return main, FACTOR * torch.stack(terms).mean()


def test_flops_of_mtp_layers() -> None:
    model = varied(LLAMA, mtp_num_layers=2)
    h, head = model.hidden_size, head_forward_flops(model)
    each = layer_forward_flops(model, model.num_layers - 1, S) + 4 * h * h + head
    assert end_forward_flops(model, S) == head + 2 * each
    assert end_forward_flops(LLAMA, S) == head
