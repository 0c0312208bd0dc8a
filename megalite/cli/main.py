"""`megalite COMMAND ...`: dispatch to all commands, and `megalite completion`: shell completion from their tables."""

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megalite.cli import model_commands as model
from megalite.cli import tool_commands as tool
from megalite.cli.command import Command
from megalite.cli.output import show
from megalite.config.describe import settings
from megalite.config.registry import imported

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

Words = Mapping[str, Sequence[str]]  # flag -> its choices, if any

_BASH = """\
_megalite() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" word words=""
  if [[ "${COMP_WORDS[0]}" == *pretrain_gpt.py ]]; then command=train; else
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do
      case "$command $word" in
        %(commands)s) command="${command:+$command }$word" ;;
        *) break ;;
      esac
    done
  fi
  case "$command $before" in
%(values)s
  esac
  if [[ -z "$words" ]]; then
    case "$command$([[ "$current" == -* ]] && echo " -")" in
%(flags)s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _megalite megalite pretrain_gpt.py
"""


def completion(flags: Namespace) -> int:
    """Print the completion script of a shell."""
    bash = _bash()
    show(f"autoload -U +X bashcompinit && bashcompinit\n{bash}" if flags.shell == "zsh" else bash)
    return 0


def commands(known: Mapping[str, Command] = COMMANDS) -> Iterator[Command]:
    """Yield all commands, each followed by its subcommands."""
    for command in known.values():
        yield command
        yield from commands(command.commands)


def words_of(command: Command) -> Words:
    """Return the flags of a command."""
    found: dict[str, Sequence[str]] = {}
    if command.settings is not None or not command.parses:
        found |= dict.fromkeys(imported("megalite.config.flags:RUN_OPTIONS"), ())
        found["--preset"] = imported("megalite.config.files:preset_names")()
        for setting in settings().values():
            negated = [setting.off] if setting.type is bool else []
            found |= dict.fromkeys([*setting.flags, *negated], setting.choices)
    found |= {word: tuple(flag.choices) for word, flag in command.spellings.items() if flag.help}
    return {"--help": ()} | found


def _path(command: Command) -> str:
    return command.name.removeprefix("megalite ")


def _bash() -> str:
    everything = list(commands())
    inner = [f'"{" ".join(_path(command).split()[:-1])} {_path(command).split()[-1]}"' for command in everything]
    values: dict[str, list[str]] = defaultdict(list)
    for command in everything:
        for flag, choices in words_of(command).items():
            if choices:
                values[" ".join(choices)].append(f'"{_path(command)} {flag}"')
    flags = [f'"") words="{" ".join(COMMANDS)}" ;;']
    for command in everything:
        if command.commands:
            flags.append(f'"{_path(command)}") words="{" ".join(command.commands)}" ;;')
        else:
            positional = " ".join(word for flag in command.flags if flag.is_positional for word in flag.choices)
            flags.append(f'"{_path(command)}") words="{positional}" ;;')
            flags.append(f'"{_path(command)} -") words="{" ".join(words_of(command))}" ;;')
    return _BASH % {
        "commands": " | ".join(inner),
        "values": "\n".join(f'    {" | ".join(names)}) words="{words}" ;;' for words, names in values.items()),
        "flags": "\n".join(f"      {line}" for line in flags),
    }


if __name__ == "__main__":
    sys.exit(main())
