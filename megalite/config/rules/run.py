"""Rules that do not concern the numbers: data, checkpoints, hang limits, stops, logging, elastic starts."""

from functools import partial
from pathlib import PurePath

from megalite.config.data import LOCAL, PATH_SETTINGS, UNSAVED, is_address, is_remote, parse_data_path, parse_split
from megalite.config.errors import Findings, Idle, nearest
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, OPTIMIZERS
from megalite.config.rules.rule import Check, Plain, Settings, owned, parsed, rules, without
from megalite.config.run import hugging_face_folder, profile_folder, save_folder, saves, scales_loss, writers
from megalite.config.strategies import STRATEGIES
from megalite.config.training import WRITERS

EXIT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP")
"""Signals that may stop a run; SIGINT always does."""


def _sources(c: Settings) -> list[str]:
    """Return the settings that name a source of tokens: a legal config has one."""
    per_split = [name for name in PATH_SETTINGS[1:] if getattr(c, name)]
    made = ["mock_data"] if c.mock_data else []
    if c.dataset is not None:  # a registered dataset may read the paths
        return ["dataset", *made]
    return (["data_path"] if c.data_path else []) + per_split[:1] + made


def _from_splits(c: Settings) -> bool:
    return len(_sources(c)) == 1 and not c.data_path and not c.mock_data and c.dataset is None


def _two_sources(c: Settings) -> Findings:
    if len(sources := _sources(c)) > 1:
        remedy = "keep one of them"
        if sources[0] == "data_path" and sources[1] in ("valid_data_path", "test_data_path"):
            remedy = "name the training data by --train-data-path, or use data_path with split"
        yield f"{{{sources[0]}}} and {{{sources[1]}}} are two sources of tokens; {remedy}"


def _split_without_data_path(c: Settings) -> Findings:
    if c.split is not None and not c.data_path and c.dataset is None and len(sources := _sources(c)) < 2:
        cause = f"with {sources[0]}" if sources else "without data_path"
        yield Idle(f"{{split}} has no effect {cause}", "split")


def _end_of_document(c: Settings) -> Findings:
    used = [name for name in _DOCUMENTS.split("|") if getattr(c, name)]
    source = c.data_path or c.train_data_path
    known = c.tokenizer_model or c.vocab_file or c.tokenizer_type in ("NullTokenizer", "ByteLevelTokenizer")
    if used and source and not known and c.packing == "stream" and not c.sft:
        remedy = f"add the --tokenizer-model of {source[-1]}, or remove it"
        yield Plain(f"{used[0]} needs the token that ends a document; {remedy}")


def _bpe_files(c: Settings) -> Findings:
    if (c.vocab_file is None) != (c.merge_file is None):
        missing, given = ("merge_file", "vocab_file") if c.vocab_file else ("vocab_file", "merge_file")
        yield f"{{{given}}} needs {missing}; add --{missing.replace('_', '-')}"


def _keeps_files(c: Settings) -> bool:
    """Return whether the run caches anything in data_cache_path."""
    named = [c.save, c.load, *(word for name in PATH_SETTINGS for word in getattr(c, name))]
    return bool(c.texts) or any(is_address(word) for word in named if word is not None)


