"""Packed documents attend only to themselves. (`tests/parity` compares layouts.)"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loader import BatchLoader
from megalite.data.packed_dataset import PackedDataset
from megalite.optimizers.schedules import Schedules
from megalite.training.replica import Replica
from megalite.training.step import Stepper
from tests.data.token_files import write_by_layout
from tests.support.ranks import RankContext
from tests.support.tiny import LLAMA, build, tiny_config

BEST_FIT: dict[str, Any] = {"packing": "best-fit"}
SCALED = LLAMA | {"rope_scaling": "llama3", "rope_original_max_positions": 4, "attn_temperature_beta": 0.5}


def replica_of(seq_length: int, settings: dict[str, Any], *, batch: int = 1) -> Replica:
    fixed = {"max_position_embeddings": 32, "micro_batch_size": batch, "global_batch_size": batch, **BEST_FIT}
    replica = build(RankContext(0), tiny_config(1, seq_length=seq_length, **fixed, **settings))
    for stage in replica.stages.values():
        stage.eval()
    return replica


def losses(replica: Replica, tokens: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
    (stage,) = replica.stages.values()
    with torch.no_grad():
        result = stage(tokens, stage.context(tuple(range(len(tokens))), **more), labels=labels)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("model", [{}, LLAMA, SCALED], ids=["learned", "rope", "scaled queries"])
def test_packed_losses_equal_those_of_separate_documents(tmp_path: Path, model: dict[str, Any]) -> None:
    """In fp64, to 1e-12: losses of a document do not depend on its neighbours or its position."""
    generator = torch.Generator().manual_seed(1)
    documents = [
        torch.randint(1, 93, (length,), generator=generator).tolist() for length in (3, 9, 17, 2, 6, 7, 4, 12, 5, 16)
    ]
    write_by_layout(tmp_path / "d", documents)
    dataset = PackedDataset(
        IndexedDataset(tmp_path / "d"), documents=range(10), seq_length=16, seed=3, name="train", pad_token=0
    )
    count = dataset.samples_per_epoch
    replica = replica_of(16, model, batch=count)
    loader = BatchLoader(
        dataset,
        seq_length=16,
        eod_token=None,
        eod_mask_loss=True,
        dp_rank=0,
        dp_size=1,
        micro_batch_size=count,
        find_documents=replica.finds_documents,
        packed=replica.packs_documents,
    )
    (batch,) = loader.load(0, count)
    starts = batch.document_starts
    assert starts is not None and max(map(len, starts)) > 2
    together = losses(replica, batch.tokens, batch.labels, attention_documents=starts, position_documents=starts)
    packed = (together * batch.loss_mask).sum().item()
    alone = 0.0
    for document in documents:
        tokens = torch.tensor([document])
        alone += losses(replica_of(len(document) - 1, model), tokens[:, :-1], tokens[:, 1:]).sum().item()
    assert batch.loss_mask.sum() == sum(len(document) - 1 for document in documents)
    assert packed == pytest.approx(alone, rel=1e-12)
    mean, tokens = Stepper(replica, Schedules(replica.config)).evaluate([batch], first_sample=0, batch_size=count)
    assert tokens == batch.loss_mask.sum()
    assert mean == pytest.approx(alone / batch.loss_mask.sum().item(), rel=1e-12)
    # Losses differ if documents attend to each other, or if positions continue.
    for context in ({"position_documents": starts}, {"attention_documents": starts}):
        other = (losses(replica, batch.tokens, batch.labels, **context) * batch.loss_mask).sum().item()
        if context.keys() == {"attention_documents"} and model is LLAMA:
            assert other == pytest.approx(alone, rel=1e-12)  # rotations depend only on distances
        else:
            assert abs(other - alone) > 1e-6
