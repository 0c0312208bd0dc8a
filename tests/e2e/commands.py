"""Commands in the documentation: find them, check them with the programs' own parsers, and run the cheap ones.

A command is a line `$ ...` in a ```console or ```bash block; a trailing backslash continues it. Commands without effect
(`megalite config ...`, and any with --dry-run, --help, --help-all or --version) are cheap."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.run import get_args_parser

from megalite.cli.main import COMMANDS
from megalite.config.flags import parse_arguments
from megalite.config.validate import require_startable, validate
from megalite.parity.shrink import shrink
from tests.e2e.programs import REPOSITORY

CHEAP_FLAGS = {"--dry-run", "--help", "--help-all", "--version"}
SHELL_WORDS = {"cd", "curl", "export", "git", "kill", "ls", "nvidia-smi", "pip", "source", "tensorboard"}
"""First words of commands of other projects, which are not checked."""

LAUNCHERS = {"bash", "sbatch", "kubectl", "sky", "torchx"}
"""Programs that start files of examples/multi_node, which has its own tests."""

WRAPPERS = {
    "tools/convert_checkpoint.py": "convert",
    "pretrain_gpt.py": "train",
    "tools/generate_text.py": "generate",
    "tools/preprocess_data.py": "preprocess",
}
"""Script -> the equivalent `megalite` command."""

_BLOCK = re.compile(r"^```(?:console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command in a document."""

    source: str
    line: str

    @property
    def words(self) -> list[str]:
        """Words of the command without variables before it and pipes after it."""
        words = shlex.split(self.line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&", ";", "&")]
        words = words[: ends[0]] if ends else words
        return [words[0].removeprefix(".venv/bin/").removeprefix("./"), *words[1:]]

    @property
    def is_cheap(self) -> bool:
        return self.words[:2] == ["megalite", "config"] or not CHEAP_FLAGS.isdisjoint(self.words)


def documents() -> list[Path]:
    folders = (REPOSITORY.glob("*.md"), REPOSITORY.glob("docs/**/*.md"), REPOSITORY.glob("examples/**/*.md"))
    return sorted(path for folder in folders for path in folder)


def commands_in(text: str, source: str) -> Iterator[Command]:
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield Command(source, line[2:].strip())


def all_commands() -> list[Command]:
    found: dict[str, Command] = {}
    for path in documents():
        source = str(path.relative_to(REPOSITORY))
        for command in commands_in(path.read_text(encoding="utf-8"), source):
            found.setdefault(command.line, command)
    return list(found.values())


def check(command: Command) -> None:
    """Check that the program exists and accepts every flag.

    Raises:
        AssertionError: it does not, or `check` does not know the program.
        ConfigError: training flags do not fit together on the number of ranks that the command starts."""
    program, *rest = command.words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), command
    elif program == "torchrun":
        launch = get_args_parser().parse_args(rest)
        module = launch.training_script.removeprefix("megalite.cli.") if launch.module else None
        command_name = module or WRAPPERS.get(launch.training_script)
        if command_name == "lm_eval":
            _check_harness(launch.training_script_args)
            return
        if command_name in ("profile", "generate", "evaluate"):
            _only_parse(command_name, launch.training_script_args)
            return
        if launch.module and launch.training_script == "megalite.cli.main":
            _check_megalite(launch.training_script_args[0], launch.training_script_args[1:])
            return
        assert launch.training_script == "pretrain_gpt.py", command
        hosts = int(launch.nnodes.split(":")[-1])  # "1:1" is the default
        _check_training(launch.training_script_args, hosts * int(launch.nproc_per_node))
    elif program == "megalite":
        _check_megalite(rest[0], rest[1:])
    elif program in ("python", "python3"):
        if rest[:2] == ["-m", "megalite.cli.lm_eval"]:
            _check_harness(rest[2:])
        _check_script(rest[0], rest[1:])
    elif program in LAUNCHERS:
        _check_launcher(rest)
    elif program.endswith(".py"):
        _check_script(program, rest)
    else:
        assert program in SHELL_WORDS, f"{command}: cannot check {program}"