_DOCUMENTS = "eod_mask_loss|reset_attention_mask|reset_position_ids"
TOKENIZER: tuple[Check, ...] = (
    *owned("tokenizer_type", {"?tiktoken_pattern": ("TikTokenizer", None)}),
    *without({"?tiktoken_pattern": "--tokenizer-model FILE"}),
)
DATA: tuple[Check, ...] = (
    _two_sources,
    _split_without_data_path,
    *(parsed(partial(parse_data_path, name=name), name) for name in PATH_SETTINGS),
    parsed(parse_split, "split"),
    _end_of_document,
    _bpe_files,
    *owned("position_embedding_type", {"?reset_position_ids": ("rope", "learned_absolute")}),
    *rules(
        {
            "{?valid_data_path|test_data_path} needs train_data_path; add it, or use data_path with split": (
                lambda c: _from_splits(c) and not c.train_data_path
            ),
            "{?eval_interval} needs validation data; add --valid-data-path or remove it": (
                lambda c: _from_splits(c) and not c.valid_data_path
            ),
            "{!eval_iters} has no effect without eval_interval; add --eval-interval 100 or remove it": (
                lambda c: c.eval_iters and c.eval_interval is None and not c.test_data_path
            ),
            "{?mock_data} needs the range of its tokens; add --vocab-size, e.g. 1024": lambda c: c.vocab_size is None,
            "full_validation has no effect without eval_interval; add --eval-interval 100 or remove it": (
                lambda c: c.full_validation and c.eval_interval is None
            ),
            "full_validation needs the end of the validation data, and {?mock_data} has none; use --eval-iters": (
                lambda c: c.full_validation and not c.data_path
            ),
            f"{{!packing|data_order|{_DOCUMENTS}}} has no effect with mock_data, which has no documents; use data_path or remove "
            "it": lambda c: c.mock_data and not c.data_path,
            "{!packing|data_order} has no effect with {dataset}, which returns whole samples; remove it": lambda c: (
                c.dataset is not None
            ),
            "{!data_cache_path} has no effect without documents or addresses to cache; use data_path or remove "
            "it": lambda c: (c.dataset is not None or (c.mock_data and not c.data_path)) and not _keeps_files(c),
            "{?packing} does not go with {data_order}, which cuts samples from one stream of documents; use packing stream or "
            "data_order megalite": lambda c: c.data_order == "megatron",
            f"{{!{_DOCUMENTS}}} has no effect with {{packing}}, where documents never attend to each other and start at "
            "position 0; use packing stream or remove it": (
                lambda c: c.packing == "best-fit" and not c.mock_data and not c.sft
            ),
            f"{{!{_DOCUMENTS}}} has no effect with {{sft}}, where examples never attend to each other, start at position 0 and "
            "only responses have a loss; remove it": lambda c: c.sft,
            "{!data_cache_path} has no effect with {packing}, which keeps no index; use packing stream or remove it": (
                lambda c: c.packing == "best-fit" and not c.mock_data and not _keeps_files(c)
            ),
            "{!data_cache_path} has no effect with {sft}, which keeps no index; remove it": lambda c: (
                c.sft and not _keeps_files(c)
            ),
            "{?sft} needs examples, but {mock_data} has none; use data_path": lambda c: c.mock_data,
            "{?sft} packs its examples itself and does not go with {data_order}; use data_order megalite": (
                lambda c: c.data_order == "megatron"
            ),
            "{!packing} has no effect with {sft}, which packs whole examples; remove it": (
                lambda c: c.sft and c.packing == "stream"
            ),
            "{!text_field} has no effect with {sft}, which reads prompt and response or messages; remove it": lambda c: (
                c.sft
            ),
            "{!text_field} has no effect: the data paths name no text files; remove it": (
                lambda c: not c.texts and not c.sft
            ),
            "{?tokenizer_model} and {vocab_file} are two tokenizers; keep one of them": lambda c: c.vocab_file,
        }
    ),
)


