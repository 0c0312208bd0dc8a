"""torch's flight recorder, where TORCH_FR_BUFFER_SIZE has it on: its last entries, for the report of a hang."""

import json
import threading
from pathlib import Path
from typing import Any

import torch

from megalite.watchdog.plan import ASK

_DUMP = "_dump_fr_trace_json"
_LOOK_SECONDS = 0.1
_MOST_ENTRIES = 8


class FlightRecorder:
    """A thread that writes down what the recorder has, once the watching process asks for it.

    Args:
        folder: the watching process's.
        path: file for the answer.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._asked, self._path = folder / ASK, path
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="megalite-flight", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            if self._asked.exists():
                beside = self._path.with_suffix(".new")
                beside.write_text(json.dumps(last_entries()))
                beside.replace(self._path)
                return

    def close(self) -> None:
        """Nobody asks any more."""
        self._closed.set()
        self._thread.join()


def available() -> bool:
    """This build of torch can say what its recorder has."""
    return hasattr(getattr(torch._C, "_distributed_c10d", None), _DUMP)


def last_entries() -> list[dict[str, Any]]:
    """The newest entries, oldest first: `{"group": "tp", "seq": 41, "op": "gloo:all_reduce", "state": "completed"}`."""
    trace = json.loads(getattr(torch._C._distributed_c10d, _DUMP)())
    entries = trace.get("entries", [])[-_MOST_ENTRIES:]
    return [
        {
            "group": (entry.get("process_group") or ["?"])[0],
            "seq": max(entry.get("collective_seq_id", 0), entry.get("p2p_seq_id", 0)),
            "op": entry.get("profiling_name", "?"),
            "state": entry.get("state", "?"),
        }
        for entry in entries
    ]
