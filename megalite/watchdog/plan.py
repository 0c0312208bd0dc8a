"""What the watching process is told when it starts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PATIENCE = 6.0
"""How much longer a silence may be where a rank has said that it may take long."""
ASK = "ask"
"""File in the folder whose appearance asks every rank for what torch's flight recorder has."""


@dataclass(frozen=True)
class WatchedRank:
    """A rank of this host."""

    rank: int
    pid: int
    started: int
    """Start time of the process, as the kernel counts it."""
    error_file: str | None
    """Where torchrun looks for what ended the rank."""


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """One host's part of a run."""

    folder: str
    """Private to the host and the run: heartbeats and stacks. The watching process removes it in the end."""
    seconds: float
    """A run without progress for so long is ended."""
    host: str
    hosts: tuple[str, ...]
    """Every host of the run by a name that is unlike all others'; `host` is one of them."""
    ranks: tuple[WatchedRank, ...]
    world_size: int
    report_folder: str | None
    """The run's folder, where reports go and hosts tell each other what they see."""
    run: str
    """A name that no other run, and no other start of this one, has."""
    network_seconds: float = 0.0
    """Without progress for less than this a run goes on in which all wait and no rank is to blame: its ranks are on several
    networks, and whom nobody reaches is told by the collective's own time-out."""
    flight_recorder: bool = False
    """The ranks can be asked for what torch's flight recorder has."""

    def heartbeat(self, rank: int) -> Path:
        """The file that a rank beats into."""
        return Path(self.folder, f"rank-{rank}.beat")

    def stacks(self, rank: int) -> Path:
        """The file that a rank's stacks go to."""
        return Path(self.folder, f"rank-{rank}.stacks")

    def flight(self, rank: int) -> Path:
        """The file that the newest entries of a rank's flight recorder go to, as JSON."""
        return Path(self.folder, f"rank-{rank}.flight")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "WatchPlan":
        """What `to_json` gave."""
        fields = dict(value)
        fields["hosts"] = tuple(fields["hosts"])
        fields["ranks"] = tuple(WatchedRank(**rank) for rank in fields["ranks"])
        return cls(**fields)
