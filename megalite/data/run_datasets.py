"""The datasets of a run, with the rules of which splits it must have."""

from collections.abc import Callable
from functools import partial

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.config.split import DEFAULT_SPLIT
from megalite.data.run_samples import megatron_lengths
from megalite.data.sources import Datasets, build_datasets
from megalite.data.tokenizers.base import Tokenizer


def open_run_datasets(
    config: RunConfig, *, tokenizer: Tokenizer | None, log: Callable[[str], None]
) -> tuple[Datasets, list[str]]:
    """The splits that the run reads, and what there is to say about them.

    The test split is read once, at the end of a run that also validates. 969,30,1 has one that nobody asked for, so
    that a short one is no reason to stop.

    Args:
        config: validated, with a length and a vocab_size.
        tokenizer: of the run; its end of document fills up samples of packed documents.
        log: is told, also later, where indices could not be kept.

    Raises:
        ConfigError: as `build_datasets`; or a split that the run needs has no documents.
    """
    datasets, notes = _build(config, tokenizer, log)
    split = config.data.split or DEFAULT_SPLIT
    if datasets.train is None:
        raise ConfigError(
            f"the training split is empty (split {split}); give it a share, e.g. --split 969,30,1"
        )
    if config.training.eval_interval is not None and datasets.valid is None:
        if config.data.data_path:
            cause, remedy = f" (split {split})", "give it a larger share of --split or more documents"
        else:
            cause, remedy = "", "add --valid-data-path PREFIX"
        raise ConfigError(
            f"eval_interval is {config.training.eval_interval} but there is no validation data{cause}; {remedy}, or leave "
            "--eval-interval out"
        )
    return datasets, notes


def _build(
    config: RunConfig, tokenizer: Tokenizer | None, log: Callable[[str], None]
) -> tuple[Datasets, list[str]]:
    data = config.data
    assert config.model.vocab_size is not None
    build = partial(
        build_datasets,
        data,
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        pad_token=0 if tokenizer is None else tokenizer.eod,
        tokenizer=tokenizer,
        num_samples=megatron_lengths(config),
        log=log,
    )
    if config.training.eval_interval is None:
        return build(splits=("train",)), []
    if not data.data_path and not data.test_data_path:
        return build(splits=("train", "valid")), []
    try:
        return build(splits=("train", "valid", "test")), []
    except ConfigError as fault:
        if data.test_data_path or data.split is not None:
            raise
        # What is wrong with the other splits, or with the files, comes up again here.
        return build(splits=("train", "valid")), [f"no test loss at the end of the run: {fault}"]
