"""Compare Muon and SOAP over flat shards with formulas matrix by matrix, and AdamW for the other tensors."""

import math
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.model import ModelConfig
from megalite.config.optimizer import SQUARES, OptimizerConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.matrix_optimizers import SHIFT, SOAP, Muon, orthogonalise
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec
from tests.optimizers.flats import drawn, flat_of, set_gradients, update, weights

MATRICES = {"wide": (6, 10), "tall": (12, 4), "stack": (2, 5, 4), "experts": (3, 2, 4, 4), "row": (1, 7)}
OTHERS = {"norm": (5,), "one": (1,)}
CONFIG = OptimizerConfig(optimizer="muon", muon_momentum=0.9, muon_scale=0.3, muon_steps=5)


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    shapes = {**MATRICES, **OTHERS}
    return {name: drawn(seed + i, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def muon_of(initial: dict[str, torch.Tensor], config: OptimizerConfig = CONFIG) -> Muon:
    matrices = flat_of({name: initial[name] for name in MATRICES}, decay=True, orthogonal=True)
    others = flat_of({name: initial[name] for name in OTHERS}, decay=False)
    return Muon([matrices, others], config, group=Group.solo("tp-dp-cp"))


def advance(muon: Muon, steps: range, dtype: torch.dtype = torch.float64) -> None:
    for step in steps:
        set_gradients(muon.parameters, tensors(100 * step, dtype))
        muon.step(update(step))


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the polynomial to the singular values, by definition."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def test_updates_equal_the_definition_per_matrix() -> None:
    muon = muon_of(tensors(0))
    advance(muon, range(1, 4))
    found = weights(muon)
    for name in MATRICES:
        rows, columns = MATRICES[name][-2:]
        batch = tensors(0)[name].reshape(-1, rows, columns)
        momentum = torch.zeros_like(batch)
        for step in range(1, 4):
            grad, terms = tensors(100 * step)[name].reshape(batch.shape), update(step)
            momentum = 0.9 * momentum + 0.1 * grad
            steps = torch.stack([newton_schulz(each) for each in 0.1 * grad + 0.9 * momentum])
            scale = 0.3 * math.sqrt(max(rows, columns))
            batch = batch * (1 - terms.lr * terms.weight_decay) - terms.lr * scale * steps
        torch.testing.assert_close(found[name], batch.view(MATRICES[name]), rtol=1e-10, atol=1e-11)


def test_other_parameters_use_adam() -> None:
    muon = muon_of(tensors(0))
    advance(muon, range(1, 4))
    adam = AdamW([flat_of({name: tensors(0)[name] for name in OTHERS}, decay=False)], CONFIG)
    for step in range(1, 4):
        set_gradients(adam.parameters, tensors(100 * step))
        adam.step(update(step))
    for name, value in weights(adam).items():
        assert torch.equal(value, weights(muon)[name]), name
    assert muon.updates == 3


def test_muon_equals_torch_except_for_bf16() -> None:
    config = OptimizerConfig(optimizer="muon", muon_momentum=0.9, muon_scale=0.2, muon_steps=5)
    muon = muon_of(tensors(0, torch.float32), config)
    advance(muon, range(1, 3), torch.float32)
    names = [name for name, shape in MATRICES.items() if len(shape) == 2]
    small = {name: torch.nn.Parameter(tensors(0, torch.float32)[name]) for name in names}
    theirs = torch.optim.Muon(
        list(small.values()), momentum=0.9, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw"
    )
    for step in (1, 2):
        for name, parameter in small.items():
            parameter.grad = tensors(100 * step, torch.float32)[name]
        theirs.param_groups[0].update(lr=update(step).lr, weight_decay=update(step).weight_decay)
        theirs.step()
    for name, parameter in small.items():
        rows, columns = parameter.shape
        one_update = 0.2 * math.sqrt(max(rows, columns)) * update(2).lr
        assert (weights(muon)[name] - parameter.data).abs().max() < 0.03 * one_update, name


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (40, 40), (1, 9)])
def test_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    matrix = drawn(3, *shape) + 5.0 * drawn(4, shape[0], 1) @ drawn(5, 1, shape[1]) / shape[0]
    if shape[0] == shape[1]:
        matrix += 3.0 * torch.eye(shape[0], dtype=matrix.dtype)  # otherwise one singular value is close to 0
    values = torch.linalg.svdvals(orthogonalise(matrix, 5))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3, values
    mean_square = orthogonalise(matrix, 5).square().mean() * max(shape)
    assert 0.4 < float(mean_square) < 1.5