def _check_harness(words: Sequence[str]) -> None:
    """Check a command of lm-evaluation-harness, which may not be installed: its flags, the arguments of megalite's model, and
    the folder of tasks."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.keys() <= {"--model", "--model_args", "--tasks", "--include_path", "--batch_size"}, words
    text = (REPOSITORY / "megalite" / "cli" / "lm_eval.py").read_text(encoding="utf-8")
    for argument in given["--model_args"].split(","):
        assert f" {argument.partition('=')[0]}: " in text, argument
    assert (REPOSITORY / given["--include_path"] / f"{given['--tasks']}.yaml").is_file(), words


def _check_launcher(words: Sequence[str]) -> None:
    """Check that the file exists and that the training flags are valid: on 16 ranks, or on two without --config."""
    at = next(index for index, word in enumerate(words) if word.startswith("examples/multi_node/"))
    path = REPOSITORY / words[at].partition(":")[0]
    assert path.is_file(), f"no {path}"
    flags = list(words[at + 1 :])
    if "--" in flags:
        flags = flags[flags.index("--") + 1 :]
    if flags:
        added = ("--run-dir", "runs/a", "--load", "runs/a/checkpoints", "--fresh-if-missing")  # by launch.sh
        _check_training([*flags, *added], ranks=16 if "--config" in flags else 2)


def _shape_in(load: str, step: int | None) -> dict[str, int] | None:
    """Shape of a Hugging Face folder, which an earlier command writes; None for other folders."""
    return {"vocab_size": 1024} if load.startswith("hf:") else None


def _check_training(flags: Sequence[str], ranks: int) -> None:
    if "--use-checkpoint-args" in flags:  # an earlier command writes config and checkpoint; its test runs both
        at = flags.index("--config")
        parse_arguments([flag for flag in (*flags[:at], *flags[at + 2 :]) if flag != "--use-checkpoint-args"])
        return
    invocation = parse_arguments(list(flags), shape=_shape_in)
    if invocation.dry_run or invocation.help or invocation.version:
        return
    require_startable(validate(invocation.config, ranks, invocation.explicit))


def _check_megalite(name: str, words: Sequence[str]) -> None:
    if name in CHEAP_FLAGS:
        return
    assert name in COMMANDS, f"no command {name}"
    if name == "train":
        _check_training(words, ranks=1)
    elif name == "parity":
        invocation = COMMANDS[name].parse(words).invocation
        shrink(invocation.config, world_size=invocation.world_size, explicit=invocation.explicit)
    else:
        _only_parse(name, words)


def _only_parse(name: str, words: Sequence[str]) -> None:
    command, words = COMMANDS[name], list(words)
    while words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if not CHEAP_FLAGS & set(words) - {"--dry-run"}:
        command.parse(words)


def _check_script(script: str, words: Sequence[str]) -> None:
    if script == "-m":
        return
    path = REPOSITORY / script
    assert path.is_file(), f"no {script}"
    if script in WRAPPERS:
        _check_megalite(WRAPPERS[script], words)
        return
    text = path.read_text(encoding="utf-8")
    unknown = [word for word in words if word.startswith("--") and f'"{word.split("=")[0]}"' not in text]
    assert unknown == [], f"{script} has no {' '.join(unknown)}"


def runnable(command: Command) -> list[str]:
    """Return the words of a cheap command of `megalite`.

    A config with a tokenizer made by an earlier command of the page gets the size of its vocabulary instead."""
    program, *words = command.words
    assert program == "megalite", command
    if "--dry-run" in words and words[0] == "train":
        config = parse_arguments(words[1:]).config
        tokenizer = config.data.tokenizer_model
        if config.model.vocab_size is None and tokenizer and not (REPOSITORY / tokenizer).exists():
            words += ["--vocab-size", "2048"]
    return words
