"""Sets up config, data, indices and reports of a run, so that all errors in them appear before the first step."""

import dataclasses
import itertools
import platform
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.files import replace_durably, run_in_daemon
from megalite.config import files
from megalite.config.batch import ramp_in_words, size_changes
from megalite.config.compute import kernels_in_words
from megalite.config.data import DATASETS, PATH_SETTINGS, is_address, parse_data_path
from megalite.config.describe import replace
from megalite.config.errors import ConfigError, plural
from megalite.config.model import BLOCKS, ModelConfig
from megalite.config.numbers import format_bytes, parse_byte_size
from megalite.config.optimizer import OPTIMIZERS
from megalite.config.registry import imported
from megalite.config.run import RunConfig, save_folder
from megalite.config.run import writers as wanted_writers
from megalite.config.training import LOSSES, TrainingConfig
from megalite.config.validate import validate
from megalite.data.dataset import SampleSource
from megalite.data.loader import BatchLoader
from megalite.data.sources import Datasets, WholeSplit, open_run_datasets, samples_to_read
from megalite.data.token_files import check_exists, read_side_file, side_digests
from megalite.optimizers.schedules import Progress
from megalite.partition.memory import USUAL_MEMORY, is_built_without_limit, within_memory
from megalite.tokenizers.base import Tokenizer
from megalite.topology.group import Group
from megalite.training.instruments import Instruments
from megalite.training.records import METRICS, BestEffort, JsonLines, MetricSink
from megalite.training.replica import Replica
from megalite.training.stopping import reserve_ending

_EPOCHS = 2
"""Epochs with indices before the first step: batches cross from one epoch to the next, and prefetch runs ahead."""

_MEETING_SECONDS = 5.0  # interval between gathers of ranks that wait for another rank's files
_PATIENCE = 10.0  # seconds in which such work can save its progress when the run is stopped

Need = tuple[SampleSource, int, int]
"""A dataset, and the samples [first, stop) of it that the run reads."""


def is_first_on_node(world: Group, *, node: str | None = None) -> bool:
    """Return whether this rank is the first of its host.

    Uses host names, because LOCAL_RANK starts from 0 in each of several launchers on one host.

    Collectives: a gather over the world."""
    names = world.gather_json(platform.node() if node is None else node)
    return names.index(names[world.rank]) == world.rank


def prepare_indices(needs: Sequence[Need], notes: list[str], *, world: Group, leads: bool) -> list[str]:
    """Build the large indices on disk, each once: rank 0 builds all, and then the first rank of each other node builds
    those that are missing there, if the file system is not shared.

    This covers the first two epochs of each dataset. The first rank of a node, if it reads data, builds each later
    epoch in the background during the previous one. A rank that finds no index (the folder is not writable, or was
    emptied) builds its own in memory, with the same samples.

    `notes`: list to which the datasets of this rank append messages, also later. Returns the messages of all ranks.

    Collectives: three gathers over the world."""
    for turn in (world.rank == 0, leads and world.rank != 0):
        with world.errors_on_all_ranks():
            for source, first, stop in needs if turn else ():
                prepare: Callable[..., None] | None = getattr(source, "prepare", None)
                if prepare is not None:
                    prepare(first, stop, epochs=_EPOCHS)
    everything = world.gather_json(notes)
    notes.clear()
    return list(dict.fromkeys(note for of_rank in everything for note in of_rank))


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """This rank's batch loaders; None on ranks that read no data, and for a split that is not read."""

    train: BatchLoader | None = None
    valid: BatchLoader | None = None
    test: BatchLoader | None = None
    notes: tuple[str, ...] = ()
    """Log lines about the data."""
    datasets: Datasets | None = None
    """Open on the ranks that read data, and on the first rank of each node, which builds their indices."""
    index_notes: list[str] = field(default_factory=list)
    """Receives messages of the datasets about their indices."""


def with_parts(config: RunConfig, *, dataset: Any, model: Any, optimizer: Any, loss: Any) -> RunConfig:
    """Return the config with the registered names of parts that were passed as objects."""
    if isinstance(model, ModelConfig):
        config = dataclasses.replace(config, model=model)
    elif isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__} that is built already, so its parameters cannot be split over ranks; "
            "give a layer class registered in BLOCKS, or a ModelConfig (megalite convert reads others' checkpoints)"
        )
    elif model is not None:
        config = replace(config, block=BLOCKS.name_of(model))
    if optimizer is not None:
        config = replace(config, optimizer=OPTIMIZERS.name_of(optimizer))
    if loss is not None:
        config = replace(config, loss=LOSSES.name_of(loss))
    if dataset is not None:
        config = replace(config, dataset=_named_dataset(dataset))
    return config


