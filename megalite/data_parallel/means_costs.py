"""What a step costs with whole gradients and with lossy means in their place, and where the one overtakes the other."""

from dataclasses import dataclass

ASSUMED_WARMUP = 0.15
"""Share of the run, where its end is to be found while training."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one step with whole gradients, and of lossy means in its place; the slowest rank's."""

    step: float
    """Seconds from one step to the next."""
    exposed: float
    """Of these, spent waiting for the reduction."""
    reduction: float
    """Seconds of the reduction by itself."""
    codec: float
    """Seconds that coding and decoding take."""
    latency: float
    """Seconds of the collectives of lossy means when next to nothing is sent."""
    optimizer: float
    """Seconds by which the optimizer's own work is longer."""
    whole_bytes: float
    """That a rank sends in a reduction."""
    lossy_bytes: float
    """That it sends instead."""
    assumed: bool = False
    """No step with whole gradients was seen: what they would wait is computed."""

    @property
    def compute(self) -> float:
        """c: share of the step that does not wait."""
        return 1.0 - self.exposed / self.step

    @property
    def overhead(self) -> float:
        """o: what comes on top, as a share of the step."""
        return self.extra / self.step

    @property
    def extra(self) -> float:
        """Seconds of a step with lossy means that do not depend on the link's rate and that others do not have."""
        return self.codec + self.latency + self.optimizer

    @property
    def volume_ratio(self) -> float:
        """k: bytes of a reduction over those of lossy means."""
        return self.whole_bytes / self.lossy_bytes

    @property
    def bytes_per_second(self) -> float:
        """R: what the reduction by itself got out of the link."""
        return self.whole_bytes / self.reduction

    def speed(self, warmup: float) -> float:
        """How many times as fast a run is: 1/(w + (1-w)(c + (1-c)/k + o)). Lossy means hide behind nothing."""
        c, k = self.compute, self.volume_ratio
        return 1.0 / (warmup + (1.0 - warmup) * (c + (1.0 - c) / k + self.overhead))

    @property
    def break_even(self) -> float:
        """Bytes per second below which lossy means pay, if what hides of the reduction stays as it is: there

        extra + bytes/(k·R) = bytes/R - hidden.
        """
        hidden = max(self.reduction - self.exposed, 0.0)
        saved = self.whole_bytes - self.lossy_bytes
        return saved / max(self.extra + hidden, 1e-9)

    def line(self, warmup: float | None, *, name: str = "1-bit") -> str:
        """For the log.

        Args:
            name: of the lossy means.
        """
        share = ASSUMED_WARMUP if warmup is None else warmup
        speed, limit = self.speed(share), self.break_even * 8e-6
        verdict = (
            f"the run will be about {speed:.2f} times as fast as with whole gradients"
            if speed > 1.0
            else f"{name} will be slower here: the run will take about {1.0 / speed:.2f} times as long as with whole "
            "gradients"
        )
        return (
            f"break-even: {verdict}; it pays where ranks send at less than {limit:.0f} Mbit/s (step "
            f"{self.step * 1e3:.1f} ms, compute c {self.compute:.3f}, overhead o {self.overhead:.3f}: codec "
            f"{self.codec * 1e3:.1f} ms, latency {self.latency * 1e3:.1f} ms, optimizer "
            f"{self.optimizer * 1e3:.1f} ms; reduction at R "
            f"{self.bytes_per_second * 8e-6:.0f} Mbit/s, volume 1/k with k {self.volume_ratio:.1f}, warm-up w "
            f"{share:.2f}{' assumed' if warmup is None else ''}{self._assumption})"
        )

    @property
    def _assumption(self) -> str:
        return "; no step had whole gradients, which are taken to hide behind the backward" * self.assumed
