"""What `megalite data` finds, as text."""

from collections.abc import Sequence
from typing import Any

from megalite.cli.display import decimal_bytes
from megalite.preprocess.copying import Written
from megalite.preprocess.verify import Verified

_BAR = 30
_COMMON = 5


def format_verified(result: Verified) -> str:
    """A dataset in a line: sound, with what was compared and what was not, or damaged, with the first fault."""
    if result.fault is not None:
        return f"{result.prefix}: damaged: {result.fault.text}"
    counts = f"{result.documents:,} documents, {result.tokens:,} {result.dtype} tokens, {decimal_bytes(result.bytes)}"
    if result.largest_id is None:
        ids = "no ids"
    elif result.vocab_size is None:
        ids = f"ids up to {result.largest_id} (compared with nothing: give --vocab-size)"
    else:
        ids = f"ids up to {result.largest_id}, vocab_size {result.vocab_size}"
    parts = [counts, ids]
    if result.eod is not None:
        parts.append(f"every document ends with {result.eod}")
    if result.hashed:
        parts.append("sha256 as in the side file")
    else:
        unknown = result.bad_side_file or not result.has_side_file
        parts.append("sha256 not compared" + (": no side file" if unknown else ""))
    return f"{result.prefix}: sound: {'; '.join(parts)}"


def format_written(written: Written) -> str:
    files = ".bin, .idx and .json" if written.files else ".bin and .idx"
    return f"{written.prefix}{files}: {written.documents:,} documents, {written.tokens:,} {written.dtype.name} tokens"


def format_facts(facts: dict[str, Any]) -> str:
    """The dict of `tools.inspect.inspect` in lines."""
    lengths, files = facts["document_lengths"], facts["bytes"]
    notes = [f"{facts['empty_documents']:,} without tokens"] if facts["empty_documents"] else []
    if facts["sequences"] != facts["documents"]:
        notes.append(f"{facts['sequences']:,} sequences")
    rows = [
        ("tokens", f"{facts['tokens']:,} of type {facts['dtype']}"),
        ("documents", f"{facts['documents']:,}" + (f" ({', '.join(notes)})" if notes else "")),
        ("files", f".bin {decimal_bytes(files['.bin'])}, .idx {decimal_bytes(files['.idx'])}"),
        ("lengths", f"{lengths['min']:,} to {lengths['max']:,} tokens, mean {lengths['mean']:,.1f}"),
    ]
    side = facts["side_file"]
    side_rows = [("side file", "none")] if side is None else _side_file(side)
    lines = [facts["prefix"], *_rows(rows), *_histogram(lengths["buckets"]), *_rows(side_rows)]
    return "\n".join(lines)


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name:<10} {value}" for name, value in rows]


def format_document(document: dict[str, Any]) -> str:
    more = document["length"] - len(document["tokens"])
    sequences = f", {document['sequences']} sequences" if document["sequences"] != 1 else ""
    ids = " ".join(map(str, document["tokens"])) + (f" ... {more:,} more" if more else "")
    lines = [f"  document {document['number']}: {document['length']:,} tokens{sequences}", f"    {ids}".rstrip()]
    if "text" in document:
        lines += [f"    | {line}" for line in document["text"].splitlines()]
    return "\n".join(lines)


def _histogram(buckets: dict[str, int]) -> list[str]:
    """Documents by length, with bars; a bucket goes up to twice its start."""
    if not buckets:
        return []
    most = max(buckets.values())
    lines = []
    for start, count in buckets.items():
        low = int(start)
        label = f"{low:,}" if low < 2 else f"{low:,} to {2 * low - 1:,}"
        lines.append(f"    {label:>26} {count:>14,} {'#' * max(1, round(_BAR * count / most))}")
    return lines


def _side_file(side: dict[str, Any]) -> list[tuple[str, str]]:
    """What it says beyond what the files themselves do; whatever is not there is left out."""
    rows = []
    tokenizer = side.get("tokenizer")
    if isinstance(tokenizer, dict):
        words = [f"{name} {_short(value)}" for name, value in tokenizer.items()]
        rows.append(("tokenizer", ", ".join(words)))
    if isinstance(side.get("append_eod"), bool):
        rows.append(("eod", "at the end of each document" if side["append_eod"] else "not appended"))
    for name in ("key", "bad_lines", "inputs", "part_of"):
        if name in side:
            rows.append((name, _plain(side[name])))
    histogram = side.get("token_histogram")
    if isinstance(histogram, dict):
        common = histogram.get("most_common")
        if isinstance(common, list):
            words = [f"{entry.get('id')} {entry.get('text')!r}" for entry in common if isinstance(entry, dict)]
            rows.append(("common", ", ".join(words[:_COMMON])))
        rows.append(("ids", _plain({name: value for name, value in histogram.items() if name != "most_common"})))
    return rows


def _plain(value: Any) -> str:
    """A value of the side file in a line; lists in it are not shown."""
    if not isinstance(value, dict):
        return _short(value)
    words = [f"{name} {_short(entry)}" for name, entry in value.items() if not isinstance(entry, list)]
    return ", ".join(words) or "none"


def _short(value: Any) -> str:
    """A sha256 to 12 digits, numbers with commas."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text[:80]
