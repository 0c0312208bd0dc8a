"""`megalite generate`: text from a checkpoint of any layout or a Hugging Face folder, on any tp x pp."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from megalite.cli.failures import command
from megalite.cli.model_flags import Ranks, add_model_flags, open_model, run_on_ranks
from megalite.cli.parser import Parser
from megalite.config.errors import ConfigError
from megalite.conversion.inference import InferenceModel
from megalite.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megalite.generation.chain import Chain
from megalite.generation.continuation import Continuation
from megalite.generation.generate import BATCH_SIZE, generate_batch
from megalite.generation.prompts import read_prompts
from megalite.generation.sample import Sampling
from megalite.generation.text import GrowingText
from megalite.topology.topology import Topology

_DEFAULTS = Sampling()


def _parser() -> Parser:
    parser = Parser(
        "megalite generate",
        "Continue prompts with a trained model. Under torchrun the ranks are tp x pp, by default one tp group.",
        examples=("megalite generate --load runs/first/checkpoints --prompt 'Once upon a time'",),
    )
    add_model_flags(parser, tp_default="all that --pp leaves")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one a line, or a key of a line of JSON in a .jsonl; - is standard input",
    )
    parser.add_argument("--prompt-key", metavar="KEY", help="with --prompts FILE.jsonl (prompt)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=_DEFAULTS.max_new_tokens,
        metavar="N",
        help=f"length of a continuation ({_DEFAULTS.max_new_tokens})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=_DEFAULTS.temperature,
        metavar="T",
        help=f"0 takes the likeliest token ({_DEFAULTS.temperature})",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the fewest tokens that reach this probability"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="make tokens that were used less likely (1)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (0)")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=BATCH_SIZE,
        metavar="N",
        help=f"prompts that go through the model together ({BATCH_SIZE})",
    )
    parser.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        help="begin prompts as the tokenizer.json says; default: of Hugging Face models alone",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the texts as JSON lines, not to the terminal"
    )
    return parser


@command("megalite generate")
def main(argv: Sequence[str]) -> int:
    """Print the prompts and their continuations; returns the exit status."""
    return run_on_ranks(_parser(), argv, _check, _run, data_parallel=False)


def _check(flags: argparse.Namespace) -> None:
    """What the flags alone tell, on every rank alike."""
    _sampling(flags)
    if not flags.prompt and flags.prompts is None:
        raise ConfigError("there is no prompt; give one with --prompt, or a file of them with --prompts")
    if flags.prompt and flags.prompts is not None:
        raise ConfigError(f"--prompt and --prompts {flags.prompts} are given at once; use one of them")
    if flags.prompt_key is not None and flags.prompts is None:
        raise ConfigError(
            f"--prompt-key {flags.prompt_key} has no effect without --prompts FILE.jsonl; leave it out"
        )
    if flags.temperature == 0.0:
        for name in ("top_k", "top_p", "seed"):
            if getattr(flags, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(flags, name)} has no effect with --temperature 0, which takes "
                    "the likeliest token; leave it out, or use a temperature above 0"
                )
    if flags.batch_size < 1:
        raise ConfigError(f"--batch-size is {flags.batch_size}; it must be at least 1")
    if flags.stop and "" in flags.stop:
        raise ConfigError("--stop is empty; give the text to end before, or leave it out")


def _sampling(flags: argparse.Namespace) -> Sampling:
    return Sampling(
        max_new_tokens=flags.max_new_tokens,
        repetition_penalty=flags.repetition_penalty,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed or 0,
    )


def _run(ranks: Ranks) -> None:
    flags, topology = ranks
    texts: list[str] = []
    error: ConfigError | None = None
    if topology.rank == 0:
        try:
            texts = flags.prompt or read_prompts(flags.prompts, flags.prompt_key)
            _refuse_existing(flags.output)
        except ConfigError as found:
            error = found
    topology.world.agree(error, topology.device)
    texts = topology.world.broadcast_json(texts, topology.device)
    model = open_model(flags, topology)
    assert model.tokenizer is not None
    tokenizer, before = model.tokenizer, _beginning(model, flags.add_bos)
    prompts = [before + tokenizer.encode(text) for text in texts]

    def text_of(prompt: Sequence[int]) -> GrowingText:
        return GrowingText(tokenizer.decode, prompt, flags.stop or ())

    output = _open_output(flags.output, topology)
    made = generate_batch(
        Chain.of(model.stage, topology),
        prompts,
        _sampling(flags),
        end_ids=model.end_ids,
        batch_size=flags.batch_size,
        make_text=text_of if topology.rank == 0 or flags.stop else None,
    )
    if topology.rank:
        _exhaust(made)
    else:
        _show(made, texts, output)


def _exhaust(made: Iterator[Continuation]) -> None:
    """Do this rank's part; another one tells."""
    for _ in made:
        pass


