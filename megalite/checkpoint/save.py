"""Save a checkpoint: every rank streams its tensors into its own files, and rank 0 commits them. Also remove old ones."""

import errno
import os
import platform
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import megalite
from megalite.checkpoint.files import FileEntry, free_bytes, read_text, write_durably
from megalite.checkpoint.folders import (
    RankPart,
    abandon,
    candidates,
    discard,
    part_name,
    prepare_staging,
    publish,
    staging_name,
    step_name,
    write_rank_part,
)
from megalite.checkpoint.load import verify_files
from megalite.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    Part,
    TensorEntry,
    file_key,
    listed_files,
    optimizer_key,
    part_keys,
    weight_key,
)
from megalite.checkpoint.safetensors_file import DTYPE_NAMES, SafetensorsWriter
from megalite.checkpoint.safetensors_header import Record, file_bytes
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec


@contextmanager
def same_error_on_all_ranks(world: Group) -> Iterator[None]:
    """Raise the same CheckpointError on all ranks if the block raises one on any rank. `Group.errors_on_all_ranks`
    raises every failing rank's error; this reports only the first, with the number of failed ranks, because a full disk
    fails on many ranks at once.

    Collectives: one `gather_json`."""
    found: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        found = error
    reports = world.gather_json(None if found is None else str(found))
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    message = reports[failed[0]]
    if world.size > 1:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        message = f"{message} (rank {failed[0]}{others} of {world.size})"
    raise CheckpointError(message) from found


def code_version() -> dict[str, Any]:
    """Return the versions of megalite, Python and torch, and the git revision if megalite runs from a working copy."""
    return {
        "megalite": megalite.__version__,
        "revision": git_revision(Path(megalite.__file__).parents[1]),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def git_revision(root: Path) -> str | None:
    """Return the commit checked out in `root`, read from the files in `.git`; None if there is none."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        loose = git / name
        if loose.is_file():
            return loose.read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)


FILE_KINDS = {"weight": "weights", "optimizer": "optimizer"}


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """The metadata of a tensor that this rank writes.

    Args:
        key_group: model weight or optimizer state.
        state: name of the optimizer state (`main_param`, `exp_avg`, ...); empty for a weight.
        spec: the parameter's name and global shape, and the slice of it that this rank writes. If the slice is empty,
            its tensor is taken from the stream and not stored.
        dtype: the stored dtype, which the tensor must have."""

    key_group: Literal["weight", "optimizer"]
    state: str = ""
    spec: ShardSpec
    dtype: torch.dtype

    @property
    def key(self) -> str:
        return weight_key(self.spec.name) if self.key_group == "weight" else optimizer_key(self.state, self.spec.name)

    def record(self, file_key: str) -> Record:
        return Record(file_key, DTYPE_NAMES[self.dtype], self.spec.shape)

    @property
    def is_stored(self) -> bool:
        """Whether the slice has elements."""
        return 0 not in self.spec.shape


def preamble(
    step: int,
    *,
    counters: Mapping[str, Any],
    config: Mapping[str, Any],
    layout: Mapping[str, Any],
    tokenizer: str | None,
    kernels: Mapping[str, str],
) -> Manifest:
    """Build the manifest of a checkpoint without files and tensors."""
    return Manifest(
        step=step,
        files={},
        tensors={},
        counters=dict(counters),
        config=dict(config),
        layout=dict(layout),
        megalite_version=megalite.__version__,
        code={**code_version(), "kernels": dict(kernels)},
        tokenizer=tokenizer,
    )


def save_checkpoint(
    folder: Path,
    about: Manifest,
    *,
    plan: Sequence[SavedTensor],
    tensors: Iterable[torch.Tensor],
    world: Group,
    make_folder: bool = True,
    host: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a checkpoint into `folder`. When it returns on any rank, the whole checkpoint is on the disk.

    The plan is known before the data, because a safetensors file begins with its header. So each tensor is written as
    soon as it is available, and a rank holds only the few tensors that are being written and hashed.
    If any rank fails, all raise the same CheckpointError, and earlier checkpoints stay unchanged.

    Args:
        folder: contains the checkpoints of a run, one subfolder per step. All ranks must access the same folder.
        about: the `preamble`; rank 0's is written.
        plan: the tensors that this rank writes; may contain several slices of a tensor. Over all ranks the slices must
            cover every tensor exactly once.
        tensors: the data, in the plan's order, on any device. The iterable may perform collectives: every rank iterates
            it to the end exactly once, also after a write error (unless the save fails on all ranks before the first
            tensor; then no rank iterates it). Errors of the iterable itself are not caught.
        world: must not be used by other threads during the save; pass a separate group when saving on a thread.
        make_folder: create a missing folder. Otherwise a missing folder is an error, because earlier checkpoints, or
            the disk with them, are gone.
        host: this rank's machine name, if machines do not share the folder. Each machine's folder then receives the
            files of its ranks and the whole manifest.
        log: called on rank 0 with warnings about errors after the commit.

    Collectives: a few `gather_json` over `world`, and those of `tensors`."""
    staging = folder / staging_name(about.step)

    def begin(needed: int) -> None:
        Manifest.from_json(about.to_json())
        if not make_folder and not folder.is_dir():
            raise CheckpointError("the folder does not exist any more; it existed when the run started")
        prepare_staging(folder, about.step)
        if free_bytes(folder) < needed:  # fail now instead of after filling the disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_together(
        staging,
        plan,
        host=host,
        begin=begin,
        # An object store may already contain this step. Unique names keep its files until the new manifest is uploaded.
        write=lambda: _write_shards(staging, world, plan, tensors, "" if host is None else f"-{secrets.token_hex(4)}"),
        publish=lambda: publish(staging, about, world.size, log),
        world=world,
    )
    return folder / step_name(about.step)


