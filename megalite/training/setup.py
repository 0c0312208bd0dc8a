"""From a config to data, indices, reports: everything that can be wrong is found here, before the first step."""

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.files import replace_durably
from megalite.config import files
from megalite.config.compute import kernels_in_words
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig, save_folder
from megalite.config.validate import validate
from megalite.data.blended import BlendedDataset, Indexed
from megalite.data.dataset import SampleSource
from megalite.data.loader import BatchLoader
from megalite.data.packed_dataset import PackedDataset
from megalite.data.sources import Datasets, open_run_datasets, samples_to_read
from megalite.optimizers.schedules import Progress
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer
from megalite.topology.group import Group
from megalite.topology.layout import sequence_spans
from megalite.training.ending import reserve_ending
from megalite.training.instruments import Instruments
from megalite.training.replica import Replica
from megalite.training.sinks import BestEffort, JsonLines, MetricSink, TensorBoard, tensorboard_installed
from megalite.training.writers import CSVFile, Wandb

_EPOCHS = 2
"""Whose indices are there before the first step: batches cross from one epoch to the next, and prefetch runs ahead."""


@dataclass(frozen=True)
class Need:
    """Samples [first, stop) of a dataset will be read."""

    source: SampleSource
    first: int
    stop: int


def leads_node(world: Group, device: torch.device, *, node: str | None = None) -> bool:
    """This rank is the first of its host.

    Told from the hosts' names rather than from LOCAL_RANK, which two launchers on one host may both count from 0.

    Args:
        node: name of this host, if it is not to be asked.

    Collectives: a gather over the world.
    """
    names = world.gather_json(platform.node() if node is None else node, device)
    return names.index(names[world.rank]) == world.rank


def prepare_indices(
    needs: Sequence[Need], notes: list[str], *, world: Group, device: torch.device, leads: bool
) -> list[str]:
    """Make the large indices on the disk, each once: rank 0 makes them all, where all nodes see them if the file system is
    shared; then the first rank of each other node makes those that it does not see.

    Of each dataset the first two epochs are made; the first rank of a node, where it reads data, makes each later one in
    the background during the epoch before.

    A rank that finds none later (where the folder cannot be written, or has been emptied since) makes its own in memory:
    the samples are the same.

    Args:
        needs: what will be read; nothing on ranks that have opened no data.
        notes: what the datasets of this rank have to say, filled as they do, also after this.
        leads: this rank is the first of its node.

    Returns:
        what the log should say: the notes of all ranks.

    Raises:
        ConfigError: an index cannot be made, or cannot be kept where the user wants it; the same on every rank.

    Collectives: three gathers over the world.
    """
    for turn in (world.rank == 0, leads and world.rank != 0):
        error: ConfigError | None = None
        try:
            for need in needs if turn else ():
                if isinstance(need.source, Indexed):
                    need.source.prepare(need.first, need.stop, epochs=_EPOCHS)
        except ConfigError as found:
            error = found
        world.agree(error, device)
    everything = world.gather_json(notes, device)
    notes.clear()
    return list(dict.fromkeys(note for of_rank in everything for note in of_rank))


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """This rank's batches; None on ranks that read no data, and of a split that is not read."""

    train: BatchLoader | None
    valid: BatchLoader | None
    test: BatchLoader | None = None
    notes: tuple[str, ...] = ()
    """What the log says about the data."""
    datasets: Datasets | None = None
    """Open on the ranks that read data, and on the first of each node, which makes their indices."""
    index_notes: list[str] = field(default_factory=list)
    """Gets what the datasets have to say about their indices."""


def resolve(config: RunConfig, *, world_size: int, explicit: frozenset[str]) -> tuple[RunConfig, Tokenizer | None]:
    """The complete, legal config of a run on `world_size` ranks, and its tokenizer.

    Raises:
        ConfigError: anything that the settings alone, or the tokenizer's files, make impossible.
    """
    validate(config, world_size, explicit, startable=True)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    if config.model.vocab_size is None:
        assert tokenizer is not None
        config = replace(config, vocab_size=tokenizer.vocab_size)
    elif tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"vocab_size is {config.model.vocab_size} but the tokenizer has {tokenizer.vocab_size} ids; set "
            f"--vocab-size {tokenizer.vocab_size} or leave it out"
        )
    config = validate(config, world_size, explicit)
    return replace(config, save=save_folder(config)), tokenizer


