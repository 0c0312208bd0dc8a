"""Help and documentation, made from the table of settings."""

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from megalite.config.describe import Setting, sections, settings
from megalite.config.files import preset_names
from megalite.config.flags import RUN_OPTIONS
from megalite.config.megatron import DERIVED, FROM_VALUE, SHORTHANDS, VALUES, WORDS
from megalite.config.megatron_flags import known_flags

_WIDTH = 110
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", bool: ""}


def basic_help(program: str) -> str:
    """What most runs need, on one screen."""
    lines = [_usage_line(program), _example_line(program)]
    for flag in ("--config", "--preset", "--dry-run", "--json", "--world-size", "--help-all"):
        lines.append(_row("run" if flag == "--config" else "", f"{flag} {RUN_OPTIONS[flag][0]}", RUN_OPTIONS[flag][1]))
    for section in sections():
        shown = [setting for setting in settings().values() if setting.section == section and setting.basic]
        for setting in shown:
            lines.append(_row(section if setting is shown[0] else "", _usage(setting), _first_clause(setting)))
    return "\n".join(lines)


def full_help(program: str) -> str:
    """Every setting with all its spellings, choices and default."""
    lines = [
        _usage_line(program),
        _example_line(program),
        "Later ones win: default < preset < config files < flags. `none` unsets a setting that has none by default.",
        "",
    ]
    for flag, (placeholder, text) in RUN_OPTIONS.items():
        lines.append(f"  {flag} {placeholder}".rstrip())
        lines.append(f"      {text}")
    lines.append(f"      presets: {', '.join(preset_names())}")
    for section, cls in sections().items():
        lines += ["", f"{section}: {(cls.__doc__ or '').splitlines()[0]}"]
        for setting in settings().values():
            if setting.section == section:
                lines.append(f"  {_all_spellings(setting)}")
                lines.append(f"      {setting.help} [{setting.type_name}; default {_shown(setting.default)}]")
    lines += ["", "Megatron-LM's flags that set something else:"]
    lines += [f"  {flag:<42} {_sets(values)}" for flag, values in _words()]
    lines += [f"  {flag}{f' {_PLACEHOLDERS[kind]}' if kind else ''}" for flag, (kind, _) in DERIVED.items()]
    lines += [f"  {flag} {'FILE' if flag.endswith('-path') else 'VALUE'}" for flag in FROM_VALUE]
    lines += [f"  and {len(known_flags())} that set nothing or are refused: docs/from_megatron.md"]
    return "\n".join(part for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    """With the indentation of the line on the next ones, a hanging one where it begins with a flag."""
    indent = " " * (len(line) - len(line.lstrip()) + (4 if line.lstrip().startswith("--") else 0))
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]


def markdown() -> str:
    """docs/config.md: the settings of each section, then presets."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `make docs` from the config classes; do not edit. -->",
        "",
        "Each setting is a flag (`--num-layers 4`) and a key of a YAML file (`num_layers: 4`, alone or in its section).",
        "Later ones win: default < `--preset` < `--config` files < flags. On the command line `none` unsets a setting",
        "that are empty by default; switches are turned off by `--no-...`. Unknown settings, settings without effect and",
        "contradictions are errors.",
        "",
        "| flag | | |",
        "| --- | --- | --- |",
    ]
    lines += [f"| `{flag}` | {_code(value)} | {text} |" for flag, (value, text) in RUN_OPTIONS.items()]
    for section, cls in sections().items():
        lines += ["", f"## {section}", "", " ".join((cls.__doc__ or "").split()), ""]
        for setting in settings().values():
            if setting.section == section:
                also = "".join(f", `{flag}`" for flag in setting.flags if flag[2:].replace("-", "_") != setting.name)
                kind = _code("|".join(setting.shipped)) or setting.type_name
                default = _code(_shown(setting.default, ""))
                lines.append(f"- `{setting.name}`{also} ({kind}{default and f', {default}'}): {setting.help}")
    lines += ["", "## Presets", "", ", ".join(f"`{name}`" for name in preset_names())]
    lines += ["", "[from_megatron.md](from_megatron.md) has Megatron-LM's flags that set something of another name."]
    return "\n".join(lines) + "\n"


def other_flags() -> list[str]:
    """Rows of Megatron-LM's flags that stand for settings of another name: flag, settings."""
    lines = [f"| `{flag}` | {_sets(values)} |" for flag, values in _words()]
    lines += [f"| `{flag}` | {_DERIVED_MEANING[flag]} |" for flag in DERIVED]
    lines += [f"| `{flag}` | {_VALUE_MEANING[flag]} |" for flag in FROM_VALUE]
    for name, words in VALUES.items():
        flag = settings()[name].flags[0]
        lines += [f"| `{flag} {word}` | `{name}: {ours}` |" for word, ours in words.items()]
    return lines


