"""Errors that the user can fix: one exception that carries every problem found, the collector of problems, and the exit
statuses of a run."""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

DONE = 0
FAILED = 1
BAD_INPUT = 2
NON_FINITE = 3
NOT_SAVED = 4
NO_PROGRESS = 5
HUNG = 44
"""Also the signal number (SIGRTMIN + 10 on Linux) that ends a hanging rank with this status."""
REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
INTERRUPTED = 130
"""As shells define it."""

MEANINGS: Mapping[int, str] = {
    DONE: "the run has reached its end, its `--exit-interval` or its exit file",
    FAILED: "an unexpected error, with a traceback: a bug, a lost peer, replicas that differ",
    BAD_INPUT: "bad input: one line `error: ...`",
    NON_FINITE: "loss, gradient or weights are NaN or infinite; the newest checkpoint is sound",
    NOT_SAVED: "a checkpoint, or the last folder of `--export-hf`, could not be written; earlier checkpoints are intact",
    NO_PROGRESS: "the same step has failed repeatedly: another start would fail too",
    HUNG: "no rank progressed for `--hang-timeout-minutes`: the watchdog reported the hanging rank and ended the run",
    REQUEUE: "stopped by a signal or a time limit: start the same command again",
    INTERRUPTED: "stopped by Ctrl-C; saved, unless it was pressed twice",
}
"""Status -> the condition for it."""

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 60, 60, 60
_MOST = 30  # problems that are shown
_OTHER_NAMES = {
    "clip_grad": "max_grad_norm max_norm gradient_clipping grad_clip",
    "cp": "context_parallel_degree cp_size",
    "data_path": "dataset dataset_name dataset_path train_file",
    "distributed_optimizer": "zero_1 zero_2 1 2",
    "dp_strategy": "zero zero_optimization fsdp fsdp2 deepspeed deepspeed_config sharding_strategy",
    "ep": "expert_parallel_degree ep_size",
    "ffn_hidden_size": "intermediate_size",
    "fully_sharded": "zero_3 3 fsdp2 full_shard",
    "global_batch_size": "gradient_accumulation_steps gradient_accumulation train_batch_size",
    "hidden_size": "n_embd d_model dim",
    "load": "model_name_or_path pretrained_model",
    "log_interval": "logging_steps log_freq",
    "lr": "learning_rate",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps num_warmup_steps",
    "micro_batch_size": "per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu",
    "moe_router_topk": "num_experts_per_tok",
    "num_attention_heads": "n_head n_heads",
    "num_experts": "num_local_experts n_routed_experts",
    "num_layers": "num_hidden_layers n_layer n_layers",
    "num_query_groups": "n_kv_heads",
    "pp": "pipeline_parallel_degree pp_size",
    "precision": "dtype mixed_precision torch_dtype",
    "preset": "model model_name_or_path flavor",
    "recompute_granularity": "gradient_checkpointing activation_checkpointing activation_checkpoint",
    "run_dir": "output_dir dump_folder",
    "save_interval": "save_steps checkpoint_interval",
    "seq_length": "seq_len block_size max_seq_len max_seq_length context_length",
    "tp": "tensor_parallel_degree tp_size",
    "train_iters": "max_steps steps training_steps num_train_steps max_iters",
}
"""Names here -> names in Hugging Face, DeepSpeed, nanoGPT and torchtitan."""


def shortened(value: object) -> str:
    """Format any value for a message: its repr, cut to one line."""
    text = _REPR.repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that `word` may mean: names that other frameworks use, else the most similar words."""
    known, theirs = list(known), key_of(word).rpartition(".")[2]  # torchtitan: training.steps
    if same := [ours for ours in known if theirs in _OTHER_NAMES.get(key_of(ours), "").split()]:
        return same
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, word, candidate).ratio() for candidate in close]
    return [candidate for candidate, ratio in zip(close, likeness) if ratio > likeness[0] - 0.1]


def key_of(flag: str) -> str:
    """Return a flag as a key of a file: num_layers for --num-layers."""
    return flag.removeprefix("--").replace("-", "_")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `: did you mean a or b?` for the known words closest to `word`, or an empty string."""
    named = closest(word, known)
    return f": did you mean {' or '.join(named)}?" if named else ""


