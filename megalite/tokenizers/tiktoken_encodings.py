"""Patterns and special tokens of encodings with well-known tiktoken files.

Sources: tiktoken's openai_public.py, Meta's Llama 3 tokenizer.py, Megatron-LM's tiktoken_tokenizer.py."""

from dataclasses import dataclass

_WORD_END = r"\s+(?!\S)|\s"
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|" + _WORD_END
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    + _WORD_END
)
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_MARKED = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_PATTERN = (
    rf"{_MARKED}{_UPPER}*{_LOWER}+{_CONTRACTION}|{_MARKED}{_UPPER}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}|{_O200K_REST}"
)
MEGATRON_V1_PATTERN = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
MEGATRON_V2_PATTERN = rf"{_MARKED}{_UPPER}*{_LOWER}+|{_MARKED}{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_REST}"


@dataclass(frozen=True)
class Encoding:
    pattern: str
    ranks: int  # number of ranks in its file
    special: tuple[tuple[str, int], ...]  # special tokens and their ids; the first one ends a document
    sha256: str  # of the published file


def _llama3_special() -> tuple[tuple[str, int], ...]:
    named = {128000: "<|begin_of_text|>", 128006: "<|start_header_id|>", 128007: "<|end_header_id|>"}
    named |= {128009: "<|eot_id|>"}
    spare = (i for i in range(256))
    rest = [
        (named[i] if i in named else f"<|reserved_special_token_{next(spare)}|>", i)
        for i in range(128000, 128256)
        if i != 128001
    ]
    return (("<|end_of_text|>", 128001), *rest)


_END = "<|endoftext|>"
ENCODINGS = {
    "r50k_base": Encoding(
        GPT2_PATTERN, 50256, ((_END, 50256),), "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    ),
    # Its ranks skip 50256, the id of <|endoftext|>.
    "p50k_base": Encoding(
        GPT2_PATTERN, 50280, ((_END, 50256),), "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
    ),
    "cl100k_base": Encoding(
        CL100K_PATTERN,
        100256,
        (
            *((_END, 100257), ("<|fim_prefix|>", 100258), ("<|fim_middle|>", 100259)),
            *(("<|fim_suffix|>", 100260), ("<|endofprompt|>", 100276)),
        ),
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
    "o200k_base": Encoding(
        O200K_PATTERN,
        199998,
        ((_END, 199999), ("<|endofprompt|>", 200018)),
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "llama3": Encoding(
        LLAMA3_PATTERN, 128000, _llama3_special(), "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
    ),
}
PATTERNS = {
    **{name: encoding.pattern for name, encoding in ENCODINGS.items()},
    "gpt2": GPT2_PATTERN,
    "v1": MEGATRON_V1_PATTERN,
    "v2": MEGATRON_V2_PATTERN,
}
"""Names for --tiktoken-pattern; v1 and v2 are Megatron-LM's."""


def megatron_special(count: int) -> tuple[tuple[str, int], ...]:
    """Return Megatron-LM's special tokens, which come before the ranks; the first, </s>, ends a document."""
    first = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
    names = [*first, *(f"<SPECIAL_{i}>" for i in range(len(first), count))]
    return (("</s>", 2), *((name, i) for i, name in enumerate(names) if i != 2))