def test_zero_gradient_gives_no_update() -> None:
    muon = muon_of(tensors(0))
    set_gradients(muon.parameters, {name: torch.zeros_like(value) for name, value in tensors(0).items()})
    muon.step(update(1))
    for name, value in weights(muon).items():
        kept = 1 - update(1).lr * update(1).weight_decay if name in MATRICES else 1.0
        assert torch.equal(value, tensors(0)[name] * kept), name


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["spectral", "shape_scaling", "unit_rms_norm"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "gated_delta_net", "mamba2"])
def test_matrices_in_one_tensor_are_stepped_apart(kind: str, gated: bool, mode: str, nesterov: bool) -> None:
    """There are two groups with two queries each and heads of three channels; each mode has a different scale."""
    model = ModelConfig(
        experimental_attention_variant="mamba2" if kind == "mamba2" else "gated_delta_net",
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=3,
        attention_output_gate=gated,
        linear_attention_freq=[2],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )
    linear = (3, 3, 10, 10, 2, 2)[: 5 if kind == "mamba2" else 6]
    wanted_rows = linear if kind != "qkv" else (6, 6, 3, 3) if gated else (6, 3, 3)
    size, name = sum(wanted_rows), f"layers.0.attention.{'qkv' if kind == 'qkv' else 'in_proj'}.weight"
    first, others = drawn(0, 2 * size, 8), {"norm": drawn(1, 5)}
    settings: dict[str, Any] = {"muon_scale_mode": mode, "muon_nesterov": nesterov, "muon_momentum": 0.9}
    config = OptimizerConfig(optimizer="muon", muon_scale=0.5, **settings)
    flat = [flat_of({name: first}, decay=True, orthogonal=True), flat_of(others, decay=False)]
    muon = Muon(flat, config, group=Group.solo("all"), fused=model.fused_rows)
    grad = drawn(2, 2 * size, 8)
    set_gradients(muon.parameters, {name: grad, "norm": others["norm"]})
    muon.step(update(1))
    place, wanted = torch.arange(2 * size) % size, first * (1 - update(1).lr * update(1).weight_decay)
    for start, stop in pairwise(accumulate(wanted_rows, initial=0)):
        chosen, r = (place >= start) & (place < stop), 2 * (stop - start)
        factor = {"spectral": max(r, 8) ** 0.5, "shape_scaling": max(1, r / 8) ** 0.5, "unit_rms_norm": (r / 8) ** 0.5}
        made = newton_schulz(grad[chosen] * (0.1 + 0.9 * 0.1 if nesterov else 0.1))
        wanted[chosen] -= update(1).lr * 0.5 * factor[mode] * made
    torch.testing.assert_close(weights(muon)[name], wanted, rtol=1e-10, atol=1e-11)


B1, B2, EPS, STEPS = 0.8, 0.9, 1e-8, 7


def soap_of(name: str, frequency: int) -> SOAP:
    config = OptimizerConfig(optimizer=name, adam_beta1=B1, adam_beta2=B2, soap_frequency=frequency)
    matrices = flat_of({name: tensors(0)[name] for name in MATRICES}, decay=True, orthogonal=True)
    others = flat_of({name: tensors(0)[name] for name in OTHERS}, decay=False)
    return SOAP([matrices, others], config, group=Group.solo("tp-dp-cp"))


