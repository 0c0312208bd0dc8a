"""Further sinks, by `--metrics`: a CSV file and Weights & Biases. Rank 0 alone has any."""

import csv
import io
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import replace_durably
from megalite.config.describe import redact_text, redacted, sectioned
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.training.sinks import TENSORBOARD_TAGS, AppendedFile

COLUMNS = (
    *("kind", "step", "consumed_samples", "loss", "valid_loss", "test_loss", "valid_perplexity", "test_perplexity"),
    *("load_balancing_loss", "z_loss", "lr", "grad_norm", "loss_scale", "skipped", "batch_size"),
    *("ms_per_step", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank", "mfu"),
    *("memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "memory_bytes_max"),
    *("data_wait_ms", "forward_ms", "forward_ms_min", "backward_ms", "backward_ms_min", "reduce_ms", "reduce_ms_min"),
    *("optimizer_ms", "optimizer_ms_min", "other_ms", "other_ms_min", "evaluation_seconds", "save_seconds"),
    *("bubble_fraction", "straggler_factor", "goodput", "dp_phase", "dp_wire_bytes"),
)
"""The names of records that get a column; what a row has not stays empty."""

_WANDB_ID = "wandb-run-id"


class CSVFile:
    """`metrics.csv`: a row a record under one header. Of a run that resumes, the rows of steps that it makes again are
    dropped, as in metrics.jsonl.

    Args:
        step: the run stands here.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = []
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                # What a machine that dies leaves may be cut off, or hold bytes of anything.
                lines = (line.replace("\0", "") for line in file)
                kept = [row for row in csv.DictReader(lines, restkey="more") if _is_kept(row, step)]
        head = dict(zip(COLUMNS, COLUMNS, strict=True))
        replace_durably(path, _rows([head, *kept]))
        self._file = AppendedFile(path, head=_rows([head]))

    def write(self, record: dict[str, Any]) -> None:
        """Append a row.

        Raises:
            OSError: it cannot be written.
        """
        self._file.append(_rows([record]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rows(records: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore").writerows(records)
    return text.getvalue().encode()


def _is_kept(row: dict[str, Any], step: int) -> bool:
    """A whole row of a step that is not made again."""
    number = row.get("step") or ""
    return "more" not in row and None not in row.values() and number.isdecimal() and int(number) <= step


class Wandb:
    """Weights & Biases, under TensorBoard's tags; the x axis is `step`, so a step that is made again overwrites none.

    A run that resumes goes on with its curves: their id is in `<run_dir>/wandb-run-id`. What identifies the user comes
    from WANDB_API_KEY or `wandb login`, which this never reads; nothing of the environment, the command line, the
    console or git is sent, and the config goes without credentials.

    Raises:
        ConfigError: the package is not installed, or will not start.
    """

    def __init__(self, config: RunConfig, *, resumes: bool) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "metrics has wandb in it but the wandb package is not installed; pip install wandb, or leave wandb out"
            ) from None
        logging = config.logging
        folder = None if logging.run_dir is None else Path(logging.run_dir)
        name = logging.wandb_exp_name or (folder.name if folder is not None else "")
        try:
            self._run = wandb.init(
                project=logging.wandb_project,
                entity=logging.wandb_entity,
                name=redact_text(name),
                id=_run_id(folder, resumes),
                resume="allow",
                dir=None if folder is None else str(folder),
                config=redacted(sectioned(config)),
                save_code=False,
                settings={"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True},
            )
        except OSError:
            raise
        except Exception as error:
            raise ConfigError(
                f"wandb does not start: {redact_text(' '.join(str(error).split()))}; run `wandb login`, set "
                "WANDB_MODE=offline, or leave wandb out of --metrics"
            ) from None
        self._run.define_metric("*", step_metric="step")

    def write(self, record: dict[str, Any]) -> None:
        """Send the numbers that have a tag; NaN and infinities among them.

        Raises:
            OSError: wandb does not take them.
        """
        row = {
            tag: record[name] / 1e3 if name == "ms_per_step" or name.endswith("_ms") else record[name]
            for name, tag in TENSORBOARD_TAGS.items()
            if record.get(name) is not None
        }
        with _wandb_errors():
            self._run.log({**row, "step": record["step"], "consumed_samples": record["consumed_samples"]})

    def close(self) -> None:
        """Wait until everything is sent.

        Raises:
            OSError: it is not.
        """
        with _wandb_errors():
            self._run.finish()


@contextmanager
def _wandb_errors() -> Iterator[None]:
    """What wandb raises, of whatever type, is its service or the way there: an OSError, as of a file."""
    try:
        yield
    except Exception as error:
        raise OSError(redact_text(" ".join(str(error).split()))) from error


def _run_id(folder: Path | None, resumes: bool) -> str:
    """That of the run in the folder if it goes on; else a new one."""
    new = uuid.uuid4().hex[:12]
    if folder is None:
        return new
    path = folder / _WANDB_ID
    if resumes and path.exists() and (known := path.read_text().strip()).isalnum():
        return known
    path.write_text(f"{new}\n")
    return new