def _named_dataset(given: Any) -> str:
    """Return the name of a dataset, after registering it if necessary."""
    if isinstance(given, str) or any(entry.implementation is given for entry in DATASETS.entries.values()):
        return DATASETS.name_of(given)
    kind = type(given).__name__
    name = next(name for number in itertools.count(1) if (name := f"{kind}-{number}") not in DATASETS.entries)
    DATASETS.register(name)(given)
    return name


def resolve(config: RunConfig, *, world_size: int, explicit: frozenset[str]) -> tuple[RunConfig, Tokenizer | None]:
    """Return the complete, valid config of a run on `world_size` ranks, and its tokenizer."""
    tokenizer = _tokenizer(validate(config, world_size, explicit, startable=True))
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


def within_device(config: RunConfig, *, world: Group, log: Callable[[str], None]) -> RunConfig:
    """Set a pipeline memory limit if the schedule, built without one, does not fit the smallest GPU of all ranks."""
    if world.device.type != "cuda" or not is_built_without_limit(config):
        return config
    total = min(world.gather_json(torch.cuda.get_device_properties(world.device).total_memory))
    config = within_memory(config, USUAL_MEMORY * total)
    if (limit := config.parallel.pipeline_memory_limit) is not None:
        log(
            f"pipeline_schedule auto: activations within {format_bytes(parse_byte_size(limit) or 0.0)} per rank, on GPUs "
            f"with {format_bytes(total)}; --pipeline-memory-limit sets another limit"
        )
    return config


def _tokenizer(config: RunConfig) -> Tokenizer | None:
    data = config.data
    if not any((data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file, data.tiktoken_pattern)):
        return None
    return imported("megalite.tokenizers.build:build_tokenizer")(data, config.model.vocab_size)


Tokenize = Callable[..., dict[str, str]]
"""Type of `preprocess.text_data.tokenize_text`, which creates token files of a run's texts."""


def fetch_remote_files(
    config: RunConfig, *, world: Group, log: Callable[[str], None], explicit: frozenset[str] | None = None
) -> RunConfig:
    """Fetch all files that settings name by an address (s3://, https://...), and return the config with local paths.

    Rank 0 fetches, and then the first rank of each other node, if the files are missing there. `explicit`: the user's
    settings in a run that continues from the checkpoint; they must fit its manifest before other files are fetched.

    Raises ConfigError: a file cannot be fetched; the same on every rank.

    Collectives: gathers over the world while ranks fetch."""
    data = config.data
    named = [data.tokenizer_model, data.vocab_file, data.merge_file, config.checkpoint.load]
    named += [word for name in PATH_SETTINGS for word in getattr(data, name)]
    if not any(word is not None and is_address(word) for word in named):
        return config
    leads = is_first_on_node(world)
    fits: dict[str, Any] = {}
    if explicit is not None:
        check = imported("megalite.training.resume:check_settings")
        fits["accept"] = partial(check, explicit=explicit, tokenizer_of=_tokenizer)
    fetch_all = imported("megalite.data.remote:fetch_all")
    places: dict[str, str] = {}
    for turn in (world.rank == 0, leads and world.rank != 0):
        work = partial(fetch_all, config, say=log, **fits) if turn else lambda stopped: None
        places |= _run_task(work, world) or {}
    return imported("megalite.data.remote:with_places")(config, world.broadcast_json(places))