def save_together(
    staging: Path,
    plan: Sequence[SavedTensor],
    *,
    host: str | None,
    begin: Callable[[int], object],
    write: Callable[[], Exception | None],
    publish: Callable[[], object],
    world: Group,
) -> None:
    """Run the steps of a save, with agreement of all ranks after each. The first rank of each folder calls `begin` with
    the bytes of the folder's ranks, every rank calls `write`, and the first rank calls `publish`. If a step fails on
    any rank, `staging` is removed and all ranks raise the same CheckpointError. `host`: see `save_checkpoint`.

    Collectives: four `gather_json`, one more with `host`, and those of `write`."""
    failure: Exception | None = _check_plan(plan)
    # Ranks with an invalid plan join the collectives too; otherwise the others would hang.
    places, sizes = zip(*world.gather_json([host, 0 if failure else planned_bytes(plan)]), strict=True)
    needed = sum(size for place, size in zip(places, sizes, strict=True) if place == host)
    leads = places.index(host) == world.rank
    share_failure = partial(_raise_on_all_or_abandon, staging=staging, needed=needed, leads=leads, world=world)
    share_failure(_failure_of(lambda: begin(needed)) if failure is None and leads else failure)
    share_failure(write())
    if host is not None:
        share_failure(_share_parts(staging, leads, world))
    share_failure(_failure_of(publish) if leads else None)


def _share_parts(staging: Path, leads: bool, world: Group) -> Exception | None:
    """Copy the part lists of other machines' ranks into this machine's folder. Collectives: one `gather_json`."""
    own = staging / part_name(world.rank)
    texts = world.gather_json(own.read_text() if own.is_file() else "")

    def write() -> None:
        for rank, text in enumerate(texts):
            if not (path := staging / part_name(rank)).exists():
                write_durably(path, text.encode())

    return _failure_of(write) if leads else None


def _failure_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def planned_bytes(plan: Sequence[SavedTensor]) -> int:
    return sum(planned_files(plan, 0).values())


def planned_files(plan: Sequence[SavedTensor], rank: int) -> dict[str, int]:
    """Return the names and bytes of the files that one rank writes."""
    return {_file_name(group, rank): file_bytes(records) for group, records in _records_by_kind(plan).items()}


def _check_plan(plan: Sequence[SavedTensor]) -> CheckpointError | None:
    for saved in plan:
        try:
            file_key(saved.key)
        except CheckpointError as error:
            return error
        if saved.dtype not in DTYPE_NAMES:
            known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
            return CheckpointError(f"{saved.key}: {saved.dtype} cannot be saved; these can: {known}")
    return None


def _records_by_kind(plan: Sequence[SavedTensor]) -> dict[str, list[Record]]:
    records: dict[str, list[Record]] = {}
    count: Counter[str] = Counter()
    for saved in plan:
        if saved.is_stored:
            count[saved.key] += 1
            name = part_keys(saved.key, [""] * count[saved.key])[-1]
            records.setdefault(saved.key_group, []).append(saved.record(name))
    return records


def _write_shards(
    staging: Path, world: Group, plan: Sequence[SavedTensor], tensors: Iterable[torch.Tensor], tag: str
) -> Exception | None:
    """Write this rank's files, with `tag` in their names, and their list. Return the first error. Iterates `tensors` to
    the end even after an error, because its collectives involve the other ranks."""
    failure: Exception | None = None
    writers: dict[str, SafetensorsWriter] = {}
    taken, rank = 0, world.rank
    with ExitStack() as files:
        try:
            for group, records in _records_by_kind(plan).items():
                path = staging / _file_name(group, rank, tag)
                writers[group] = SafetensorsWriter(path, records, progress=world.heartbeat.beat)
                files.callback(writers[group].close)
        except Exception as error:
            failure = error
        for tensor in tensors:
            taken += 1
            if failure is None and taken <= len(plan) and plan[taken - 1].is_stored:
                failure = _failure_of(partial(writers[plan[taken - 1].key_group].write, tensor))
            del tensor  # free it before the next one is gathered
        if failure is not None:
            return failure
        if taken != len(plan):
            return CheckpointError(f"rank {rank} planned {len(plan)} tensors and gave {taken}")

        def finish() -> None:
            entries = {group: writer.finish() for group, writer in writers.items()}
            write_rank_part(staging, rank, _rank_part(plan, entries, rank, tag))

        return _failure_of(finish)


