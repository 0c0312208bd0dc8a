"""`megalite COMMAND ...`: all commands."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

from megalite.cli import model_commands as model
from megalite.cli import tool_commands as tool
from megalite.cli.command import Command

_ALL = (
    *(tool.TRAIN, tool.CONFIG, tool.PORT, model.PREPROCESS, model.TRAIN_TOKENIZER, model.DATA),
    *(model.GENERATE, model.EVALUATE, model.INSPECT, model.CONVERT),
    *(tool.REHEARSE, tool.SCHEDULE, tool.PLAN, tool.PLAN_FIT, tool.PLAN_CHAIN, tool.PROFILE, tool.SWEEP, tool.PARITY),
    *(tool.DOCTOR, tool.KERNELS, tool.RUNS, tool.COMPLETION),
)
COMMANDS: Mapping[str, Command] = MappingProxyType({each.name.removeprefix("megalite "): each for each in _ALL})
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