class ConfigError(ValueError):
    """Bad input: a flag, a config key, a file, a layout that does not divide.

    Each problem names the setting, the conflicting values and a value that works. Command lines print them without a
    traceback and exit with status 2."""

    exit_code = BAD_INPUT  # exit status of a run that this error ends

    @property
    def problems(self) -> tuple[str, ...]:
        """The text of each problem."""
        return self.args

    def __str__(self) -> str:
        if len(self.problems) < 2:
            return "".join(self.problems)
        lines = [f"there are {len(self.problems)} problems:", *(f"- {text}" for text in self.problems[:_MOST])]
        more = [f"- and {len(self.problems) - _MOST} more"] if len(self.problems) > _MOST else []
        return "\n".join(lines + more)


class TakenError(ConfigError):
    """Another run is using the folder and records how it ends there, so this run records nothing."""


class RankError(ConfigError):
    """A ConfigError found on some ranks only: each reports it, since rank 0 may not have it."""

    def __init__(self, message: str, *, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # of the original error


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read; the message names the file and the fault."""


class Reported(Exception):
    """Raised when a rule reads a setting already known to be wrong: the rule then reports nothing."""


Findings: TypeAlias = "Iterator[str | Findings]"
"""Results of a rule: problems, and nested rules, each of which stops by itself if it reads a wrong setting."""


class Idle(str):
    """Result of a rule for a setting that has no effect and is ignored instead of refused. With a text it is reported;
    a preset's setting has none."""

    setting: str  # its name

    def __new__(cls, text: str, setting: str) -> "Idle":
        made = super().__new__(cls, text)
        made.setting = setting
        return made


class Problems:
    """Collects problems, and the settings known to be wrong, so that one error names all of them."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.wrong: set[str] = set()
        """Wrong settings; rules that read them are skipped."""
        self.idle: dict[str, str] = {}
        """Ignored setting -> the reason, if it is reported."""
        self.unused: set[str] = set()
        """All ignored settings."""

    def add(self, text: str, *wrong: str) -> None:
        """Record a problem, once, and the settings that it makes wrong."""
        self.found.setdefault(text)
        self.wrong.update(wrong)

    @contextmanager
    def collecting(self, wrong: Iterable[str] = ()) -> Iterator[None]:
        """Record a ConfigError of the block. It or Reported also marks the settings `wrong`, iterated only then."""
        try:
            yield
        except ConfigError as error:
            for text in error.problems:
                self.add(text)
            self.wrong.update(wrong)
        except Reported:
            self.wrong.update(wrong)

    def extend(self, findings: Findings, *wrong: str, render: Callable[[str], str] = str) -> None:
        """Record a rule's findings, worded by `render`; if there are any, mark the settings `wrong`."""
        before = len(self.found)
        try:  # the same as `collecting`, but faster: there are hundreds of rules
            for found in findings:
                if isinstance(found, Idle):
                    self.unused.add(found.setting)
                    if found:
                        self.idle[found.setting] = render(found)
                elif isinstance(found, str):
                    self.add(render(found))
                else:
                    self.extend(found, render=render)
        except (ConfigError, Reported) as error:
            for text in getattr(error, "problems", ()):
                self.add(text)
            self.wrong.update(wrong)
        if len(self.found) > before:
            self.wrong.update(wrong)

    def raise_all(self) -> None:
        """Raise ConfigError if anything was found."""
        if self.found:
            raise ConfigError(*self.found)


def plural(count: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


@contextmanager
def raise_at_end(problems: Problems | None) -> Iterator[Problems]:
    """Yield the caller's `problems` to add to; if None, yield new ones and raise them together at the end."""
    found = Problems() if problems is None else problems
    yield found
    if problems is None:
        found.raise_all()