_DERIVED_MEANING = {
    "--num-layers-per-virtual-pipeline-stage": "`vpp` = `num_layers` / `pp` / N, exactly",
    "--decoder-first-pipeline-num-layers": "`pipeline_layers` with N layers on the first pipeline rank",
    "--decoder-last-pipeline-num-layers": "`pipeline_layers` with N layers on the last pipeline rank",
    "--group-query-attention": "needs `num_query_groups`, which alone is enough",
    "--use-distributed-optimizer": "`dp_strategy: distributed-optimizer`, unless another flag shards parameters too",
    "--account-for-embedding-in-pipeline-split": "`pipeline_layers` with a layer less on the first stage",
    "--account-for-loss-in-pipeline-split": "`pipeline_layers` with a layer less on the last stage",
    "--eval-global-batch-size": "nothing, where it is `global_batch_size`; refused else",
    "--no-position-embedding": "nothing, with `position_embedding_type` rope or none",
    "--moe-layer-freq": "with a list such as `([0]*3+[1]*9)`: `moe_first_dense_layers` and `moe_layer_freq`",
    "--moe-router-load-balancing-type": "`aux_loss` is `moe_aux_loss_sequences` of a microbatch, `seq_aux_loss` of 1; `none` is "
    "`moe_aux_loss_coeff: 0`; others are refused",
}

_VALUE_MEANING = {
    "--data-args-path": "`data_path`, read from a text file",
    "--per-split-data-args-path": "`train_data_path`, `valid_data_path` and `test_data_path`, read from the keys `train`, "
    "`valid` and `test` of a JSON file",
    "--save-retain-interval": "`keep_latest: 1` and `keep_every` of that many steps",
    "--window-size": "`sliding_window` of one key more than the left number, for the query's own",
    "--rotary-seq-len-interpolation-factor": "`rope_scaling: linear` with `rope_scaling_factor`",
    "--rotary-scaling-factor": (
        "`rope_scaling: yarn` with `rope_scaling_factor` and `rope_original_max_positions: 4096`"
    ),
}


def _usage_line(program: str) -> str:
    return f"usage: {program} [--preset NAME] [--config FILE ...] [--SETTING VALUE ...]"


def _example_line(program: str) -> str:
    return f"  example: {program} --preset gpt2-124m --tp 2 --dry-run"


def _row(section: str, usage: str, text: str) -> str:
    return f"{section:<10} {usage:<29} {text}".rstrip()


def _usage(setting: Setting) -> str:
    if setting.type is bool:
        return setting.flags[0]
    placeholder = "NAME" if setting.choices else _PLACEHOLDERS[setting.type]
    return f"{setting.flags[0]} {placeholder}{' ...' if setting.is_list else ''}"


def _all_spellings(setting: Setting) -> str:
    value = "" if setting.type is bool else f" {_PLACEHOLDERS[setting.type]}{' ...' if setting.is_list else ''}"
    negative = [f"--no-{setting.flags[0][2:]}"] if setting.type is bool else []
    return ", ".join(f"{flag}{value}" for flag in (*setting.flags, *negative))


def _first_clause(setting: Setting) -> str:
    """The help up to where it goes into detail, then the choices if there are any; at most 70 characters.

    Where there are very many choices they speak for themselves."""
    clause = re.split(r"; |: |\. |\.$", setting.help)[0]
    if setting.choices:
        choices = "|".join(setting.choices)
        if len(choices) > 78:
            return f"{clause}: {setting.choices[0]} or another of {len(setting.choices)}"
        return f"{clause}: {choices}" if len(choices) <= 60 else choices
    return clause if len(clause) <= 70 else clause[:66].rsplit(" ", 1)[0] + " ..."


def _shown(value: Any, absent: str = "none") -> str:
    if value is None or value == []:
        return absent
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _words() -> list[tuple[str, Mapping[str, Any]]]:
    """Megatron-LM's flags that stand for settings, with the word where they take one, and those settings."""
    with_word = [(f"{flag} {word}", sets) for flag, words in WORDS.items() for word, sets in words.items()]
    return [*SHORTHANDS.items(), *with_word]


def _sets(values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}: {_shown(value)}`" for name, value in values.items())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
