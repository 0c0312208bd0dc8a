"""The flags of the commands that need torch. They are read before it is imported, so that help and a wrong flag come at once."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.config.errors import ConfigError
from megalite.config.reading import PRECISIONS
from megalite.conversion.formats import FORMATS, TRANSFORMER_IMPLEMENTATIONS

MAX_NEW_TOKENS, TEMPERATURE, BATCH_SIZE = 100, 0.8, 16
"""Of a generation."""
DEFAULT_SHARD = "5GB"

VERIFIED_BELOW = 200_000_000
"""Parameters of a model that is verified unless --no-verify says otherwise."""

DOCTOR_SECONDS = 5.0

_DOCTOR = """Look at versions, devices, kernels, network and disk, test matrix products and collectives for a few seconds, and say
what to mend. Under torchrun all ranks of the job test together, and hosts that differ, fail or are slow are named.
docs/doctor.md explains the findings. Exit status: 0 no error, 1 an error, 2 bad input."""

_FORMS = ("file", "line", "paragraph")


def add_model_flags(parser: argparse.ArgumentParser, *, tp_default: str) -> None:
    """--load and what goes with it; `tp_default` is what the help says of --tp."""
    parser.add_argument(
        "--load",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="checkpoints (the newest that verifies is used), one checkpoint, or a Hugging Face model",
    )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="use the checkpoint of this step instead")
    parser.add_argument("--tp", type=int, metavar="N", help=f"tensor parallel ranks ({tp_default})")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline parallel ranks (1)")
    for axis in ("cp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=PRECISIONS, help="to compute in; default: as stored")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="default: the model's own")
    parser.add_argument("--tiktoken-pattern", metavar="NAME", help="with --tokenizer-model: how its words are cut")


def generate_parser() -> Parser:
    """Of `megalite generate`."""
    parser = Parser(
        "megalite generate",
        "Continue prompts with a trained model. Under torchrun the ranks are tp x pp, by default one tp group.",
        examples=("megalite generate --load runs/first/checkpoints --prompt 'Once upon a time'",),
    )
    add_model_flags(parser, tp_default="all that --pp leaves")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    parser.add_argument(
        "--prompts", metavar="FILE", help="one a line, or a key of a line of JSON in a .jsonl; - is standard input"
    )
    parser.add_argument("--prompt-key", metavar="KEY", help="with --prompts FILE.jsonl (prompt)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=MAX_NEW_TOKENS,
        metavar="N",
        help=f"length of a continuation ({MAX_NEW_TOKENS})",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="T",
        help=f"0 takes the likeliest token ({TEMPERATURE})",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the fewest tokens that reach this probability"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="make tokens that were used less likely (1)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws (0)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
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


def evaluate_parser() -> Parser:
    """Of `megalite evaluate`."""
    parser = Parser(
        "megalite evaluate",
        "Loss, perplexity and bits per byte of a trained model. Under torchrun ranks beyond tp x pp share the work out.",
        examples=("megalite evaluate --load runs/first/checkpoints --input held-out.txt",),
    )
    add_model_flags(parser, tp_default="1")
    parser.add_argument("--data-path", nargs="+", metavar="PREFIX", help="token files (.bin and .idx)")
    parser.add_argument(
        "--input", nargs="+", metavar="PATH", help="text, jsonl or parquet: files, folders, globs; - is standard input"
    )
    parser.add_argument("--json-key", metavar="KEY", help="with --input: of the text (text)")
    parser.add_argument("--text-documents", choices=_FORMS, help="with --input: what a document is in a .txt (file)")
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens in a window; default: the model's")
    parser.add_argument("--stride", type=int, metavar="N", help="tokens between windows; default: they do not overlap")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="windows computed together (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def convert_parser() -> Parser:
    """Of `megalite convert`."""
    parser = Parser(
        "megalite convert",
        "Convert weights from and to megalite's checkpoints, Hugging Face folders and Megatron-LM's checkpoints. On the "
        "CPU, a tensor at a time; after an interruption the same command continues.",
        examples=(
            "megalite convert models/llama checkpoints --to native",
            "megalite convert runs/first/checkpoints out --to huggingface --dtype bf16",
        ),
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder to read")
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder to write; must not exist yet")
    parser.add_argument("--to", choices=FORMATS, required=True, help="format of TARGET")
    parser.add_argument(
        "--from", dest="source_format", choices=("auto", *FORMATS), default="auto", help="format of SOURCE (auto)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; default the newest")
    parser.add_argument("--dtype", choices=PRECISIONS, help="of every tensor; default: as stored")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"largest file, such as 2GB ({DEFAULT_SHARD}); not for megatron"
    )
    parser.add_argument("--family", metavar="NAME", help="huggingface: model type; default: the one that fits")
    parser.add_argument("--tp", type=int, metavar="N", help="megatron: tensor-parallel files (1)")
    parser.add_argument("--pp", type=int, metavar="N", help="megatron: pipeline-parallel files (1)")
    parser.add_argument(
        "--transformer-impl",
        choices=TRANSFORMER_IMPLEMENTATIONS,
        help=f"megatron: of the run that will load it, which decides some names ({TRANSFORMER_IMPLEMENTATIONS[0]})",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        help="native, megatron: multiple that the vocabulary is padded to; default: as in SOURCE",
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument("--tokenizer-model", type=Path, metavar="PATH", help="tokenizer to add: a file or folder")
    tokenizer.add_argument("--without-tokenizer", action="store_true", help="leave the tokenizer's files out")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help=f"compare weights and logits afterwards; default below {VERIFIED_BELOW // 10**6} million parameters",
    )
    return parser


def profile_parser() -> Parser:
    """Of `megalite profile`."""
    parser = Parser(
        "megalite profile",
        "Measure matrix products, attention, memory and small operations of this machine, and under torchrun what moves "
        "between its ranks, and write a cluster file: megalite plan --cluster FILE. docs/profile.md",
        examples=(
            "megalite profile --output my-cluster.yaml",
            "torchrun --nproc-per-node 4 -m megalite.cli.profile --output my-cluster.yaml",
        ),
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="cluster file to write (.yaml)")
    parser.add_argument(
        "--output-stack",
        type=Path,
        metavar="FILE",
        help="write a stack file too: what the host takes to start operations on this machine",
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="how long to measure (60)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        metavar="NAME",
        help=f"precisions to measure, of {', '.join(PRECISIONS)}; the first decides efficiencies (bf16 on a GPU, fp32 on a CPU)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument(
        "--like",
        metavar="CLUSTER",
        help="name or file of the cluster whose figures stand for what is not measured; default: the one with this "
        "accelerator, or cpu-box",
    )
    parser.add_argument("--name", help="of the cluster; default: that of the file")
    return parser


def doctor_parser() -> Parser:
    """Of `megalite doctor`."""
    parser = Parser(
        "megalite doctor",
        _DOCTOR,
        examples=(
            "megalite doctor --run-dir /scratch/runs",
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m megalite.cli.main doctor",
        ),
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder whose disk is tested; need not be there yet (default .)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device that is tested (default auto: cuda where there is one)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"that products and collectives take together (default {DOCTOR_SECONDS:g})",
    )
    parser.add_argument("--no-self-test", action="store_true", help="look only: no products, no collectives")
    parser.add_argument("--json", action="store_true", help="print JSON: every finding with its data")
    return parser


def kernels_parser() -> Parser:
    """Of `megalite kernels`."""
    parser = Parser(
        "megalite kernels",
        "Operations, their kernels of each backend, whether they can run here or why not, and which would serve a model "
        "of hidden size 4096.\nBy hand: --kernels OPERATION=BACKEND of a run. docs/kernels.md",
        examples=("megalite kernels --device cpu --json",),
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the device asked about (cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


_PARITY_USAGE = """usage: megalite parity [--preset NAME] [--config FILE ...] [--SETTING VALUE ...] [OPTIONS]
       megalite parity --fuzz SECONDS [--seed N] [--steps N]

