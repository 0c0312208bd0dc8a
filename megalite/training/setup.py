"""From a command line's config to a run that is ready to step: everything that can be wrong is found here."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalite.config import files
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.validate import require_startable, validate
from megalite.data.loader import BatchLoader
from megalite.data.sample_source import SampleSource
from megalite.data.sources import build_datasets
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer
from megalite.topology.sequence import sequence_spans
from megalite.training.replica import Replica
from megalite.training.sinks import JsonLines, MetricSink, TensorBoard, tensorboard_installed


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """This rank's batches; None on ranks that read no data, and for validation where there is none."""

    train: BatchLoader | None
    valid: BatchLoader | None


def resolve(
    config: RunConfig, *, world_size: int, explicit: frozenset[str]
) -> tuple[RunConfig, Tokenizer | None]:
    """The complete, legal config of a run on `world_size` ranks, and its tokenizer.

    Raises:
        ConfigError: anything that the settings alone, or the tokenizer's files, make impossible.
    """
    validate(config, world_size, explicit)
    require_startable(config)
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
    saves = config.checkpoint.save_interval is not None or config.training.exit_interval is not None
    if config.checkpoint.save is None and saves and config.logging.run_dir is not None:
        config = replace(config, save=str(Path(config.logging.run_dir) / "checkpoints"))
    return config, tokenizer


def open_data(replica: Replica, tokenizer: Tokenizer | None) -> Loaders:
    """Open the datasets on the ranks that read them.

    Raises:
        ConfigError: the same on every rank, whichever of them found the fault.
    """
    topology = replica.topology
    error: ConfigError | None = None
    loaders = Loaders(train=None, valid=None)
    if replica.reads_data:
        try:
            loaders = _open(replica, tokenizer)
        except ConfigError as found:
            error = found
    topology.world.agree(error, topology.device)
    return loaders


def _open(replica: Replica, tokenizer: Tokenizer | None) -> Loaders:
    config, topology = replica.config, replica.topology
    assert config.model.vocab_size is not None
    evaluates = config.training.eval_interval is not None
    datasets = build_datasets(
        config.data,
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        splits=("train", "valid") if evaluates else ("train",),
    )
    if datasets.train is None:
        raise ConfigError(
            f"the training split is empty (split {config.data.split}); give it a share, e.g. --split 969,30,1"
        )
    if evaluates and datasets.valid is None:
        raise ConfigError(
            f"eval_interval is {config.training.eval_interval} but there is no validation data (split "
            f"{config.data.split}); give it a share, e.g. --split 969,30,1, or leave --eval-interval out"
        )

    def loader(dataset: SampleSource) -> BatchLoader:
        return BatchLoader(
            dataset,
            seq_length=config.training.seq_length,
            eod_token=None if tokenizer is None else tokenizer.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            dp_rank=topology.dp.rank,
            dp_size=topology.dp.size,
            micro_batch_size=config.training.micro_batch_size,
            spans=sequence_spans(
                config.training.seq_length, cp_rank=topology.cp.rank, cp_size=topology.cp.size
            ),
            find_documents=replica.finds_documents,
            pin=topology.device.type == "cuda",
        )

    return Loaders(
        train=loader(datasets.train), valid=None if datasets.valid is None else loader(datasets.valid)
    )


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


def open_sinks(config: RunConfig, *, step: int, log: Callable[[str], None]) -> list[MetricSink]:
    """The run folder with its resolved config and metrics; called on rank 0.

    Raises:
        ConfigError: the folder cannot be written, or tensorboard was asked for and is not installed.
    """
    run_dir, tensorboard = config.logging.run_dir, config.logging.tensorboard_dir
    sinks: list[MetricSink] = []
    try:
        if run_dir is not None:
            folder = Path(run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(files.dump(config))
            sinks.append(JsonLines(folder / "metrics.jsonl", step=step))
            if tensorboard is None and not tensorboard_installed():
                # Not asked for by name, and metrics.jsonl has the same numbers.
                log("tensorboard is not installed: metrics go to metrics.jsonl alone")
            else:
                tensorboard = tensorboard or str(folder / "tensorboard")
        if tensorboard is not None:
            sinks.append(TensorBoard(Path(tensorboard)))
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