def open_data(replica: Replica, tokenizer: Tokenizer | None) -> Loaders:
    """Open the datasets on the ranks that read them, and on the first rank of each node.

    Raises:
        ConfigError: the same on every rank, whichever of them found the fault.
    """
    topology = replica.topology
    error: ConfigError | None = None
    loaders = Loaders(train=None, valid=None)
    if leads_node(topology.world, topology.device) or replica.reads_data:
        try:
            loaders = _open(replica, tokenizer)
        except ConfigError as found:
            error = found
        except OSError as found:
            error = ConfigError(f"cannot read {found.filename or 'the data'}: {found.strerror or found}")
    topology.world.agree(error, topology.device)
    return loaders


def prepare_data(replica: Replica, loaders: Loaders, progress: Progress) -> list[str]:
    """Make the large indices that the run will need from `progress` on, once a node.

    Returns:
        what the log should say.

    Raises:
        ConfigError: one cannot be made, or cannot be kept where the user wants it; the same on every rank.

    Collectives: a few gathers over the world.
    """
    topology, datasets = replica.topology, loaders.datasets
    needs = []
    if datasets is not None:
        reach = samples_to_read(replica.config, step=progress.step, samples=progress.samples)
        for split, (first, stop) in reach.items():
            source = getattr(datasets, split)
            if source is not None:
                needs.append(Need(source, first, stop))
    return prepare_indices(
        needs,
        loaders.index_notes,
        world=topology.world,
        device=topology.device,
        leads=leads_node(topology.world, topology.device),
    )


def _open(replica: Replica, tokenizer: Tokenizer | None) -> Loaders:
    config, topology = replica.config, replica.topology
    eod = None if tokenizer is None else tokenizer.eod
    index_notes: list[str] = []
    datasets, notes = open_run_datasets(config, tokenizer=tokenizer, log=index_notes.append)
    assert datasets.train is not None

    def loader(dataset: SampleSource | None) -> BatchLoader | None:
        if dataset is None or not replica.reads_data:
            return None
        return BatchLoader(
            dataset,
            seq_length=config.training.seq_length,
            eod_token=eod,
            eod_mask_loss=config.data.eod_mask_loss,
            dp_rank=topology.dp.rank,
            dp_size=topology.dp.size,
            micro_batch_size=config.training.micro_batch_size,
            spans=sequence_spans(config.training.seq_length, cp_rank=topology.cp.rank, cp_size=topology.cp.size),
            find_documents=replica.finds_documents,
            packed=replica.packs_documents,
            pin=topology.device.type == "cuda",
        )

    notes += _packing_notes(datasets.train)
    return Loaders(
        train=loader(datasets.train),
        valid=loader(datasets.valid),
        test=loader(datasets.test),
        notes=tuple(notes),
        datasets=datasets,
        index_notes=index_notes,
    )


def _packing_notes(dataset: SampleSource) -> list[str]:
    """How well whole documents fill the samples of each token file."""
    if isinstance(dataset, BlendedDataset):
        return [note for part in dataset.datasets for note in _packing_notes(part)]
    if not isinstance(dataset, PackedDataset):
        return []
    return [
        f"{dataset.indexed.prefix}: {len(dataset.documents)} documents are packed into {dataset.samples_per_epoch} "
        f"samples an epoch; {100.0 * dataset.idle_share:.2f} % of their positions predict nothing"
    ]


def make_save_folder(config: RunConfig) -> None:
    """Make the folder of checkpoints and try it, rather than find out at the first save; called on rank 0.

    Raises:
        ConfigError: nothing can be written there.
    """
    if config.checkpoint.save is None:
        return
    folder = Path(config.checkpoint.save)
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(
            f"cannot write checkpoints to {folder}: it is a link to {folder.readlink()}, which is not there"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write checkpoints to {folder}: {error.strerror}; give a folder that can be written with --save"
        ) from None


