"""Rules about data, tokenizer, checkpoints and evaluation: which settings go together. No file is opened here."""

from collections.abc import Callable
from pathlib import PurePath

from megalite.config.data import PATH_SETTINGS, parse_data_path, parse_split
from megalite.config.errors import Findings
from megalite.config.rules.effect import refuse_idle
from megalite.config.run import RunConfig


def check_data(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """One source of tokens, and settings that belong to it."""
    d = config.data
    per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(d, name)]
    sources = (["data_path"] if d.data_path else []) + per_split[:1] + (["mock_data"] if d.mock_data else [])
    if len(sources) > 1:
        first, second = (f"{name} {' '.join(getattr(d, name))}" if "path" in name else name for name in sources[:2])
        yield f"{first} and {second} are two sources of tokens; keep one of them"
        yield _check_tokenizer(config)
        return  # which settings belong to the source is open
    if per_split and "train_data_path" not in per_split:
        yield f"{per_split[0]} needs train_data_path; add it, or use data_path with split"
    if d.split is not None and not d.data_path:
        cause = f"with {per_split[0]}" if per_split else "with mock_data" if d.mock_data else "without data_path"
        yield f"split {d.split} has no effect {cause}; use data_path or remove it"
    if per_split and config.training.eval_interval is not None and not d.valid_data_path:
        yield (
            f"eval_interval {config.training.eval_interval} needs data to evaluate on; add --valid-data-path or "
            f"remove it"
        )
    if d.test_data_path and config.training.eval_interval is None:
        yield (
            f"test_data_path {' '.join(d.test_data_path)} has no effect without eval_interval: the test split is "
            "evaluated at the end of a run that also validates; add --eval-interval 100 or remove it"
        )
    if d.mock_data and config.model.vocab_size is None:
        yield "mock_data needs the range of its tokens; add --vocab-size, e.g. 1024"
    for name in PATH_SETTINGS:
        yield _readable(parse_data_path, getattr(d, name), name)
    if d.split is not None:
        yield _readable(parse_split, d.split)
    yield _check_order(config, explicit)
    yield _check_documents(config, explicit)
    yield _check_tokenizer(config)


def _readable(parse: Callable[..., object], *text: object) -> Findings:
    """What a parser has to say against the text."""
    parse(*text)
    yield from ()