def _rank_part(plan: Sequence[SavedTensor], files: Mapping[str, FileEntry], rank: int, tag: str) -> RankPart:
    tensors: dict[str, TensorEntry] = {}
    for saved in plan:
        if saved.is_stored:
            part = Part(_file_name(saved.key_group, rank, tag), saved.spec.slice)
            before = tensors[saved.key].parts if saved.key in tensors else ()
            shape = tuple(saved.spec.global_shape)
            tensors[saved.key] = TensorEntry(saved.spec.name, DTYPE_NAMES[saved.dtype], shape, (*before, part))
    return RankPart({_file_name(group, rank, tag): entry for group, entry in files.items()}, tensors)


def _file_name(group: str, rank: int, tag: str = "") -> str:
    return f"{FILE_KINDS[group]}-{rank:05d}{tag}.safetensors"


def _raise_on_all_or_abandon(
    failure: Exception | None, *, staging: Path, needed: int, leads: bool, world: Group
) -> None:
    try:
        with same_error_on_all_ranks(world):
            if failure is not None:
                raise _as_checkpoint_error(failure, staging.parent, needed)
    except CheckpointError:
        # At this point every rank has stopped writing.
        if leads:
            abandon(staging)
        raise


def _as_checkpoint_error(error: Exception, folder: Path, needed: int) -> CheckpointError:
    """Convert an error for the user. Must run before the staging files are removed, to report the free disk space."""
    what = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename and error.filename != str(folder) else ""
        what = f"{place}{error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what += f"; the checkpoint needs {needed:,} bytes, free there: {free_bytes(folder):,} bytes"
    return CheckpointError(f"cannot save a checkpoint in {folder}: {what}")


def steps_to_remove(
    steps: Iterable[int], newest: int, *, keep_latest: int, keep_every: int | None, held: Collection[int] = ()
) -> list[int]:
    """Return the steps to remove after `newest` was saved and verified, oldest first.

    Keeps the `keep_latest` newest steps, multiples of `keep_every`, and `held` steps, which are being read. Steps beyond
    `newest` are damaged leftovers from before a resume, or another run's; they are kept and not counted."""
    countable = sorted(step for step in set(steps) if step <= newest)
    old = [step for step in countable[:-keep_latest] if step not in held]
    return [step for step in old if keep_every is None or step % keep_every]


def prune(
    folder: Path,
    *,
    keep_latest: int,
    keep_every: int | None,
    held: Collection[int],
    newest: int,
    world: Group,
    log: Callable[[str], None],
) -> None:
    """Remove the `steps_to_remove` checkpoints after reading back and verifying the newest one from the disk.

    So the last sound checkpoint is never removed. Rank 0's `held` is used. A checkpoint is first renamed to a name that
    loading ignores, so a kill leaves no damaged one. Checkpoints that cannot be removed are reported to `log`.

    Collectives: if anything is removed, a few `gather_json` and broadcasts over `world`."""
    path = folder / step_name(newest)
    plan: dict[str, Any] = {}
    with same_error_on_all_ranks(world):
        try:
            if world.rank == 0:
                steps = [found.step for found in candidates(folder)]
                old = steps_to_remove(steps, newest, keep_latest=keep_latest, keep_every=keep_every, held=held)
                listed = listed_files(read_text(path / MANIFEST_NAME)) if old else {}
                plan = {"steps": old, "files": {name: vars(entry) for name, entry in listed.items()}}
        except CheckpointError as error:
            raise CheckpointError(f"{path} was written but cannot be found again: {error}") from None
    plan = world.broadcast_json(plan)
    if not plan["steps"]:
        return
    # Broadcast only the list of files: parsing the manifest of a run with many ranks takes long.
    files = {name: FileEntry(**entry) for name, entry in plan["files"].items()}
    fault = verify_files(path, files, world=world, from_disk=True)
    if fault:
        raise CheckpointError(
            f"{path} was written but does not verify when it is read back ({fault}): the older checkpoints are kept"
        )
    if world.rank == 0:
        for step in plan["steps"]:
            try:
                discard(folder / step_name(step))
            except OSError as error:
                log(f"warning: cannot remove the old checkpoint {folder / step_name(step)}: {error.strerror}")
