"""Build flat parameters from named tensors that are whole on this rank."""

from collections.abc import Collection, Mapping, Sequence

import torch

from megalite.optimizers.base import FlatParameter, Optimizer, Segment, Update

PADDING = 3  # padding elements of every flat parameter


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def flat_of(tensors: Mapping[str, torch.Tensor], *, decay: bool, orthogonal: bool = False) -> FlatParameter:
    segments, start = [], 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        whole = tuple((0, size) for size in shape)
        segments.append(Segment(name, start, start + tensor.numel(), 0, shape, whole, counts=True))
        start += tensor.numel()
    padding = torch.zeros(PADDING, dtype=next(iter(tensors.values())).dtype)
    param = torch.nn.Parameter(torch.cat([*(tensor.flatten() for tensor in tensors.values()), padding]))
    param.grad = torch.zeros_like(param)
    return FlatParameter(param, decay, tuple(segments), orthogonal=orthogonal)


def flats_of(tensors: Mapping[str, torch.Tensor], decayed: Collection[str]) -> list[FlatParameter]:
    return [
        flat_of({name: value for name, value in tensors.items() if (name in decayed) is decay}, decay=decay)
        for decay in (True, False)
    ]


def tensors_of(flat: FlatParameter, values: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    values = flat.param.data if values is None else values
    return {each.name: values[each.start : each.stop].view(each.global_shape) for each in flat.segments}


def set_gradients(flats: Sequence[FlatParameter], gradients: Mapping[str, torch.Tensor]) -> None:
    for flat in flats:
        for name, grad in tensors_of(flat, flat.param.grad).items():
            grad.copy_(gradients[name])


def weights(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {name: values.clone() for flat in optimizer.parameters for name, values in tensors_of(flat).items()}


def update(step: int) -> Update:
    """Return an update with terms that change in each step."""
    return Update(step=step, lr=0.02 * (1 + step), weight_decay=0.1 + 0.01 * step)