def tokenize_texts(
    config: RunConfig, tokenize: Tokenize | None, *, world: Group, log: Callable[[str], None]
) -> RunConfig:
    """Require the token files in the data paths, tokenize all texts, and return the config with token files in their place.

    Rank 0 tokenizes, or finds the files of an earlier run; then the first rank of each other node does, if the files
    are missing there. All ranks gather every few seconds, so that no collective times out and the run can be stopped.

    Raises ConfigError: a text cannot be tokenized, or `tokenize` is None; the same on every rank.

    Collectives: gathers over the world while ranks tokenize, and a broadcast."""
    data = config.data
    with world.errors_on_all_ranks():
        for name in PATH_SETTINGS if world.rank == 0 and data.dataset is None else ():
            for _, path in parse_data_path(getattr(data, name), name):
                if path not in data.texts:
                    check_exists(path)
    if not data.texts:
        return config
    if tokenize is None:
        raise ConfigError(
            f"data path {data.texts[0]} is text, and this Trainer has no tokenize function; pass "
            "tokenize=megalite.preprocess.text_data.tokenize_text, or token files of megalite preprocess"
        )
    prefixes: dict[str, str] | None = None
    leads = is_first_on_node(world)
    for turn in (world.rank == 0, leads and world.rank != 0):
        work = partial(tokenize, config, prefixes, say=log) if turn else lambda stopped: None
        made = _run_task(work, world)
        prefixes = world.broadcast_json(made if prefixes is None else prefixes)
    assert prefixes is not None
    with world.errors_on_all_ranks():
        sides = [read_side_file(prefix) or {} for prefix in prefixes.values()] if leads else []
    digests = world.gather_json([side_digests(side) for side in sides])
    for rank, of_rank in enumerate(digests):
        for path, expected, digest in zip(prefixes, digests[0], of_rank, strict=False):
            if digest != expected:
                raise ConfigError(
                    f"{path} has other text on the node of rank {rank} than on that of rank 0; copy one to the other, or "
                    "use a shared file system"
                )
    return dataclasses.replace(config, data=data.with_paths(prefixes))


def _run_task(work: Callable[..., Any], world: Group) -> Any:
    """Run work of some ranks in a daemon thread. Return this rank's result, once the work of all ranks is done."""
    stop = threading.Event()
    future = run_in_daemon(partial(work, stopped=stop.is_set), "megalite-text")
    try:
        ended = False
        while not ended:
            ended = all(world.gather_json(bool(wait([future], _MEETING_SECONDS).done)))
    finally:
        stop.set()
        wait([future], _PATIENCE)
    world.raise_on_all_ranks(future.exception())
    return future.result()


def open_data(replica: Replica, tokenizer: Tokenizer | None) -> Loaders:
    """Open the datasets on the ranks that read them, and on the first rank of each node."""
    topology, loaders = replica.topology, Loaders()
    needs = is_first_on_node(topology.world) or replica.reads_data
    with topology.world.errors_on_all_ranks():
        try:
            loaders = _open(replica, tokenizer) if needs else loaders
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename or 'the data'}: {error.strerror or error}") from None
    if replica.config.data.dataset is not None:
        _require_same_samples(loaders, replica.config.data.dataset, topology.world)
    return loaders


def _require_same_samples(loaders: Loaders, name: str, world: Group) -> None:
    """Raise ConfigError if a user's dataset differs between ranks, since several ranks read each sample.

    Collectives: a gather over the world."""
    datasets = loaders.datasets
    own = None if datasets is None or datasets.train is None else zlib.crc32(datasets.train.sample(0).tobytes())
    seen = [(rank, digest) for rank, digest in enumerate(world.gather_json(own)) if digest is not None]
    other = next((rank for rank, digest in seen if digest != seen[0][1]), None)
    if other is not None:
        raise ConfigError(
            f"dataset {name}: ranks {seen[0][0]} and {other} read different tokens as sample 0; a sample must depend only "
            "on its number"
        )


def prepare_data(replica: Replica, loaders: Loaders, progress: Progress) -> list[str]:
    """Run `prepare_indices` for the samples that the run reads from `progress` on, and return log lines."""
    world, needs = replica.topology.world, list[Need]()
    if loaders.datasets is not None:
        for split, reach in samples_to_read(
            replica.config, loaders.datasets, step=progress.step, samples=progress.samples
        ).items():
            if (source := getattr(loaders.datasets, split)) is not None:
                needs.append((source, *reach))
    return prepare_indices(needs, loaders.index_notes, world=world, leads=is_first_on_node(world))


def make_loader(replica: Replica, dataset: SampleSource, *, eod_token: int | None) -> BatchLoader:
    """Return this rank's loader of a dataset."""
    config, topology = replica.config, replica.topology
    return BatchLoader(
        dataset,
        seq_length=config.training.seq_length,
        eod_token=eod_token,
        eod_mask_loss=config.data.eod_mask_loss,
        dp_rank=topology.dp.rank,
        dp_size=topology.dp.size,
        micro_batch_size=config.training.micro_batch_size,
        cp_rank=topology.cp.rank,
        cp_size=topology.cp.size,
        balance=replica.balance,
        find_documents=replica.finds_documents,
        packed=replica.packs_documents,
        mtp_num_layers=replica.config.model.mtp_num_layers,
        samples=dataset.samples if isinstance(dataset, WholeSplit) else None,
        pin=topology.device.type == "cuda",
        num_workers=config.data.num_workers,
    )