def _check_order(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """How samples are made of documents."""
    d = config.data
    if d.mock_data:
        yield refuse_idle(
            config,
            explicit,
            ["packing", "data_order", "data_cache_path"],
            cause="with mock_data, which has no documents",
            remedy="use data_path",
        )
    if d.packing != "best-fit":
        return
    if d.data_order == "megatron":
        yield (
            "packing best-fit does not go with data_order megatron, which cuts samples from one stream of documents; use "
            "packing stream or data_order megalite"
        )
    yield refuse_idle(
        config,
        explicit,
        ["data_cache_path"],
        cause="with packing best-fit, whose index is made at the start of each epoch",
        remedy="use packing stream",
    )
    for name, already in (
        ("reset_attention_mask", "documents never see each other"),
        ("reset_position_ids", "positions start from 0 in each document"),
        ("eod_mask_loss", "the last token of a document predicts nothing"),
    ):
        yield refuse_idle(
            config, explicit, [name], cause=f"with packing best-fit, where {already}", remedy="use packing stream"
        )


def _check_documents(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """What starts afresh in each document, and the token that ends one must be known."""
    if config.data.mock_data:
        yield refuse_idle(
            config,
            explicit,
            ["eod_mask_loss", "reset_attention_mask", "reset_position_ids"],
            cause="with mock_data, which has no documents",
            remedy="use data_path",
        )
    used = [
        name for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids") if getattr(config.data, name)
    ]
    d = config.data
    source = d.data_path or d.train_data_path
    known = d.tokenizer_model or d.vocab_file or d.tokenizer_type in ("NullTokenizer", "ByteLevelTokenizer")
    if used and source and not known and d.packing == "stream":
        yield (
            f"{used[0]} needs the token that ends a document; add the tokenizer that made {source[-1]} "
            f"(--tokenizer-model FILE), or remove it"
        )
    if config.data.reset_position_ids and config.model.position_embedding_type == "none":
        yield (
            "reset_position_ids has no effect with position_embedding_type none; use rope or learned_absolute, or "
            "remove it"
        )


def _check_tokenizer(config: RunConfig) -> Findings:
    """What the tokenizer's files must be is for data/tokenizers to say, which opens them."""
    d = config.data
    if (d.vocab_file is None) != (d.merge_file is None):
        missing, given = ("merge_file", "vocab_file") if d.vocab_file else ("vocab_file", "merge_file")
        yield f"{given} {getattr(d, given)} needs {missing}; add --{missing.replace('_', '-')}"
    if d.tokenizer_model and d.vocab_file:
        yield (
            f"tokenizer_model {d.tokenizer_model} and vocab_file {d.vocab_file} are two tokenizers; keep one of them"
        )
    if d.tiktoken_pattern is not None:
        if d.tokenizer_type not in (None, "TikTokenizer"):
            yield (
                f"tiktoken_pattern {d.tiktoken_pattern} has no effect with tokenizer_type {d.tokenizer_type}; use "
                "TikTokenizer or remove it"
            )
        if d.tokenizer_model is None:
            yield (
                f"tiktoken_pattern {d.tiktoken_pattern} has no effect without a tiktoken file; add --tokenizer-model FILE "
                "or remove it"
            )


def saves(config: RunConfig) -> bool:
    """Something in the settings means that checkpoints are written: to `save`, or else below `run_dir`."""
    t = config.training
    ends = (t.exit_interval, t.exit_duration_in_mins, t.exit_file)
    return config.checkpoint.save_interval is not None or any(end is not None for end in ends)


def save_folder(config: RunConfig) -> str | None:
    """Where checkpoints go: to `save`; not given, below `run_dir`; None if nothing is saved."""
    save, run_dir = config.checkpoint.save, config.logging.run_dir
    if save is not None or run_dir is None or not saves(config):
        return save
    return str(PurePath(run_dir) / "checkpoints")


def check_checkpoint(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Settings of saving and loading that need a folder."""
    c = config.checkpoint
    if c.save_interval is not None and c.save is None and config.logging.run_dir is None:
        yield (f"save_interval {c.save_interval} has nowhere to save; add --save checkpoints or --run-dir runs/1")
    exit_interval = config.training.exit_interval
    if exit_interval is not None and c.save is None and config.logging.run_dir is None:
        yield (
            f"exit_interval {exit_interval} would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1"
        )
    if c.save is None and not saves(config):
        yield refuse_idle(
            config,
            explicit,
            ["async_save", "keep_latest", "keep_every", "on_save_error", "max_failures_at_step"],
            cause="in a run that saves nothing",
            remedy="add --save-interval 100",
        )
    yield _check_retention(config)
    for name in ("ckpt_step", "finetune", "fresh_if_missing"):
        value = getattr(c, name)
        if c.load is None and value is not None and value is not False:
            shown = name if value is True else f"{name} {value}"
            yield f"{shown} has no effect without load; add --load FOLDER or remove it"


def _check_retention(config: RunConfig) -> Findings:
    c = config.checkpoint
    if c.keep_every is None:
        return
    if c.keep_latest is None:
        yield (
            f"keep_every {c.keep_every} has no effect without keep_latest: all checkpoints are kept; add --keep-latest 2 "
            "or remove it"
        )
    if c.save_interval is not None and c.keep_every % c.save_interval:
        near = -(-c.keep_every // c.save_interval) * c.save_interval
        yield (
            f"keep_every {c.keep_every} is not a multiple of save_interval {c.save_interval}, so that few or none of its "
            f"steps are ever saved; use e.g. --keep-every {near}"
        )


def check_evaluation(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """eval_iters does nothing if there are no evaluations."""
    t = config.training
    if "eval_iters" in explicit and t.eval_interval is None:
        yield (f"eval_iters {t.eval_iters} has no effect without eval_interval; add --eval-interval 100 or remove it")