def open_reports(
    replica: Replica, instruments: Instruments, *, step: int, total: int, log: Callable[[str], None]
) -> list[MetricSink]:
    """Rank 0's sinks; the others have none, but hear of it if rank 0 cannot write. The instruments open their files.

    Raises:
        ConfigError: something cannot be written; the same on every rank.
    """
    topology = replica.topology
    sinks: list[MetricSink] = []
    found: ConfigError | None = None
    try:
        instruments.open(total)
        if topology.rank == 0:
            sinks = open_sinks(replica, step=step, log=log)
    except ConfigError as error:
        found = error
    topology.world.agree(found, topology.device)
    return sinks


def open_sinks(replica: Replica, *, step: int, log: Callable[[str], None]) -> list[MetricSink]:
    """The run folder with its config and metrics; called on rank 0.

    Raises:
        ConfigError: the folder cannot be written, or a package that was asked for is not installed.
    """
    config = replica.config
    run_dir, tensorboard = config.logging.run_dir, config.logging.tensorboard_dir
    sinks: list[MetricSink] = []

    def best_effort(sink: MetricSink, name: object) -> MetricSink:
        return BestEffort(sink, str(name), log)

    try:
        if run_dir is not None:
            folder = Path(run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            reserve_ending(folder)
            replace_durably(folder / "config.yaml", files.dump(replica.written).encode())
            sinks.append(best_effort(JsonLines(folder / "metrics.jsonl", step=step), folder / "metrics.jsonl"))
            if "csv" in config.logging.metrics:
                sinks.append(best_effort(CSVFile(folder / "metrics.csv", step=step), folder / "metrics.csv"))
            if tensorboard is None and not tensorboard_installed():
                # Not asked for by name, and metrics.jsonl has the same numbers.
                log("tensorboard is not installed: metrics go to metrics.jsonl alone; pip install tensorboard")
            else:
                tensorboard = tensorboard or str(folder / "tensorboard")
        if tensorboard is not None:
            sinks.append(best_effort(TensorBoard(Path(tensorboard)), tensorboard))
        if "wandb" in config.logging.metrics:
            sinks.append(best_effort(Wandb(config, resumes=config.checkpoint.load is not None), "wandb"))
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename or run_dir}: {error.strerror}; give a folder that can be written with "
            "--run-dir (and --tensorboard-dir)"
        ) from None
    return sinks


def describe(config: RunConfig, replica: Replica, log: Callable[[str], None]) -> None:
    """The first lines of a run's log."""
    p, t = config.parallel, config.training
    layout = replica.topology.layout
    assert t.global_batch_size is not None
    assert p.dp is not None
    log(
        f"megalite: {layout.world_size} rank{'s' if layout.world_size > 1 else ''} = tp {p.tp} x cp {p.cp} x dp {p.dp} x pp {p.pp} (vpp {p.vpp}) on "
        f"{replica.topology.device.type}, {t.precision}, {p.dp_strategy}"
        f"{', sequence parallel' if p.sequence_parallel else ''}"
    )
    cut = " ".join(f"{part.num_layers}" for part in replica.plan)
    count = t.global_batch_size // (t.micro_batch_size * p.dp)
    schedule = replica.programs.program(count).schedule.name
    log(
        f"schedule {schedule}, layers per stage {cut}; global batch {t.global_batch_size} = {t.micro_batch_size} a "
        f"microbatch x {p.dp} dp x {count} microbatches; {t.global_batch_size * t.seq_length} tokens a step"
    )
    for line in replica.computes:
        log(line)
    log(f"kernels: {kernels_in_words(replica.kernels.summary())}")


def in_words(config: RunConfig, progress: Progress) -> str:
    """Where a checkpoint is in the run as it was asked for: it may be beyond it."""
    training, step = config.training, progress.step
    if training.train_iters is not None:
        return f"step {step} of {training.train_iters}"
    return f"step {step}, {progress.samples} samples of {training.train_samples}"
