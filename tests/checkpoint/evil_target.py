"""Checkpoints for malicious changes, and the expected outcomes."""

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tests.checkpoint.samples import SOLO, edit_manifest, save_as

MANIFEST, WEIGHTS, OPTIMIZER = "manifest.json", "weights-00000.safetensors", "optimizer-00000.safetensors"


class Outcome(Enum):
    HARMLESS = "ignored: step 2 is loaded completely"
    DAMAGED = "step 2 is skipped, naming its file, and step 1 is used"
    PASSED_OVER = "a third checkpoint is skipped; step 2 is loaded completely"
    UNREADABLE = "valid hashes; reading and inspecting refuse it"


@dataclass(frozen=True)
class Target:
    """A folder of two valid checkpoints with the sample tensors of seeds 1 and 2, and a folder outside of it."""

    root: Path

    @classmethod
    def make(cls, root: Path, pristine: Path) -> "Target":
        """Copy `pristine`, made by `prepare`."""
        shutil.copytree(pristine, root)
        return cls(root)

    @staticmethod
    def prepare(root: Path) -> None:
        for step in (1, 2):
            save_as(root / "run", SOLO, step=step, seed=step)
        (root / "outside").mkdir()
        (root / "outside" / "precious.txt").write_text("precious")

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def newest(self) -> Path:
        return self.run / "step-0000002"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def canary(self) -> Path:
        """A file that exists once code of a malicious checkpoint has run."""
        return self.root / "canary"

    def payload(self, protocol: int = 2) -> bytes:
        """A pickle that creates the canary when it is loaded."""
        return pickle.dumps(Bomb(str(self.canary)), protocol)

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        edit_manifest(self.newest, change)

    def replace(self, name: str, data: bytes) -> None:
        (self.newest / name).write_bytes(data)
        entry = {"length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self.edit(lambda body: body["files"].update({name: entry}))

    def header(self) -> tuple[dict[str, Any], bytes]:
        content = (self.newest / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        return json.loads(content[8 : 8 + size]), content[8 + size :]

    def rewrite(self, change: Callable[[dict[str, Any]], object]) -> None:
        header, data = self.header()
        change(header)
        self.replace(WEIGHTS, with_header(json.dumps(header).encode(), data))


class Bomb:
    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def with_header(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file; `length` is the length that it declares for its header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


Evil = Callable[[Target], object]
