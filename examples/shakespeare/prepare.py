"""A text as training data by character: a tokenizer of its characters, and token files of its first 90 % and the rest.

python examples/shakespeare/prepare.py --input input.txt
"""

import argparse
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from megalite.cli.model_commands import PREPROCESS

END_OF_DOCUMENT = "<|endoftext|>"


def character_tokenizer(text: str, path: Path) -> int:
    """Write a tokenizer.json with an id for each character of the text; their number, with the end of document."""
    vocabulary = {character: index for index, character in enumerate([*sorted(set(text)), END_OF_DOCUMENT])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_DOCUMENT))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT)])
    tokenizer.save(str(path))
    return len(vocabulary)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="any text in UTF-8")
    parser.add_argument("--output", type=Path, default=Path("runs/shakespeare/data"), help="folder to write")
    flags = parser.parse_args(argv)
    text = flags.input.read_text(encoding="utf-8")
    flags.output.mkdir(parents=True, exist_ok=True)
    tokenizer = flags.output / "tokenizer.json"
    print(f"{len(text):,} characters, {character_tokenizer(text, tokenizer)} ids")
    cut = len(text) * 9 // 10
    for name, part in (("train", text[:cut]), ("valid", text[cut:])):
        file = flags.output / f"{name}.txt"
        file.write_bytes(part.encode("utf-8"))
        words = ["--input", file, "--output-prefix", flags.output / name, "--tokenizer-model", tokenizer, "--restart"]
        status = PREPROCESS([str(word) for word in words])
        if status:
            return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