def _show(made: Iterator[Continuation], prompts: Sequence[str], output: TextIO | None) -> None:
    shown, tokens, start = _Shown(prompts, output), 0, time.perf_counter()
    for continuation in made:
        tokens += continuation.finish != "eod"
        shown.take(continuation)
    seconds = time.perf_counter() - start
    if output is not None:
        output.close()
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s", file=sys.stderr)


def _beginning(model: InferenceModel, add_bos: bool | None) -> list[int]:
    """The tokens that every prompt begins with."""
    wanted = model.is_huggingface if add_bos is None else add_bos
    tokenizer = model.tokenizer
    found = tokenizer.beginning() if wanted and isinstance(tokenizer, HuggingFaceTokenizer) else []
    if add_bos and not found:
        raise ConfigError(
            f"--add-bos has no effect on {model.path}: its tokenizer has no tokens that a text begins with; leave it out"
        )
    return found


def _refuse_existing(output: Path | None) -> None:
    if output is None:
        return
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output {output} is there already; remove it, or give another")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} does not exist; make it first")


def _open_output(path: Path | None, topology: Topology) -> TextIO | None:
    """The file, on rank 0; no rank goes on if it cannot be written."""
    output, error = None, None
    if topology.rank == 0 and path is not None:
        try:
            output = path.open("x", encoding="utf-8")
        except OSError as found:
            error = ConfigError(f"--output {path}: {found.strerror}; give a file that can be written")
    topology.world.agree(error, topology.device)
    return output


class _Shown:
    """Texts on their way out, in the order of the prompts: one alone as it grows, several each when it is complete.

    Args:
        prompts: what goes before them.
        output: gets a line of JSON for each; None: they are printed.
    """

    def __init__(self, prompts: Sequence[str], output: TextIO | None) -> None:
        self._prompts, self._output = prompts, output
        self._streams = output is None and len(prompts) == 1
        self._ready: dict[int, Continuation] = {}
        self._next = 0
        if self._streams:
            print(prompts[0], end="", flush=True)

    def take(self, continuation: Continuation) -> None:
        """There is more of a text, or it has ended."""
        assert continuation.text is not None
        if self._streams:
            print(continuation.text.take(), end="" if continuation.finish is None else "\n", flush=True)
        if continuation.finish is not None:
            self._ready[continuation.index] = continuation
        while self._next in self._ready:
            done = self._ready.pop(self._next)
            if not self._streams:
                self._complete(done)
            self._next += 1

    def _complete(self, done: Continuation) -> None:
        assert done.text is not None
        prompt = self._prompts[done.index]
        if self._output is None:
            print(f"--- {done.index + 1} of {len(self._prompts)}\n{prompt}{done.text.text}", flush=True)
            return
        record = {
            "prompt": prompt,
            "text": done.text.text,
            "tokens": len(done.new),
            "finish": done.finish,
        }
        self._output.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._output.flush()


if __name__ == "__main__":
    sys.exit(main())
