"""A conversion holds one tensor of the model and a few blocks, whatever it reads and writes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.conversion.native import write_native
from megalite.conversion.weights import parameter_shapes
from tests.conversion.samples import GPT, MadeUp

SHAPE = {"num_layers": 1, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 96 * 1024}
BLOCKS = 64 << 20  # bytes of all blocks in flight, with what the allocator keeps

CONVERSION = """
import sys
from pathlib import Path
import torch
from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.megatron.write import write_megatron
from megalite.conversion.native import write_native
from megalite.conversion.open import open_weights

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def convert(source, target):
    weights, common = open_weights(source), {"advance": lambda count: None}
    if to == "huggingface":
        write_huggingface(weights, target, dtype=dtype, **common)
    elif to == "megatron":
        write_megatron(weights, target, dtype=dtype, tp=2, pp=1, **common)
    else:
        write_native(weights, target, dtype=dtype, **common)

root, source, to, dtype = Path(sys.argv[1]), sys.argv[2], sys.argv[3], getattr(torch, sys.argv[4])
convert(root / "small" / source, root / "small" / to)  # imports all that it needs
Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = kilobytes("VmRSS")
convert(root / "large" / source, root / "large" / to)
print(kilobytes("VmHWM") - before)
"""


class Constant(MadeUp):
    def read(self, name: str) -> torch.Tensor:
        return torch.full(parameter_shapes(self.model)[name].shape, 0.5)


CONVERSIONS = (
    ("first", "native", "float64"),
    # GPT-2 stores its matrices transposed, Megatron-LM in slices: nothing can be copied as it lies.
    ("first", "huggingface", "float32"),
    ("huggingface", "native", "bfloat16"),
    ("first", "megatron", "float32"),
    ("megatron", "native", "float32"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_is_one_tensor_and_blocks(tmp_path: Path) -> None:
    for name, settings in (("small", GPT), ("large", GPT | SHAPE)):
        weights = Constant(tmp_path, settings)
        write_native(weights, tmp_path / name / "first")
    largest = 4 * SHAPE["hidden_size"] * SHAPE["ffn_hidden_size"]
    peaks = {}
    for source, to, dtype in CONVERSIONS:
        command = [sys.executable, "-c", CONVERSION, str(tmp_path), source, to, dtype]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        peaks[f"{source} to {to}"] = int(done.stdout) << 10
        if to == "native":
            for size in ("small", "large"):
                shutil.rmtree(tmp_path / size / to)
    shutil.rmtree(tmp_path)
    for conversion, peak in peaks.items():
        # What waits to be hashed is twice as large in float64.
        room = 2 * BLOCKS if conversion == "first to native" else BLOCKS
        assert largest < peak < largest + room, f"{conversion}: {peak / largest:.2f} of the largest tensor"
