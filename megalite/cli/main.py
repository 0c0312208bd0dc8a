"""`megalite COMMAND ...`: all commands."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

from megalite.cli import model_commands as model
from megalite.cli import tool_commands as tool
from megalite.cli.command import Command

_DATA = (model.PREPROCESS, model.TRAIN_TOKENIZER, model.DATA)
_MODELS = (model.GENERATE, model.EVALUATE, model.INSPECT, model.CONVERT)
_LAYOUTS = (
    tool.REHEARSE,
    tool.SCHEDULE,
    tool.PLAN,
    tool.PLAN_FIT,
    tool.PLAN_CHAIN,
    tool.PROFILE,
    tool.SWEEP,
    tool.PARITY,
)
_OTHERS = (tool.DOCTOR, tool.KERNELS, tool.PLOT, tool.RUNS, tool.COMPLETION)
COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        command.name.removeprefix("megalite "): command
        for command in (tool.TRAIN, tool.CONFIG, tool.PORT, *_DATA, *_MODELS, *_LAYOUTS, *_OTHERS)
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
