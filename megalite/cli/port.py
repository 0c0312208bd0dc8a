"""`megalite port`: translate a launch script or YAML of Megatron-LM to a command line and a config of megalite."""

import dataclasses
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.cli.output import show
from megalite.cli.shell import OUTPUT, WORD, Shell, is_unknown, quoted
from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError, Problems
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.megatron_flags import ALREADY_SO, DIFFERS, NO_EFFECT_HERE, Note
from megalite.config.reading import as_yaml, load_mapping, read_input, write_text
from megalite.config.run import RunConfig, least_ranks
from megalite.config.validate import validate

_SCRIPT = re.compile(r"(?:pretrain|train|finetune)\w*\.py")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "ft_launcher", "deepspeed")
_STARTERS = ("srun", "sbatch", "salloc", "mpirun", "mpiexec")
_YAML_KEY = "MODEL_ARGS"
_SLURM = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "nodes")
_SLURM |= {"SLURM_NTASKS": "ntasks", "SLURM_NTASKS_PER_NODE": "ntasks-per-node"}
_SLURM |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), "gpus-per-node")
"""Environment variable of a job -> the option of sbatch that sets it."""

MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "lr_decay_style": "linear",
    "lr_schedule_offset": "megatron",
    "data_order": "megatron",
    "log_interval": 100,
    "eval_iters": 100,
    "fresh_if_missing": True,
    "initial_loss_scale": 2.0**32,
}
"""Setting -> Megatron-LM's default, if it differs from ours and affects the result. The config states these."""


@dataclass
class Launch:
    """A training run that a script starts."""

    words: list[str]  # flags of the training program
    ranks: int | None = None  # None if neither the launcher nor the scheduler gives it
    per_node: int = 8  # maximum ranks per node
    launcher: list[str] = field(default_factory=list)  # `torchrun` with its flags; empty for other launchers
    source: str = ""  # the script or the YAML section
    remarks: tuple[str, ...] = ()  # differences found while reading the file
    decided_by: Mapping[str, str] = field(default_factory=dict)
    """`Shell.skipped`: variable -> the unknown word by which the script chooses its value."""


@dataclass
class Ported:
    """A launch, translated to megalite."""

    launch: Launch
    invocation: Invocation  # the flags that megalite supports
    problems: list[str]  # all reasons why megalite cannot run it
    defaults: dict[str, Any]  # settings that the script leaves at Megatron-LM's defaults

    @property
    def config(self) -> RunConfig:
        return replace(self.invocation.config, **self.defaults)

    @property
    def values(self) -> dict[str, Any]:
        """Setting -> value, for each setting of the script and of `defaults`."""
        values = values_of(self.config)
        named = [name for name, source in self.invocation.provenance.items() if source != "default"]
        return {name: values[name] for name in settings() if name in named or name in self.defaults}


def run(flags: Namespace) -> int:
    overrides = {}
    for pair in flags.set or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE such as DATA_PATH=/data/text, got {pair}")
        overrides[name] = value
    launches = read_launches(flags.script, overrides)
    ported = [port(launch, world_size=flags.world_size) for launch in launches]
    if flags.output is not None:
        if len(ported) > 1:
            raise ConfigError(f"{flags.script} starts {len(ported)} runs; --output is for one")
        write_text(flags.output, config_text(ported[0]))
    show("\n\n".join(as_text(each, flags.output) for each in ported))
    problems = [problem for each in ported for problem in each.problems]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return 0


# ---- reading


def read_launches(path: Path, overrides: Mapping[str, str]) -> list[Launch]:
    """Return the training runs that a bash script starts or a YAML file describes. `overrides`: variable -> value. Raises
    ConfigError if there is none or the file is neither."""
    text, is_yaml = read_input(path, "script"), path.suffix in (".yaml", ".yml")
    found = _from_yaml(text, path, overrides) if is_yaml else _from_script(text, path, overrides)
    if not found:
        what = f"{_YAML_KEY} of flags" if is_yaml else "command that runs pretrain_gpt.py"
        raise ConfigError(f"{path} has no {what}")
    return found


