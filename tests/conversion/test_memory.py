"""A conversion holds at most one tensor and a few blocks in memory, for all formats."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.conversion.native import write_native
from megalite.conversion.weights import parameter_shapes
from tests.conversion.samples import GPT, MadeUp

SHAPE = {"num_layers": 1, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 48 * 1024}
BLOCKS = 64 << 20  # bytes of all blocks in flight, with the allocator's cache

CONVERSION = """
import json, os, shutil, sys
from pathlib import Path
import torch
from megalite.conversion.huggingface.weights import write_huggingface
from megalite.conversion.megatron.write import write_megatron
from megalite.conversion.native import write_native
from megalite.conversion.open import open_weights

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def convert(source, target, dtype):
    weights, common = open_weights(source), {"advance": lambda count: None}
    if target.name == "huggingface":
        write_huggingface(weights, target, dtype=dtype, **common)
    elif target.name == "megatron":
        write_megatron(weights, target, dtype=dtype, tp=2, pp=1, **common)
    else:
        write_native(weights, target, dtype=dtype, **common)

def measure(source, to, dtype):
    convert(root / "small" / source, root / "small" / to, dtype)  # imports all that it needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = kilobytes("VmRSS")
    convert(root / "large" / source, root / "large" / to, dtype)
    print(kilobytes("VmHWM") - before, flush=True)

root = Path(sys.argv[1])
for source, to, dtype in json.loads(sys.argv[2]):
    if os.fork() == 0:  # what one conversion has freed is not there for the next
        measure(source, to, getattr(torch, dtype))
        os._exit(0)
    assert os.wait()[1] == 0
    if to == "native":
        for size in ("small", "large"):
            shutil.rmtree(root / size / to)
"""


class Constant(MadeUp):
    def read(self, name: str) -> torch.Tensor:
        return torch.full(parameter_shapes(self.model)[name].shape, 0.5)


CONVERSIONS = (  # from, to, dtype, number of tensors in memory
    # GPT-2 stores its matrices transposed, Megatron-LM in slices: no tensor can be copied unchanged.
    ("first", "huggingface", "float32", 1),
    ("huggingface", "native", "bfloat16", 1),
    ("first", "megatron", "bfloat16", 1),
    # Slices are assembled into megalite's order block by block.
    ("megatron", "native", "bfloat16", 0),
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_one_tensor_and_blocks(tmp_path: Path) -> None:
    for name, settings in (("small", GPT), ("large", GPT | SHAPE)):
        weights = Constant(tmp_path, settings)
        write_native(weights, tmp_path / name / "first")
    largest = 4 * SHAPE["hidden_size"] * SHAPE["ffn_hidden_size"]
    command = [sys.executable, "-c", CONVERSION, str(tmp_path), json.dumps([each[:3] for each in CONVERSIONS])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    for (source, to, _, held), kilobytes in zip(CONVERSIONS, done.stdout.split(), strict=True):
        peak = int(kilobytes) << 10
        assert held * largest < peak < held * largest + BLOCKS, (
            f"{source} to {to}: {peak / largest:.2f} of the largest tensor"
        )