Shrinks the model to laptop size, trains it on one rank and in the layout (gloo on this CPU, float64) and compares every
loss, gradient and weight. Takes the flags of megalite train, but for strategies, compression and optimizers that are
not meant to give the numbers of one rank. Exit status: 0 the same, 1 different, 2 bad input.

  --steps N          steps to train (default 3)
  --tolerance X      largest relative difference (default 1e-9 in fp64)
  --precision NAME   run both in it: fp64 (default), fp32, bf16 or fp16
  --world-size N     ranks of the layout (default tp·pp·cp·dp with dp at most 2, and at most 8)
  --no-eod-mask-loss all tokens count (default: uneven masks)
  --json             print the comparison as JSON
  --fuzz SECONDS     draw random layouts and models for so long; prints a line that repeats each failure
example: megalite parity --preset gpt2-124m --tp 2 --pp 2
docs/parity.md says how to read the table."""


PARITY_FLAGS = ("--steps", "--tolerance", "--fuzz")
"""Flags that are not of `megalite train`."""


@dataclass
class ParityOptions:
    """What the command line says beside the settings."""

    steps: int = 3
    tolerance: float | None = None
    fuzz: float | None = None
    rest: list[str] = field(default_factory=list)


def parity_options(arguments: Sequence[str]) -> ParityOptions:
    """Take our own options out of the command line."""
    if not arguments or {"--help", "-h"} & set(arguments):
        show(_PARITY_USAGE)
        raise SystemExit(0)
    options = ParityOptions()
    words = [part for argument in arguments for part in _parts(argument)]
    while words:
        word = words.pop(0)
        if word not in PARITY_FLAGS:
            options.rest.append(word)
            continue
        if not words or words[0].startswith("--"):
            raise ConfigError(f"{word} needs a value, e.g. {word} 3")
        value = words.pop(0)
        number = _number(word, value)
        if word == "--steps":
            if number < 1 or number != int(number):
                raise ConfigError(f"--steps takes a whole number of at least 1, such as 3, got {value}")
            options.steps = int(number)
        elif word == "--tolerance":
            options.tolerance = number
        else:
            options.fuzz = number
    return options


def _parts(argument: str) -> list[str]:
    """`--steps=3` as two words; other flags as they are."""
    name, equals, value = argument.partition("=")
    return [name, value] if equals and name in PARITY_FLAGS else [argument]


def _number(flag: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{flag} takes a number of at least 0, got {word}")
    return value


READERS: Mapping[str, Callable[[Sequence[str]], object]] = MappingProxyType(
    {
        "generate": lambda words: generate_parser().parse_args(words),
        "evaluate": lambda words: evaluate_parser().parse_args(words),
        "convert": lambda words: convert_parser().parse_args(words),
        "profile": lambda words: profile_parser().parse_args(words),
        "doctor": lambda words: doctor_parser().parse_args(words),
        "kernels": lambda words: kernels_parser().parse_args(words),
        "parity": parity_options,
    }
)
"""Command -> reads its words: shows the help and exits, or refuses what is no flag."""