def _from_script(text: str, path: Path, overrides: Mapping[str, str]) -> list[Launch]:
    found: list[Launch] = []
    scheduled: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE):
        _note_ranks(["sbatch", *line.split()], scheduled)
    slurm = {name: scheduled[option] for name, option in _SLURM.items() if option in scheduled}
    nested: set[Path] = set()

    def command(shell: Shell, words: list[str]) -> None:
        at = next((i for i, word in enumerate(words) if _SCRIPT.fullmatch(Path(word).name)), None)
        _note_ranks(words, scheduled)
        string = next((words[i + 1] for i in range(len(words) - 1) if words[i] in ("-c", "-lc", "-xc") and i), "")
        other = next((path.parent / Path(word).name for word in words if word.endswith(".sh")), None)
        if _SCRIPT.search(" ".join(shell.expand(quoted(string)))):
            shell.run(string, str(path))
        elif words[0] == "eval":
            shell.run(" ".join(words[1:]), str(path))
        elif at is not None and words[0] not in ("echo", "ls", "cat", "printf", "cp", "test"):
            found.append(_launch(words[:at], words[at + 1 :], scheduled, str(path)))
            found[-1].decided_by = shell.skipped
        elif other is not None and other.is_file() and other not in nested and words[0] not in ("echo", "chmod"):
            nested.add(other)
            shell.run(read_input(other, "script"), str(other))

    Shell(command, {**slurm, **overrides}).run(text, str(path))
    return found


