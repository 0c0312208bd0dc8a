"""`megalite kernels`: list all kernels, whether they can run on this device, and which would be chosen."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import torch

from megalite.cli.display import table
from megalite.cli.output import json_text, show
from megalite.config.compute import ALL_OPERATIONS, OPERATIONS, kernel_requests, unknown_kernels
from megalite.config.errors import ConfigError
from megalite.kernels.registry import Kernels, KernelUse, backends_of, kernel_of, why_not, why_not_backend

SIZES: Mapping[str, int] = MappingProxyType(
    {
        "bias_gelu": 16384,
        "swiglu": 11008,
        "geglu": 11008,
        "rope": 128,
        "softmax": 4096,
        "cross_entropy": 50304,
        "adam": 1 << 24,
        "lamb": 1 << 24,
        "l2norm": 1 << 24,
    }
)
"""Operation -> size of the last dimension or flat buffer in a model of hidden size 4096, if it is not 4096."""

TYPES = (torch.bfloat16, torch.float32)
FLAT = ("adam", "lamb")  # operations on the fp32 state of the optimizer


@dataclass(frozen=True)
class Row:
    operation: str
    backend: str
    reason: str | None  # why the backend cannot run on this device; None if it can
    not_for: Mapping[str, str]  # dtype that the backend does not support -> reason


@dataclass(frozen=True)
class Chosen:
    """The backend chosen for an operation, size and dtype."""

    operation: str
    size: int
    dtype: str
    backend: str
    why: str


def run(flags: Namespace) -> int:
    device = _device(flags.device)
    rows = [row for operation in OPERATIONS for row in _rows(operation, device.type)]
    chosen = chosen_kernels(device, [flags.kernels] if flags.kernels else [])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if flags.json:
        lists = {"kernels": [asdict(row) for row in rows], "chosen": [asdict(choice) for choice in chosen]}
        show(json_text({"device": name, "torch": torch.__version__, **lists}))
    else:
        show(f"device {name}, torch {torch.__version__}\n\n{_table(rows)}\n\n{_choices(chosen)}")
    return 0


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _types(operation: str) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if operation in FLAT else TYPES


def _rows(operation: str, device: str) -> list[Row]:
    rows = []
    for backend in backends_of(operation):
        unusable = why_not_backend(backend, device) or kernel_of(operation, backend).why_not_here()
        refused = {}
        if unusable is None:
            uses = [KernelUse(device, dtype, SIZES.get(operation, 4096)) for dtype in _types(operation)]
            reasons = {str(use.dtype): why_not(operation, backend, use) for use in uses}
            refused = {dtype: reason for dtype, reason in reasons.items() if reason is not None}
        rows.append(Row(operation, backend, unusable, refused))
    return rows


def chosen_kernels(device: torch.device, kernels_setting: Sequence[str] = ()) -> list[Chosen]:
    """Return the backend chosen for each operation of a model of hidden size 4096, under a setting of `kernels`."""
    requests, found = kernel_requests([*kernels_setting]), []
    for problem in unknown_kernels(requests):
        raise ConfigError(problem)
    Kernels(requests).check(device)
    for operation in OPERATIONS:
        size = SIZES.get(operation, 4096)
        for dtype in _types(operation):
            kernels = Kernels(requests)
            kernels.get(operation, device=device, dtype=dtype, size=size)
            choice = kernels.chosen[0]
            why = choice.why
            if choice.why_not_requested is not None:
                why += f"; {requests[ALL_OPERATIONS]}: {choice.why_not_requested}"
            found.append(Chosen(operation, size, str(dtype), choice.backend, why))
    return found


def _table(rows: Sequence[Row]) -> str:
    cells = [("operation", "backend", "status")]
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].operation != row.operation
        refused = "; ".join(f"not {_short(dtype)}: {reason}" for dtype, reason in row.not_for.items())
        status = row.reason or ("ready" if not refused else f"ready; {refused}")
        cells.append((row.operation if first else "", row.backend, status))
    return "\n".join(table(cells))


def _choices(chosen: Sequence[Chosen]) -> str:
    cells = [("chosen for", "size", "type", "backend", "because")]
    cells += [(each.operation, str(each.size), _short(each.dtype), each.backend, each.why) for each in chosen]
    return "\n".join(table(cells, right={1}))


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")
