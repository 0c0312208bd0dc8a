"""Saves checkpoints of a run, at once or in the background, and handles failed saves."""

import datetime
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megalite.checkpoint.files import free_bytes, run_in_daemon
from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.checkpoint.save import (
    SavedTensor,
    planned_bytes,
    preamble,
    prune,
    same_error_on_all_ranks,
    save_checkpoint,
)
from megalite.config.data import DataConfig, is_address
from megalite.config.errors import NOT_SAVED, CheckpointError
from megalite.config.numbers import format_bytes
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group, host_group
from megalite.topology.host_memory import pinned
from megalite.training.non_finite import require_finite
from megalite.training.replica import Replica, consensus
from megalite.training.state_tensors import state_tensors

if TYPE_CHECKING:
    from megalite.training.copies import Destination, Exporter


def destination_of(config: RunConfig) -> "Destination | None":
    """Return the uploader if `save` is an address, else None."""
    save = config.checkpoint.save
    if save is None or not is_address(save):
        return None
    return imported("megalite.training.copies:Destination")(config)


def local_folder(config: RunConfig) -> Path:
    """Return the local folder of checkpoints: `save`, or the folder from which they are uploaded to it."""
    destination = destination_of(config)
    return Path(str(config.checkpoint.save)) if destination is None else destination.folder


def newest_saved(config: RunConfig) -> int | None:
    """Return the step of the newest checkpoint in `save`, None if there is none."""
    if (destination := destination_of(config)) is not None:
        return destination.newest()
    try:
        return candidates(Path(str(config.checkpoint.save)))[0].step
    except CheckpointMissing:
        return None


class SaveError(CheckpointError):
    """A checkpoint could not be written during a run."""

    exit_code = NOT_SAVED


class HostCopies:
    """Copies tensors to host memory that is reused, because the first touch of a page costs as much as the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate memory for copies of these tensors."""
        if [(one.shape, one.dtype) for one in self._buffers] != [(one.shape, one.dtype) for one in tensors]:
            self._buffers = []
            self._buffers = [pinned(one.shape, one.dtype, one.device) for one in tensors]

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies on the CPU, which the next call overwrites."""
        self.reserve(tensors)
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self._buffers


def save(
    replica: Replica,
    folder: Path | str,
    progress: Progress,
    *,
    tokenizer: str | None,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write everything that the run needs to continue, on every rank, and return the checkpoint's folder."""
    topology = replica.topology
    with consensus(replica, saved=True):
        saved = state_tensors(replica)
        write = _writer(replica, Path(folder), progress, tokenizer=tokenizer, make_folder=True, log=log)
        plan, tensors = [entry for entry, _ in saved], [tensor for _, tensor in saved]
        path = write(plan, tensors, topology.world)
    assert isinstance(path, Path)
    return path


def _writer(
    replica: Replica,
    folder: Path,
    progress: Progress,
    *,
    tokenizer: str | None,
    make_folder: bool,
    log: Callable[[str], None],
    held: Collection[int] = (),
    destination: "Destination | None" = None,
) -> Callable[[Sequence[SavedTensor], Sequence[torch.Tensor], Group], Path | str]:
    """Return a function that writes tensors as a checkpoint with the current counters, and removes old checkpoints, but
    never those of the steps `held`. `destination`: uploader of the checkpoint in `folder`."""
    c, step = replica.config.checkpoint, progress.step
    more = {"optimizer": replica.optimizer.counters(), "strategy": replica.strategy.counters()}
    if replica.noise is not None:
        more["gradient_noise"] = replica.noise.state()
    about = preamble(
        step,
        counters={
            "step": step,
            "consumed_samples": progress.samples,
            "optimizer_updates": replica.optimizer.updates,
            "loss_scaler": replica.scaler.state(),
            **{name: counters for name, counters in more.items() if counters},
        },
        # Derived sizes of the network are part of a checkpoint, because its tensors have them.
        config={
            **asdict(replica.written),
            "model": asdict(replica.config.model),
            "data": asdict(_with_absolute_paths(replica.written.data, folder)),
        },
        layout=asdict(replica.topology.layout),
        tokenizer=tokenizer,
        kernels=replica.kernels.summary(),
    )
    place: dict[str, Any] = {"make_folder": make_folder, "host": destination and destination.host, "log": log}

    def write(plan: Sequence[SavedTensor], tensors: Sequence[torch.Tensor], world: Group) -> Path | str:
        path = save_checkpoint(folder, about, plan=plan, tensors=tensors, world=world, **place)
        if destination is not None:
            return destination.upload(path, world=world, log=log)
        if c.keep_latest is not None:
            keep: dict[str, Any] = {"keep_latest": c.keep_latest, "keep_every": c.keep_every, "held": held}
            prune(folder, **keep, newest=step, world=world, log=log)
        return path

    return write