def _note_ranks(words: list[str], scheduled: dict[str, str]) -> None:
    """Store the options of Slurm and MPI that set the numbers of nodes and tasks."""
    named = {"N": "nodes", "n": "ntasks", "np": "ntasks"}
    named |= {name: name for name in ("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "gres")}
    if words[0] in _STARTERS:
        scheduled |= {named[name]: value for name, value in _options(words) if name in named}


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each option; the value is the text after `=` or the next word."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            yield name, value if equals else following


def _launch(before: list[str], words: list[str], scheduled: Mapping[str, str], source: str) -> Launch:
    """Build a Launch from the words before and after the training program."""
    start = next((i for i, word in enumerate(before) if word in _LAUNCHERS), None)
    launcher: list[str] = []
    if start is not None:
        flags = (re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in before[start + 1 :])
        launcher = ["torchrun", *(word for word in flags if word != "--no-python")]
        numbers = dict(_options(launcher))
        nodes, each = numbers.get("nnodes", "1"), numbers.get("nproc-per-node", "1")
        if before[start] == "deepspeed":
            launcher, nodes, each = [], numbers.get("num-nodes", "1"), numbers.get("num-gpus", "")
    else:
        gpus = re.search(r"(\d+)$", scheduled.get("gres", ""))
        nodes = scheduled.get("nodes", "1")
        each = scheduled.get("ntasks-per-node") or (gpus[1] if gpus else "")
        if scheduled.get("ntasks", "").isdecimal():
            nodes, each = "1", scheduled["ntasks"]
    is_known = nodes.isdecimal() and each.isdecimal()
    # Remove inner quotes, which bash keeps. A word that contains several flags is split, as the inner script would.
    words = [word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word for word in words]
    words = [part for word in words for part in (WORD.findall(word) if re.match(r"\s*--[\w-]+\s", word) else [word])]
    if not is_known:
        return Launch(words, launcher=launcher, source=source)
    return Launch(words, int(nodes) * int(each), int(each) if int(nodes) > 1 else 8, launcher, source)


def _from_yaml(text: str, path: Path, overrides: Mapping[str, str]) -> list[Launch]:
    """Read `MODEL_ARGS` of Megatron-LM's functional tests; `MODEL_ARGS_2` describes a second run."""
    repeated = Problems()
    tree = load_mapping(text, str(path), f"{_YAML_KEY}: {{--num-layers: 12}}", repeated)
    remarks = tuple(text.replace("keep one of them", "the last one counts") for text in repeated.found)
    shell = Shell(lambda shell, words: None, overrides)
    found = []
    for key, section in tree.items():
        if isinstance(key, str) and re.fullmatch(rf"{_YAML_KEY}(_\d+)?", key) and isinstance(section, dict):
            words = [word for flag, value in section.items() for word in _words(str(flag), value, shell)]
            found.append(Launch(words, source=f"{path}, {key}", remarks=remarks))
    return found


def _words(flag: str, value: Any, shell: Shell) -> Iterator[str]:
    if value is False or value is None:
        return
    yield flag if flag.startswith("--") else f"--{flag}"
    if value is True or str(value).strip() == "true":
        return
    for each in value if isinstance(value, list) else [value]:
        text = str(each).strip()
        # These files also write a list as text in brackets.
        inner = re.fullmatch(r"\[([^\]]+)\]", text) if not re.search(r"[*+]", text) else None
        is_several = re.fullmatch(r"\d+( \d+)+", text)  # bash splits them
        for word in inner[1].replace(",", " ").split() if inner else text.split() if is_several else [text]:
            yield "".join(shell.expand(quoted(word)))


# ---- porting


def port(launch: Launch, *, world_size: int | None = None) -> Ported:
    """Translate a launch. Problems are returned, not raised."""
    problems = Problems()
    words, dropped = _without_effect(launch.words)
    unknown = [word for word in words if is_unknown(word) and not word.startswith("--")]
    invocation = parse_arguments([*words, "--dry-run"], problems=problems)
    invocation = dataclasses.replace(invocation, notes=(*invocation.notes, *dropped))
    config = invocation.config
    named = {name for name, source in invocation.provenance.items() if source != "default"}
    defaults = {
        name: value
        for name, value in MEGATRON_DEFAULTS.items()
        if name not in named and name not in problems.wrong and _has_effect(name, config, named)
    }
    if config.model.num_experts and config.model.moe_aux_loss_coeff and not _sets_balancing(invocation):
        defaults["moe_aux_loss_sequences"] = config.training.micro_batch_size  # as load balancing type aux_loss
    least = least_ranks(config)
    ranks = world_size or launch.ranks or least
    if not problems.found:
        whole, explicit = replace(config, **defaults), invocation.explicit | set(defaults)
        validate(whole, ranks, explicit, problems=problems)
        if problems.found and world_size is None and ranks < least:
            # The number of nodes is usually given when the script is started.
            problems = Problems()
            validate(whole, least, explicit, problems=problems)
    launch.ranks = world_size or launch.ranks
    hints = [
        f"{word} has no value; " + _remedy(word, launch)
        for word in unknown
        if any(word in text and "refused" not in text for text in problems.found)
    ]
    return Ported(launch, invocation, [*problems.found, *dict.fromkeys(hints)], defaults)


def _remedy(word: str, launch: Launch) -> str:
    if re.search(r"`|\$\((?!\()", word):
        return "replace it in the script by its output"
    name = word.strip("${}")
    decides = launch.decided_by.get(name, "").strip("${}")
    by = f"--set {decides}=VALUE, by which the script chooses it, or " if decides not in ("", "@", name) else ""
    return f"give it by {by}--set NAME=VALUE"


def _without_effect(words: list[str]) -> tuple[list[str], list[Note]]:
    """Return the words without flags that have no effect in a script, and a note for each such flag."""
    kept: list[str] = []
    notes, flag = [], ""
    without = dict.fromkeys(("--rank", "--world-size"), "ranks come from the launcher")
    if not any(re.match("--(save|run.dir)(=|$)", word) for word in words):
        without["--save-interval"] = "nothing is saved: there is no --save"
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0].replace("_", "-")
            notes += [Note(flag, NO_EFFECT_HERE, without[flag])] if flag in without else []
        kept += [] if flag in without else [word]
    return kept, notes


def _sets_balancing(invocation: Invocation) -> bool:
    noted = [note.what for note in invocation.notes]
    return "--moe-router-load-balancing-type" in noted or invocation.provenance["moe_aux_loss_sequences"] != "default"


def _has_effect(name: str, config: RunConfig, named: set[str]) -> bool:
    """Return whether Megatron-LM's default of a setting affects this run."""
    match name:
        case "lr_schedule_offset":
            o = config.optimizer
            warms_up = bool(named & {"lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"})
            return warms_up or (o.lr_decay_style, o.weight_decay_incr_style) != ("constant", "constant")
        case "data_order":
            return bool(config.data.data_path or config.data.train_data_path) and not config.data.mock_data
        case "eval_iters":
            return config.training.eval_interval is not None or bool(
                config.data.valid_data_path or config.data.test_data_path
            )
        case "attention_dropout":
            return not config.model.is_sparse
        case "fresh_if_missing":
            return config.checkpoint.load is not None
        case "initial_loss_scale":
            return config.training.precision == "fp16" and config.training.loss_scale is None
    return True


# ---- writing


def command_line(ported: Ported, config_file: str | None = None) -> str:
    """Return the command that starts the run: with a config file, or with all settings as flags."""
    launcher = ported.launch.launcher
    if not launcher and ported.launch.ranks:
        ranks, each = ported.launch.ranks, ported.launch.per_node
        launcher = ["torchrun", "--nproc-per-node", str(min(ranks, each))]
        if ranks > each:
            launcher += ["--nnodes", str(-(-ranks // each)), "--rdzv-backend", "c10d"]
            launcher += ["--rdzv-endpoint", "HOST:29500"]
    parts = [" ".join(_quoted(word) for word in launcher), "pretrain_gpt.py"] if launcher else ["megalite train"]
    if config_file is not None:
        return f"{' '.join(parts)} --config {_quoted(config_file)}"
    flags = [" ".join(map(_quoted, settings()[name].words(value))) for name, value in ported.values.items()]
    return " \\\n    ".join([" ".join(parts), *flags])


def _plain(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _quoted(word: str) -> str:
    """Quote a word for bash, but leave variables and command substitutions active."""
    inside = re.sub(f'({OUTPUT})|"', lambda found: found[1] or r"\"", word)
    return f'"{inside}"' if is_unknown(word) else shlex.quote(word)


def config_text(ported: Ported) -> str:
    """Return the settings as a config file, by section."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in ported.values.items():
        tree.setdefault(settings()[name].section, {})[name] = value
    return as_yaml(tree, default_flow_style=None, width=100)


def remarks(ported: Ported) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, lines) for dropped flags, differences and words without a value."""
    notes = ported.invocation.notes
    for kind in (ALREADY_SO, NO_EFFECT_HERE):
        lines: dict[str, list[str]] = {}
        for note in notes:
            if note.kind == kind and note.what not in lines.setdefault(note.why, []):
                lines[note.why].append(note.what)
        yield f"dropped, {kind}", [f"{' '.join(flags)}: {why}" for why, flags in lines.items()]
    differs = [*ported.launch.remarks, *(f"{note.what}: {note.why}" for note in notes if note.kind == DIFFERS)]
    differs += [
        f"{name} {_plain(value)} is Megatron-LM's default: it is written out" for name, value in ported.defaults.items()
    ]
    if "--calculate-per-token-loss" not in ported.launch.words:
        differs.append(
            "the loss is the mean over all tokens of the batch, as with --calculate-per-token-loss: equal without masks"
        )
    model = ported.config.model
    if model.num_experts is not None and model.add_bias_linear and not model.moe_add_bias_linear:
        differs.append("experts have no biases; Megatron-LM adds them unless --disable-bias-linear is set")
    if model.multi_latent_attention and model.position_embedding_type != "rope":
        differs.append("multi-latent attention has no RoPE; Megatron-LM adds it: set --position-embedding-type rope")
    if model.moe_expert_capacity_factor is not None:
        differs.append(
            "expert capacity applies to each sequence; in Megatron-LM to the part of a microbatch on each rank"
        )
    if ported.config.checkpoint.load is None or ported.config.checkpoint.fresh_if_missing:
        differs.append("initial weights are other random numbers: continue from a converted checkpoint to compare")
    if ported.launch.ranks is not None and ported.launch.ranks < (least := least_ranks(ported.config)):
        differs.append(f"the script starts {ported.launch.ranks} ranks, which do not fit: start at least {least}")
    yield "differs", list(dict.fromkeys(differs))
    yield (
        "has no value yet (--set NAME=VALUE)",
        list(dict.fromkeys(word for word in _without_effect(ported.launch.words)[0] if is_unknown(word))),
    )


def as_text(ported: Ported, written: Path | None) -> str:
    """Return the command line, the config and the remarks as text."""
    lines = [f"# {ported.launch.source}", command_line(ported, None if written is None else str(written))]
    if written is None:
        lines += ["", "# as a config file", config_text(ported).rstrip("\n")]
    for heading, remarked in remarks(ported):
        lines += ["", f"# {heading}", *(f"#   {line}" for line in remarked)] if remarked else []
    return "\n".join(lines)
