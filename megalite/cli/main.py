"""`megalite COMMAND ...`: dispatch to all commands."""

import sys
from collections.abc import Mapping

from megalite.cli import model_commands as model
from megalite.cli import tool_commands as tool
from megalite.cli.command import Command

_ALL = (
    *(tool.TRAIN, tool.CONFIG, tool.PORT, model.PREPROCESS, model.TRAIN_TOKENIZER, model.DATA),
    *(model.GENERATE, model.EVALUATE, model.INSPECT, model.CONVERT),
    *(tool.REHEARSE, tool.SCHEDULE, tool.PLAN, tool.PLAN_FIT, tool.PLAN_CHAIN, tool.PROFILE, tool.SWEEP, tool.PARITY),
    *(tool.DOCTOR, tool.KERNELS, tool.RUNS, tool.COMPLETION),
)
COMMANDS: Mapping[str, Command] = {each.name.removeprefix("megalite "): each for each in _ALL}
"""Name -> command. Implementations are imported after parsing, so that help needs no torch."""

main = Command(
    "megalite",
    about="Train GPTs over many devices, and everything around it.",
    commands=COMMANDS,
    notes="megalite --version shows the version.",
    status_without_words=2,
    long_running=True,
)

if __name__ == "__main__":
    sys.exit(main())