def eigenvectors(gram: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Run algorithm 4 with the shift, by Gram-Schmidt instead of reflections."""
    size = len(gram)
    columns: list[np.ndarray] = []
    for column in ((gram + SHIFT * np.trace(gram) / size * np.eye(size)) @ basis).T:
        for _ in range(2):
            column = column - sum((one * (one @ column) for one in columns), np.zeros(size))
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def transcribed(weight: np.ndarray, gradients: list[np.ndarray], frequency: int, both: bool) -> np.ndarray:
    """Return one matrix after all gradients, by algorithm 3; a side without a basis has the identity."""
    rows, columns = weight.shape
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    left_basis, right_basis = np.eye(rows), np.eye(columns)
    for count, grad in enumerate(gradients, start=1):
        turned_grad = left_basis.T @ grad @ right_basis
        mean = B1 * mean + (1 - B1) * grad
        turned_mean = left_basis.T @ mean @ right_basis
        square = B2 * square + (1 - B2) * turned_grad * turned_grad
        change = turned_mean / (1 - B1**count) / (np.sqrt(square / (1 - B2**count)) + EPS)
        terms = update(count)
        weight = weight * (1 - terms.lr * terms.weight_decay) - terms.lr * left_basis @ change @ right_basis.T
        left = B2 * left + (1 - B2) * grad @ grad.T
        right = B2 * right + (1 - B2) * grad.T @ grad
        if count % frequency == 0:
            if both or rows <= columns:
                left_basis = eigenvectors(left, left_basis)
            if both or rows > columns:
                right_basis = eigenvectors(right, right_basis)
    return weight


class HostMemory(torch.Tensor):
    """A tensor with a `to` that copies without a wait, as from host memory to a GPU."""

    def to(self, *_: object, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("kept_in", [torch.Tensor, HostMemory])
@pytest.mark.parametrize("name", ["soap", "one-sided-soap"])
@pytest.mark.parametrize("frequency", [1, 3])
def test_updates_equal_the_formulas_per_matrix(
    frequency: int, name: str, kept_in: type[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    square = SOAP._square
    monkeypatch.setattr(SOAP, "_square", lambda self, size: square(self, size).as_subclass(kept_in))
    soap = soap_of(name, frequency)
    for step in range(1, STEPS + 1):
        set_gradients(soap.parameters, tensors(100 * step))
        soap.step(update(step))
    both = name == "soap"
    for tensor, shape in MATRICES.items():
        batch = [tensors(seed)[tensor].reshape(-1, *shape[-2:]).numpy() for seed in range(0, 100 * STEPS + 1, 100)]
        wanted = [transcribed(first, gradients, frequency, both) for first, *gradients in zip(*batch, strict=True)]
        found = weights(soap)[tensor].reshape(-1, *shape[-2:]).numpy()
        np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-9, atol=1e-11, err_msg=tensor)


@pytest.mark.parametrize("name", ["soap", "one-sided-soap"])
def test_adam_until_the_first_basis_and_for_other_parameters(name: str) -> None:
    soap = soap_of(name, 100)
    flats = [
        flat_of({name: tensors(0)[name] for name in group}, decay=group is MATRICES) for group in (MATRICES, OTHERS)
    ]
    adam = AdamW(flats, soap.config)
    for step in range(1, 4):
        for each in (soap, adam):
            set_gradients(each.parameters, tensors(100 * step))
            each.step(update(step))
    for tensor, value in weights(adam).items():
        torch.testing.assert_close(weights(soap)[tensor], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["soap", "one-sided-soap"])
def test_basis_converges_and_stays_orthogonal(name: str) -> None:
    """The gradients have a fixed covariance."""
    first = drawn(1, 6, 40, dtype=torch.float64)
    factor = torch.diag(torch.tensor([8.0, 5.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    mixing = torch.linalg.qr(drawn(2, 6, 6, dtype=torch.float64))[0]
    config = OptimizerConfig(optimizer=name, adam_beta2=0.99, soap_frequency=1)
    matrices = flat_of({"w": first}, decay=True, orthogonal=True)
    soap = SOAP([matrices, flat_of({"norm": drawn(3, 5)}, decay=False)], config, group=Group.solo("all"))
    for step in range(1, 300):
        noise = drawn(100 + step, 6, 40, dtype=torch.float64)
        set_gradients(soap.parameters, {"w": mixing @ factor @ noise, "norm": drawn(3, 5)})
        soap.step(update(step))
    states = {state.name: state for state in soap.matrix_states()}
    assert set(states) == {
        f"{of}_{side}" for of in SQUARES for side in (("left", "right") if name == "soap" else ("left",))
    }
    assert states["eigenbasis_left"].spec == ShardSpec.whole("w", (1, 6, 6))
    basis = states["eigenbasis_left"].values[0]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6, dtype=torch.float64), rtol=0.0, atol=1e-12)
    assert (mixing.mT @ basis).abs().diagonal().min() > 0.97
