"""What the side file of a preprocessed dataset says."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.data.inputs.find import Input
from megalite.data.preprocess.job import PreprocessJob, Progress
from megalite.data.preprocess.output import Output
from megalite.data.tokenizers.base import Tokenizer

_LISTED_INPUTS = 1000


def side_facts(
    job: PreprocessJob,
    output: Output,
    *,
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    progress: Progress,
    files: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Facts for `megalite.data.side_file`, which says what each means; `files` are those of the output."""
    counts = output.counts
    return {
        "documents": counts.documents,
        "tokens": counts.tokens,
        "dtype": counts.dtype.name,
        "key": job.json_keys[output.files.number],
        "keys": list(job.json_keys),
        "append_eod": job.append_eod,
        "bad_lines": dict(sorted(progress.bad.items())),
        "tokenizer": {
            "kind": tokenizer.name,
            "sha256": tokenizer.fingerprint(),
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        },
        "files": dict(files),
        "inputs": _inputs(inputs),
        "document_lengths": output.statistics.lengths(),
        "token_histogram": output.statistics.histogram(lambda i: tokenizer.decode([i])),
    }


def _inputs(inputs: Sequence[Input]) -> dict[str, Any]:
    """Names from the folder that all share, since the machine's paths say nothing elsewhere."""
    paths = [os.path.abspath(item.path) for item in inputs if item.size is not None]  # noqa: PTH100 keeps links
    shared = os.path.commonpath([Path(path).parent for path in paths]) if paths else ""
    listed = [
        {"name": item.path}
        if item.size is None
        else {"name": os.path.relpath(os.path.abspath(item.path), shared), "bytes": item.size}  # noqa: PTH100
        for item in inputs[:_LISTED_INPUTS]
    ]
    facts: dict[str, Any] = {"files": len(inputs), "bytes": sum(item.size or 0 for item in inputs)}
    return facts | ({"list": listed} if len(inputs) <= _LISTED_INPUTS else {})