def _unreached_saves(c: Settings) -> Findings:
    if c.keep_every is not None and c.save_interval is not None and c.keep_every % c.save_interval:
        works = -(-c.keep_every // c.save_interval) * c.save_interval
        yield f"{{keep_every}} is not a multiple of {{save_interval}}: few of its steps are saved; use e.g. --keep-every {works}"


def _local_folders(c: Settings) -> Findings:
    for name in ("run_dir", "tensorboard_dir", "export_hf", "data_cache_path", "exit_file"):
        if is_remote(getattr(c, name) or ""):
            yield f"{{{name}}} {LOCAL}; an address works as --save"
    save = c.save or ""
    if is_remote(save) and not is_address(save):
        yield f"{{save}} is a folder on this machine; give an address as --save {save.replace(':/', '://', 1)}"


CHECKPOINT: tuple[Check, ...] = (
    *without(
        {
            "?keep_every": "--keep-latest 2",
            "?ckpt_step|finetune|fresh_if_missing|load_optimizer|require_same_schedule": "--load FOLDER",
            "?save_hf_interval": "--export-hf models/mine",
        }
    ),
    *rules(
        {
            "{?save_interval|exit_duration_in_mins|exit_file|export_hf} has nowhere to save; add --save checkpoints or --run-dir "
            "runs/1": lambda c: c.save is None and c.run_dir is None,
            "{!async_save|keep_latest|keep_every|on_save_error|max_failures_at_step} has no effect in a run that saves nothing; "
            "add --save-interval 100 or remove it": lambda c: (
                save_folder(c.run) is None and (c.exit_interval is not None or not saves(c.run))
            ),
            "{save} cannot be saved to: it is read-only or lost with the process; use s3://BUCKET/RUN, gs://BUCKET/RUN or "
            "a folder": lambda c: (c.save or "").startswith(UNSAVED),
            "{?export_hf} needs checkpoints in a folder, but {save} is an address; save to a folder, or leave it out and use "
            "megalite convert {=save} afterwards": lambda c: is_address(c.save or ""),
            "{?ckpt_step|fresh_if_missing} does not go with {load}, which is a single model; remove it, or set --load to the "
            "folder of a run's checkpoints": lambda c: hugging_face_folder(c.load) is not None,
        }
    ),
    _unreached_saves,
    _local_folders,
)


def _below_collectives(c: Settings) -> Findings:
    """Check that the watchdog reports a hang before collectives fail, which name no rank."""
    assert c.dp is not None
    for name, share in (("hang_timeout_minutes", 0.8), ("hang_save_timeout_minutes", 0.9)):
        minutes, limit = getattr(c, name), c.distributed_timeout_minutes
        if minutes is not None and c.tp * c.pp * c.cp * c.dp > 1 and minutes >= limit:
            yield (
                f"{{{name}}} is not below {{distributed_timeout_minutes}}: collectives would fail before the watchdog could "
                f"name the hanging rank; use --{name.replace('_', '-')} {share * limit:g} or --distributed-timeout-minutes "
                f"{minutes / share:g}"
            )


HANG: tuple[Check, ...] = (
    _below_collectives,
    *rules(
        {
            "{?hang_save_timeout_minutes} has no effect with {hang_timeout_minutes}; remove one of them": (
                lambda c: c.hang_timeout == 0
            ),
            "{?hang_save_timeout_minutes} is below hang_timeout_minutes {=hang_timeout}, but saves and starts may take longer; use "
            "--hang-save-timeout-minutes {=hang_timeout} or --hang-timeout-minutes {=hang_save_timeout_minutes}": (
                lambda c: c.hang_save_timeout < c.hang_timeout
            ),
        }
    ),
)


def _names(c: Settings) -> Findings:
    """Check the words in lists."""
    for setting, known in (("exit_signals", EXIT_SIGNALS), ("metrics", WRITERS)):
        for name in getattr(c, setting):
            if name not in known:
                yield Plain(f"{setting} has {name} in it{nearest(name, known)} (any of {', '.join(known)})")


STOPS: tuple[Check, ...] = (
    _names,
    *rules(
        {
            "{!max_consecutive_skips} has no effect with {on_non_finite}; use --on-non-finite skip or remove it": (
                lambda c: c.on_non_finite == "stop" and (not scales_loss(c.run) or c.loss_scale is not None)
            ),
            "{?on_non_finite} does not go with {check_for_nan_in_loss_and_grad}, which ignores such steps; keep one of them": (
                lambda c: not c.check_for_nan_in_loss_and_grad
            ),
            "{?iterations_to_skip} does not go with {dp_strategy}, which exchanges something in every step; use --dp-strategy "
            "distributed-optimizer": lambda c: c.strategy.weights != "equal",
            "{?iterations_to_skip} does not go with {optimizer}, which exchanges more at certain steps; use --optimizer adam": (
                lambda c: c.optimizer in ONEBIT_OPTIMIZERS
            ),
            "{?iterations_to_skip} has steps beyond {train_iters}; remove them": lambda c: (
                c.train_iters is not None and max(c.iterations_to_skip) > c.train_iters
            ),
            "{?on_non_finite} does not go with {dp_strategy}: the server expects a push in every step; use "
            "--on-non-finite stop": lambda c: c.strategy.weights == "stale",
            "{!loss_spike_window} has no effect with {loss_spike_threshold}; use --loss-spike-threshold 10 or remove it": (
                lambda c: c.loss_spike_threshold == 0
            ),
        }
    ),
)


def _profile(c: Settings) -> Findings:
    if not c.profile:
        return
    start, end, steps = c.profile_step_start, c.profile_step_end, c.train_iters
    if end <= start:
        yield f"{{profile_step_start}} and {{profile_step_end}} leave no step to profile; use --profile-step-end {start + 2}"
    if steps is not None and end > steps + 1:
        remedy = f"--profile-step-start {min(start, steps)} --profile-step-end {steps + 1}"
        yield (
            "{profile_step_end} is beyond the last step: train_iters is {=train_iters}; use "
            f"{remedy if steps > 1 else '--train-iters 12'}"
        )
    world = c.tp * c.pp * c.cp * (c.dp or 1)
    if missing := [rank for rank in c.profile_ranks if rank >= world]:
        yield f"profile_ranks has {missing[0]} in it, but ranks go from 0 to {world - 1}; use --profile-ranks 0"


VISIBILITY: tuple[Check, ...] = (
    *without({"!profile_step_start|profile_step_end|profile_ranks": "--profile"}),
    *owned("timing_log_level", {"straggler_threshold|log_phases": (1,)}),
    *owned("device", {"?record_memory_history": ("cuda", "auto")}),
    *rules(
        {
            "{?record_memory_history|trace} has no folder to write to; add --run-dir runs/mine": lambda c: (
                c.run_dir is None
            ),
            "{?profile} has no folder to write to; add --run-dir runs/mine": lambda c: profile_folder(c.run) is None,
            "metrics csv has no folder to write to; add --run-dir runs/mine": (
                lambda c: "csv" in c.metrics and c.run_dir is None
            ),
            "metrics prometheus has no folder to write to; add --run-dir runs/mine": (
                lambda c: "prometheus" in c.metrics and c.run_dir is None
            ),
            "{!wandb_entity|wandb_exp_name} has no effect without wandb_project; add --wandb-project NAME or remove it": (
                lambda c: "wandb" not in writers(c.run)
            ),
            "metrics wandb needs a project; add --wandb-project NAME": (
                lambda c: "wandb" in c.metrics and c.wandb_project is None
            ),
            "metrics wandb needs a name for the run; add --wandb-exp-name NAME or --run-dir runs/NAME": (
                lambda c: "wandb" in writers(c.run) and c.wandb_exp_name is None and c.run_dir is None
            ),
        }
    ),
    _profile,
)


def _elastic(c: Settings) -> Findings:
    """Check that an elastic run resumes from its own checkpoints and has numbers independent of the ranks."""
    if not c.elastic:
        return
    save = save_folder(c.run)
    # When the ranks have met, an address has already been downloaded to a path.
    resumes_elsewhere = (
        c.load is not None
        and hugging_face_folder(c.load) is None
        and PurePath(c.load) != PurePath(save or "")
        and is_address(c.load) == is_address(save or "")
    )
    if save is not None and resumes_elsewhere:
        yield f"elastic resumes from its own checkpoints, but the run has {{load}} and saves to {save}; use --load {save}"
    for name, works in (
        ("dp_strategy", tuple(name for name in STRATEGIES if STRATEGIES.facts(name).searched)),
        ("grad_compression", ("none",)),
        ("pipeline_compression", ("none",)),
        ("optimizer", tuple(name for name in OPTIMIZERS if name not in ONEBIT_OPTIMIZERS)),
    ):
        if getattr(c, name) not in works:
            why = "its numbers depend on the ranks"
            if name == "dp_strategy" and c.strategy.weights == "equal":
                why = "the planner, which chooses the layout, does not search it"
            yield f"elastic and {{{name}}} contradict: {why}; use {' or '.join(works)}"


_OF_ONE_LAYOUT = (
    "pipeline_schedule_file|pipeline_costs|pipeline_memory_limit|recompute_ahead|recompute_method|recompute_num_layers"
)
ELASTIC: tuple[Check, ...] = (
    *without({"!elastic_cluster": "--elastic"}),
    *rules(
        {
            "elastic needs global_batch_size: by default it depends on the ranks; add e.g. --global-batch-size 512": (
                lambda c: c.elastic and c.global_batch_size is None
            ),
            "elastic needs save_interval and load: it resumes from its last checkpoint; add --save-interval 100 --load FOLDER "
            "--fresh-if-missing": lambda c: c.elastic and (c.save_interval is None or c.load is None),
            "elastic and {?finetune|ckpt_step} contradict: each restart would start there again; remove one of them": (
                lambda c: c.elastic
            ),
            f"elastic and {{!{_OF_ONE_LAYOUT}}} contradict: this setting fits one layout only; remove one of them": lambda c: (
                c.elastic
            ),
            "elastic and {pipeline_schedule} contradict: auto fits one layout only; use --pipeline-schedule 1f1b": (
                lambda c: c.elastic and c.pipeline_schedule == "auto"
            ),
        }
    ),
    _elastic,
)
