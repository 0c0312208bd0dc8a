"""`megalite config`: a resolved config with where each value comes from, or the table of all settings."""

import json
from collections.abc import Sequence
from typing import Any

from megalite.cli.dry_run import world_size_of
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.config.describe import sectioned, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import dump, preset_names
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.help import full_help, markdown
from megalite.config.run import RunConfig
from megalite.config.validate import validate

_USAGE = """usage: megalite config --show [SETTINGS ...]     the resolved config as YAML (any flags of megalite train)
       megalite config --explain [SETTINGS ...]  each setting that is not at its default, and what set it
       megalite config --presets                 names of the presets
       megalite config --markdown                docs/config.md
--show and --explain check the config for --world-size N ranks (default tp·pp·cp·dp) and take --json.
megalite config --help-all lists all settings."""


@command("megalite config")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError."""
    mode, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    show(_answer(mode, rest).removesuffix("\n"))
    return 0


def _answer(mode: str, rest: list[str]) -> str:
    if mode in ("--show", "--explain"):
        # A resolved config belongs to a number of ranks, which the command line of a dry run may name.
        invocation = parse_arguments(["--dry-run", *rest])
        config = validate(invocation.config, world_size_of(invocation), invocation.explicit)
        if mode == "--show":
            return json.dumps(sectioned(config), indent=2) + "\n" if invocation.json else dump(config)
        rows = _explain(config, invocation)
        if invocation.json:
            return json.dumps(rows, indent=2) + "\n"
        return "".join(f"{name:<32} {row['value']!s:<24} {row['source']}\n" for name, row in rows.items())
    if rest:
        raise ConfigError(f"megalite config {mode} takes nothing after it, got {' '.join(rest)}")
    if mode == "--markdown":
        return markdown()
    if mode == "--presets":
        return "\n".join(preset_names()) + "\n"
    if mode == "--help-all":
        return full_help("megalite config --show") + "\n"
    if mode in ("--help", "-h"):
        return _USAGE + "\n"
    raise ConfigError(
        f"megalite config takes --show, --explain, --presets or --markdown first, got {mode}; to see what a config "
        f"resolves to write megalite config --show {mode} ..."
    )


def _explain(config: RunConfig, invocation: Invocation) -> dict[str, dict[str, Any]]:
    """Each setting that something set -> its value and source."""
    rows = {}
    for name, value in values_of(config).items():
        source = invocation.provenance[name]
        if source == "default" and value != settings()[name].default:
            source = "derived"
        if source != "default":
            rows[name] = {"value": value, "source": source}
    return rows
