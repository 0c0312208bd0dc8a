"""`megalite COMMAND ...`: all commands."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

from megalite.cli import model_commands as model
from megalite.cli import tool_commands as tool
from megalite.cli.command import Command

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": tool.TRAIN,
        "config": tool.CONFIG,
        "preprocess": model.PREPROCESS,
        "train-tokenizer": model.TRAIN_TOKENIZER,
        "data": model.DATA,
        "generate": model.GENERATE,
        "evaluate": model.EVALUATE,
        "inspect": model.INSPECT,
        "convert": model.CONVERT,
        "schedule": tool.SCHEDULE,
        "plan": tool.PLAN,
        "plan-chain": tool.PLAN_CHAIN,
        "profile": tool.PROFILE,
        "sweep": tool.SWEEP,
        "parity": tool.PARITY,
        "doctor": tool.DOCTOR,
        "kernels": tool.KERNELS,
        "plot": tool.PLOT,
        "runs": tool.RUNS,
    }
)
"""What does the work is imported when the words have been read: help needs no torch."""

main = Command(
    "megalite",
    about="Train GPTs over many devices, and everything around it.",
    commands=COMMANDS,
    notes="megalite --version shows the version.",
    bare=2,
    lasting=True,
)

if __name__ == "__main__":
    sys.exit(main())