def _with_absolute_paths(data: DataConfig, folder: Path) -> DataConfig:
    """Make the tokenizer's paths absolute, unless the checkpoints are below the working directory. Then they stay
    relative, so that both can be moved: readers search for them in every folder above the checkpoints."""
    if folder.resolve().is_relative_to(Path.cwd()):
        return data
    named = {name: getattr(data, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    absolute: Any = {name: str(Path(path).absolute()) for name, path in named.items() if path and not is_address(path)}
    return replace(data, **absolute)


def tensors_to_save(replica: Replica, step: int, *, newest: str) -> tuple[list[SavedTensor], list[torch.Tensor]]:
    """Return the tensors that this rank writes, after a check that they are finite. Call it inside `consensus`.

    `newest`: describes the newest checkpoint, for the error.

    Collectives: with `check_weights_before_save` a gather over the world."""
    saved = state_tensors(replica)
    if replica.config.checkpoint.check_weights_before_save:
        require_finite(saved, step, newest=newest, world=replica.topology.world)
    return [entry for entry, _ in saved], [tensor for _, tensor in saved]


class Saver:
    """Saves a run's checkpoints: at once, or with `async_save` from a copy while training continues.

    With `on_save_error` continue the run continues after a failed save, except the last one, which must always succeed.
    All errors are raised on every rank."""

    def __init__(
        self,
        replica: Replica,
        *,
        tokenizer: str | None,
        log: Callable[[str], None],
        destination: "Destination | None" = None,
    ) -> None:
        self.saved: Callable[[Path | str], None] = lambda path: None
        """Called with the folder or address of each complete checkpoint."""
        self._replica, self._tokenizer, self._log = replica, tokenizer, log
        self._config = replica.config.checkpoint
        assert self._config.save is not None
        self._destination = destination
        self.folder = Path(self._config.save) if destination is None else destination.folder
        self.name = str(self.folder) if self._destination is None else self._destination.name
        """Folder or address, for messages."""
        self._world = replica.topology.world
        self._under_way: tuple[int, float, Future[Path | str]] | None = None
        self._memory = HostCopies()
        # Used for all saves: a disk may be slower than the timeout for training.
        self._background = host_group(self._world, "background", timeout=datetime.timedelta(days=1))
        self.saved_at: int | None = None
        """Step of the last checkpoint that was written or is being written."""
        self.exporter: Exporter | None = None

    def preflight(self, steps: Sequence[int]) -> None:
        """Log the size of a checkpoint, and check that those of `steps` fit, before any work is done.

        Collectives: a few `gather_json` over the world."""
        with consensus(self._replica, saved=True):
            saved = state_tensors(self._replica)
            if self._config.async_save:
                self._reserve([tensor for _, tensor in saved])
        planned = planned_bytes([entry for entry, _ in saved])
        if self._destination is not None:
            self._require_room_to_wait(self._destination, planned)
            return
        needed = sum(self._world.gather_json(planned))
        free = self._world.broadcast_json(free_bytes(self.folder))
        room = f"a checkpoint takes {format_bytes(needed)}, {format_bytes(free)} are free in {self.folder}"
        if free < needed and self._config.on_save_error == "stop":
            raise CheckpointError(
                f"{room}: make room, give --save a folder on another disk, or add --on-save-error continue"
            )
        most, latest, every = len(steps), self._config.keep_latest, self._config.keep_every
        if latest is not None:
            most = min(most, latest + 1 + sum(step % every == 0 for step in steps if every))
        if free < most * needed:
            remedy = "" if latest else "; --keep-latest 2 would remove older ones"
            self._log(f"warning: {room}, not enough for the {most} of this run{remedy}")
        else:
            self._log(room)

    def _require_room_to_wait(self, destination: "Destination", planned: int) -> None:
        """Raise CheckpointError if a machine has no room for the files of its ranks until they are uploaded."""
        sizes = self._world.gather_json([destination.host, planned])
        local, free = sum(size for host, size in sizes if host == destination.host), free_bytes(self.folder)
        with same_error_on_all_ranks(self._world):
            if free < local and self._config.on_save_error == "stop":
                raise CheckpointError(
                    f"{format_bytes(local)} of a checkpoint wait in {self.folder} for their upload, but only "
                    f"{format_bytes(free)} are free: make room, or give --data-cache-path a folder on another disk"
                )
        total = format_bytes(sum(size for _, size in sizes))
        self._log(f"a checkpoint takes {total} and waits in {self.folder} for its upload to {self.name}")

    def _reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        with same_error_on_all_ranks(self._world):
            try:
                self._memory.reserve(tensors)
            except RuntimeError as error:
                size = format_bytes(sum(tensor.nbytes for tensor in tensors))
                raise CheckpointError(
                    f"async_save needs {size} of host memory per rank: {error}; leave it out"
                ) from None

    def begin(self, progress: Progress) -> None:
        """Save the current state, unless it is saved already. Waits for a background save first."""
        if self.saved_at == progress.step:
            return
        self.wait()
        started = time.monotonic()
        group = self._background
        with consensus(self._replica, saved=True):
            none = f"this start has saved none in {self.name}"
            newest = none if self.saved_at is None else f"the newest is of step {self.saved_at}"
            plan, tensors = tensors_to_save(self._replica, progress.step, newest=newest)
            write = _writer(
                self._replica,
                self.folder,
                progress,
                tokenizer=self._tokenizer,
                make_folder=self._destination is not None,
                log=self._log,
                held=() if self.exporter is None else self.exporter.held,
                destination=self._destination,
            )
            self.saved_at = progress.step
            if not self._config.async_save:
                self._conclude(progress.step, started, lambda: write(plan, tensors, group))
                return
            # The thread writes only the copies, because the next step changes the parameters.
            copies = self._memory.copy(tensors)
        work = run_in_daemon(lambda: write(plan, copies, group), "save")
        self._under_way = (progress.step, started, work)

    def poll(self) -> None:
        """Complete a background save that has ended. Call it between two steps.

        Collectives: during a background save, an all-reduce of one number over the world, so that a failure is raised
        at the same step on every rank."""
        if self._under_way is not None:
            done = torch.tensor([int(self._under_way[2].done())], device=self._world.device)
            self._world.all_reduce(done, op="min")
            if done.item():
                self.wait()

    def wait(self) -> None:
        """Wait for a background save."""
        if self._under_way is not None:
            (step, started, work), self._under_way = self._under_way, None
            self._conclude(step, started, work.result)

    def finish(self, progress: Progress) -> None:
        """Save the current state at the end of the run, and wait for it. Raises SaveError for any on_save_error."""
        self.begin(progress)
        self.wait()
        if self.saved_at != progress.step:
            raise SaveError(f"the run ends at step {progress.step} and could not save it (see above)")

    def _conclude(self, step: int, started: float, outcome: Callable[[], Path | str]) -> None:
        try:
            path = outcome()
        except CheckpointError as error:
            self.saved_at = None
            if self._config.on_save_error == "stop":
                raise SaveError(str(error)) from error
            self._log(f"warning: {error}; continuing without it because of on_save_error")
            return
        self._log(f"saved {path} in {time.monotonic() - started:.1f} s")
        self.saved(path)
        if self.exporter is not None:
            self.exporter.saved(step)
