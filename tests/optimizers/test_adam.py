"""AdamW over flat shards is torch's AdamW over the parameters, with decay on some of them."""

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.base import FlatParameter, Update

CONFIG = OptimizerConfig(lr=1e-2, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-4)
SIZES = (5, 7, 3)


def flat(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(sum(SIZES), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def shards() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(flat(0)), torch.nn.Parameter(flat(1))]
    for shard in made:
        shard.grad = torch.zeros_like(shard)
    return made


def adam_of(decayed: torch.nn.Parameter, undecayed: torch.nn.Parameter) -> AdamW:
    return AdamW([FlatParameter(decayed, True, ()), FlatParameter(undecayed, False, ())], CONFIG)


def advance(adam: AdamW, decayed: torch.nn.Parameter, undecayed: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        for offset, shard in ((0, decayed), (50, undecayed)):
            assert shard.grad is not None
            shard.grad.copy_(flat(100 + offset + step))
        adam.step(Update(step=1, lr=CONFIG.lr * (1 + step), weight_decay=0.1 + 0.01 * step))


def test_updates_are_those_of_torch_parameter_by_parameter() -> None:
    decayed, undecayed = shards()
    adam = adam_of(decayed, undecayed)
    advance(adam, decayed, undecayed, range(4))

    small = [[torch.nn.Parameter(part.clone()) for part in flat(seed).split(SIZES)] for seed in (0, 1)]
    theirs = torch.optim.AdamW(
        [{"params": small[0]}, {"params": small[1]}], lr=0.0, betas=(0.8, 0.95), eps=1e-4, foreach=False
    )
    for step in range(4):
        for offset, parameters in ((0, small[0]), (50, small[1])):
            for parameter, grad in zip(parameters, flat(100 + offset + step).split(SIZES), strict=True):
                parameter.grad = grad.clone()
        for group, decay in zip(theirs.param_groups, (0.1 + 0.01 * step, 0.0), strict=True):
            group["lr"], group["weight_decay"] = CONFIG.lr * (1 + step), decay
        theirs.step()
    for shard, parameters in ((decayed, small[0]), (undecayed, small[1])):
        torch.testing.assert_close(shard.data, torch.cat([p.data for p in parameters]), rtol=1e-12, atol=1e-12)
    assert adam.updates == 4


def test_first_update_by_hand() -> None:
    """From zero moments Adam moves by lr·g/(|g| + eps), after decaying the weight by lr·wd."""
    decayed, undecayed = shards()
    adam = adam_of(decayed, undecayed)
    for shard in (decayed, undecayed):
        assert shard.grad is not None
        shard.grad.fill_(-2.0)
    adam.step(Update(step=1, lr=0.5, weight_decay=0.1))
    move = 0.5 * 2.0 / (2.0 + 1e-4)
    torch.testing.assert_close(decayed.data, flat(0) * (1 - 0.05) + move, rtol=1e-12, atol=0)
    torch.testing.assert_close(undecayed.data, flat(1) + move, rtol=1e-12, atol=0)
