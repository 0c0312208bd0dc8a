"""Side files of datasets that are made of others."""

from collections.abc import Sequence
from typing import Any

from megalite.config.errors import ConfigError
from megalite.data.tools.copying import Stretch, Written

_KEPT_IF_EQUAL = ("key", "keys", "append_eod")
_OF_ONE_JOB = ("bad_lines", "inputs")
_LISTED_INPUTS = 1000


def check_tokenizers(prefixes: Sequence[str], sides: Sequence[dict[str, Any] | None]) -> None:
    """Datasets whose side files name different tokenizers do not go together.

    Raises:
        ConfigError: names the first two that differ, and their tokenizers.
    """
    known: tuple[str, dict[str, Any]] | None = None
    for prefix, side in zip(prefixes, sides, strict=True):
        tokenizer = (side or {}).get("tokenizer")
        if not isinstance(tokenizer, dict):
            continue
        if known is None:
            known = prefix, tokenizer
        elif tokenizer != known[1]:
            raise ConfigError(
                f"{known[0]} was made with {_name(known[1])}, {prefix} with {_name(tokenizer)}: the same id means "
                "different text; preprocess one of them again with the other's tokenizer"
            )


def digests_of(side: dict[str, Any]) -> dict[str, str]:
    """The sha256 of .bin and .idx, as far as the side file has them."""
    files = side.get("files", {})
    return {suffix: files[suffix]["sha256"] for suffix in (".bin", ".idx") if suffix in files}


def vocab_size_of(sides: Sequence[dict[str, Any] | None]) -> int | None:
    """The vocabulary that all side files name; None if one names none or is missing: there is no new one then."""
    sizes = {_tokenizer(side).get("vocab_size") for side in sides}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if type(size) is int and size > 0 else None


def why_no_side_file(prefixes: Sequence[str], sides: Sequence[dict[str, Any] | None]) -> str | None:
    """Why datasets laid end to end have no side file, and what was not checked for want of one; None if they have."""
    if vocab_size_of(sides) is not None:
        return None
    prefix, side = next(
        (prefix, side) for prefix, side in zip(prefixes, sides, strict=True) if vocab_size_of([side]) is None
    )
    what = "has none" if side is None else "has one that names no vocab_size"
    return f"no side file: {prefix} {what}" + (
        "; that the tokenizers agree was not checked" if len(prefixes) > 1 else ""
    )


def side_of_merged(sides: Sequence[dict[str, Any]], written: Written) -> dict[str, Any]:
    """The side file of datasets laid end to end: as preprocessing all their inputs at once would give it."""
    facts = _counted(sides, written)
    for name in _KEPT_IF_EQUAL:
        if any(side.get(name) != sides[0].get(name) for side in sides):
            facts.pop(name, None)
    for name in _OF_ONE_JOB:
        values = [side.get(name) for side in sides]
        whole = [value for value in values if isinstance(value, dict)]
        if len(whole) == len(values):
            facts[name] = _add_up(whole)
        else:
            facts.pop(name, None)
    if "bad_lines" in facts:
        facts["bad_lines"] = dict(sorted(facts["bad_lines"].items()))
    if len(facts.get("inputs", {}).get("list", ())) > _LISTED_INPUTS:
        del facts["inputs"]["list"]
    return facts


def side_of_part(side: dict[str, Any], stretch: Stretch, written: Written) -> dict[str, Any]:
    """The side file of some documents of a dataset; nobody knows which inputs and bad lines were theirs."""
    facts = _counted([side], written)
    for name in _OF_ONE_JOB:
        facts.pop(name, None)
    facts["part_of"] = {
        "documents": side["documents"],
        "tokens": side["tokens"],
        "first_document": stretch.documents.start,
        "bin_sha256": side.get("files", {}).get(".bin", {}).get("sha256"),
    }
    return facts


def _counted(sides: Sequence[dict[str, Any]], written: Written) -> dict[str, Any]:
    """The first side file with the new dataset's own counts."""
    assert written.statistics is not None
    histogram = written.statistics.histogram(_texts(sides))
    facts = {name: value for name, value in sides[0].items() if name not in ("format", "part_of")}
    return facts | {
        "documents": written.documents,
        "tokens": written.tokens,
        "dtype": written.dtype.name,
        "files": written.files,
        "document_lengths": written.statistics.lengths(),
        "token_histogram": histogram,
    }


def _texts(sides: Sequence[dict[str, Any]]) -> Any:
    """From id to text, of the tokens that are common in any of the datasets; an unknown one is empty."""
    texts: dict[int, str] = {}
    for side in sides:
        histogram = side.get("token_histogram")
        common = histogram.get("most_common") if isinstance(histogram, dict) else None
        for entry in common if isinstance(common, list) else []:
            if (
                isinstance(entry, dict)
                and type(entry.get("id")) is int
                and isinstance(entry.get("text"), str)
            ):
                texts[entry["id"]] = entry["text"]
    return lambda token: texts.get(token, "")


def _add_up(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers summed and lists laid end to end, name by name; what is not known of all is left out."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for value in values for name in value):
        items = [value[name] for value in values if name in value]
        if all(type(item) is int for item in items):
            total[name] = sum(items)
        elif all(isinstance(item, list) for item in items) and len(items) == len(values):
            total[name] = [entry for item in items for entry in item]
    return total


def _tokenizer(side: dict[str, Any] | None) -> dict[str, Any]:
    tokenizer = (side or {}).get("tokenizer")
    return tokenizer if isinstance(tokenizer, dict) else {}


def _name(tokenizer: dict[str, Any]) -> str:
    name = str(tokenizer.get("kind", tokenizer.get("name", "a tokenizer")))
    return f"{name} {str(tokenizer['sha256'])[:12]}" if "sha256" in tokenizer else name
