"""`megalite COMMAND ...`: finds the command's module and hands over."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import megalite
from megalite.cli.early_flags import READERS
from megalite.cli.failures import BAD_INPUT, DEBUG_FLAG, command, guarded
from megalite.cli.output import show, tell
from megalite.config.values import nearest

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("megalite.cli.train", "train a GPT, as pretrain_gpt.py does; --dry-run shows the layout first"),
        "config": ("megalite.cli.config", "show a resolved config, the presets, or the table of all settings"),
        "preprocess": ("megalite.cli.preprocess", "turn jsonl, parquet or text into token files"),
        "train-tokenizer": ("megalite.cli.train_tokenizer", "train a tokenizer on text"),
        "data": ("megalite.cli.data", "merge, split, inspect and verify token files; index them ahead of a run"),
        "generate": ("megalite.cli.generate", "text from a checkpoint or a Hugging Face model"),
        "evaluate": ("megalite.cli.evaluate", "a model's loss and perplexity on token files or text"),
        "inspect": ("megalite.cli.inspect", "look into a checkpoint and verify it, or compare two"),
        "convert": ("megalite.cli.convert", "turn weights into Hugging Face's or Megatron-LM's format, or into ours"),
        "schedule": ("megalite.cli.schedule", "draw, compare and check pipeline schedules"),
        "plan": (
            "megalite.cli.plan",
            "the fastest layouts of a model on a cluster, with their time, memory and launch lines",
        ),
        "plan-chain": (
            "megalite.cli.plan_chain",
            "cut and place a chain of unequal layers (DAPPLE's planner), beside PipeDream's",
        ),
        "profile": ("megalite.cli.profile", "measure this machine and write a cluster file for plan and sweep"),
        "sweep": ("megalite.cli.sweep", "run many configurations for a few steps and compare them"),
        "parity": ("megalite.cli.parity", "check that a layout gives the numbers of one rank, on this CPU"),
        "doctor": (
            "megalite.cli.doctor",
            "look at this machine: versions, devices, network, disk; test collectives and products; what to mend",
        ),
        "kernels": (
            "megalite.cli.kernels",
            "operations, their kernels, what can run here or why not, and what would be chosen",
        ),
        "plot": ("megalite.cli.plot", "draw the loss curve of a run"),
        "runs": ("megalite.cli.runs", "list runs, how they stand, and compare their curves"),
    }
)
"""Command -> (module with `main(argv) -> int | None`, what it does). Imported only when called: most need no torch."""


LASTING = frozenset({"train"})
"""Commands whose bugs keep their tracebacks: see `guarded`."""


@command("megalite", lasting=True)
def main(argv: Sequence[str]) -> int:
    """Run a command; returns its exit status: 2 if there is no such command, 130 after Ctrl-C."""
    arguments = list(argv)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        show(usage())
        return 0 if arguments else BAD_INPUT
    if arguments[0] == "--version":
        show(f"megalite {megalite.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        known = ", ".join(COMMANDS)
        tell(f"error: unknown {what} {name}{nearest(name, COMMANDS)} (one of {known})")
        return BAD_INPUT
    # Most commands guard themselves, for tools/ and `python -m`; here also their import is.
    with guarded(f"megalite {name}", rest, lasting=name in LASTING) as end:
        if name in READERS:
            READERS[name](end.words)
        end.status = importlib.import_module(COMMANDS[name][0]).main(end.words)
    return end.status or 0


def usage() -> str:
    """The commands and what they do."""
    lines = ["usage: megalite COMMAND ...  (megalite COMMAND --help tells more)", ""]
    lines += [f"  {name:<16} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", f"{DEBUG_FLAG} with any of them shows where an error came from; megalite --version the version"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
