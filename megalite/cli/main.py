"""`megalite COMMAND ...`: finds the command's module and hands over."""

import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import megalite
from megalite.config.values import nearest

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": (
            "megalite.cli.train",
            "train a GPT, as pretrain_gpt.py does; --dry-run shows the layout first",
        ),
        "config": (
            "megalite.cli.config",
            "show a resolved config, the presets, or the table of all settings",
        ),
        "preprocess": ("megalite.cli.preprocess", "turn jsonl, parquet or text into token files"),
        "train-tokenizer": ("megalite.cli.train_tokenizer", "train a tokenizer on text"),
        "data": (
            "megalite.cli.data",
            "merge, split, inspect and verify token files; index them ahead of a run",
        ),
        "generate": ("megalite.cli.generate", "text from a checkpoint or a Hugging Face model"),
        "evaluate": ("megalite.cli.evaluate", "a model's loss and perplexity on token files or text"),
        "inspect": ("megalite.cli.inspect", "look into a checkpoint and verify it, or compare two"),
        "convert": (
            "megalite.cli.convert",
            "turn weights into Hugging Face's or Megatron-LM's format, or into ours",
        ),
        "schedule": ("megalite.cli.schedule", "draw, compare and check pipeline schedules"),
        "plan": (
            "megalite.cli.plan",
            "the fastest layouts of a model on a cluster, with their time, memory and launch lines",
        ),
        "plan-chain": (
            "megalite.cli.plan_chain",
            "cut and place a chain of unequal layers (DAPPLE's planner), beside PipeDream's",
        ),
        "profile": (
            "megalite.cli.profile",
            "measure this machine and write a cluster file for plan and sweep",
        ),
        "sweep": ("megalite.cli.sweep", "run many configurations for a few steps and compare them"),
        "parity": ("megalite.cli.parity", "check that a layout gives the numbers of one rank, on this CPU"),
        "kernels": (
            "megalite.cli.kernels",
            "operations, their kernels, what can run here or why not, and what would be chosen",
        ),
        "plot": ("megalite.cli.plot", "draw the loss curve of a run"),
        "runs": ("megalite.cli.runs", "list runs, how they stand, and compare their curves"),
    }
)
"""Command -> (module with `main(argv) -> int | None`, what it does). Imported only when called: most need no torch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 2 if there is no such command, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megalite {megalite.__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(
            f"error: unknown command {command}{nearest(command, COMMANDS)} (one of {known})", file=sys.stderr
        )
        return 2
    try:
        module = importlib.import_module(COMMANDS[command][0])
        return module.main(rest) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def usage() -> str:
    """The commands and what they do."""
    lines = ["usage: megalite COMMAND ...  (megalite COMMAND --help tells more)", ""]
    lines += [f"  {command:<16} {text}" for command, (_, text) in COMMANDS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