def _open(replica: Replica, tokenizer: Tokenizer | None) -> Loaders:
    index_notes: list[str] = []
    datasets, notes = open_run_datasets(replica.config, tokenizer=tokenizer, log=index_notes.append)
    eod = None if tokenizer is None else tokenizer.eod
    loaders = {
        split: make_loader(replica, dataset, eod_token=eod)
        for split in ("train", "valid", "test")
        if replica.reads_data and (dataset := getattr(datasets, split)) is not None
    }
    if replica.packs_documents:
        notes += [part.summary for part in getattr(datasets.train, "datasets", [datasets.train])]
    return Loaders(**loaders, notes=tuple(notes), datasets=datasets, index_notes=index_notes)


def open_reports(
    replica: Replica, instruments: Instruments, *, step: int, total: int, log: Callable[[str], None]
) -> list[MetricSink]:
    """Open the instruments' files, and return rank 0's sinks. Raises ConfigError on all ranks if one cannot write."""
    topology = replica.topology
    sinks: list[MetricSink] = []
    with topology.world.errors_on_all_ranks():
        instruments.open(total)
        if topology.rank == 0:
            sinks = _open_sinks(replica, step=step, log=log)
    return sinks


def _open_sinks(replica: Replica, *, step: int, log: Callable[[str], None]) -> list[MetricSink]:
    """Create the run folder with its config and metrics files."""
    config = replica.config
    run_dir, sinks = config.logging.run_dir, dict[str, MetricSink]()
    try:
        if run_dir is not None:
            folder = Path(run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            reserve_ending(folder)
            replace_durably(folder / files.CONFIG_NAME, files.dump(replica.written).encode())
            sinks[str(folder / METRICS)] = JsonLines(folder / METRICS, step=step)
        if run_dir is not None or config.logging.tensorboard_dir is not None or wanted_writers(config):
            more, without = imported("megalite.training.writers:open_writers")(config, step=step)
            sinks |= more
            if without:
                log(f"tensorboard is not installed: only {METRICS} has the metrics; pip install tensorboard")
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename or run_dir}: {error.strerror}; give a folder that can be written with "
            "--run-dir (and --tensorboard-dir)"
        ) from None
    return [BestEffort(sink, name, log) for name, sink in sinks.items()]


def _warmup(training: TrainingConfig) -> str:
    start, steps = training.seq_length_warmup or (0, 0)
    return f", once {steps} steps have made sequences of {start} grow to {training.seq_length}" if steps else ""


def describe(replica: Replica, log: Callable[[str], None]) -> None:
    """Log the first lines of a run."""
    p, t = replica.config.parallel, replica.config.training
    world_size = replica.topology.world.size
    assert t.global_batch_size is not None and p.dp is not None
    log(
        f"megalite: {plural(world_size, 'rank')} = tp {p.tp} x cp {p.cp} x dp {p.dp} x pp {p.pp} "
        f"(vpp {p.vpp}) on {replica.topology.device.type}, {t.precision}, {p.dp_strategy}"
        f"{', sequence parallel' if p.sequence_parallel else ''}"
    )
    count = t.global_batch_size // (t.micro_batch_size * p.dp)
    starts, sizes = zip(*size_changes(replica.config), strict=True)
    ramp = f"; {ramp_in_words(sizes, starts[-1])}" if len(sizes) > 1 else ""
    log(
        f"schedule {replica.programs.program(count).schedule.name}, layers per stage "
        f"{' '.join(str(part.num_layers) for part in replica.programs.stages)}; global batch {t.global_batch_size} = "
        f"{t.micro_batch_size} per microbatch x {p.dp} dp x {count} microbatches; "
        f"{t.global_batch_size * t.seq_length} tokens per step{_warmup(t)}{ramp}"
    )
    if replica.config.model.moe_router_force_load_balancing:
        log(
            "warning: moe_router_force_load_balancing ignores the router: use this run's speed, not its losses or weights"
        )
    for line in (*replica.compute_notes, f"kernels: {kernels_in_words(replica.kernels.summary())}"):
        log(line)
    if (others := replica.kernels.fallback_summary()) is not None:
        log(others)
