"""Freed memory is reused: measured as page faults of a process that allocates the same tensor again and again."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from megalite.training.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(1 << 24)
before = faults()
for _ in range(10):
    torch.ones(1 << 24)
print(faults() - before)
"""


def faults(word: str) -> int:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another allocator")
def test_the_same_tensor_again_brings_no_new_pages() -> None:
    # 64 MiB ten times: in huge pages a few hundred faults, else 164,000.
    given_back, kept = faults("give back"), faults("keep")
    assert given_back > 300
    assert kept < 0.1 * given_back
