"""`megalite config`: a resolved config, with where each value comes from, or the presets."""

from argparse import Namespace
from typing import Any

from megalite.cli.display import table
from megalite.cli.dry_run import world_size_of
from megalite.cli.output import json_text, show
from megalite.config.describe import sectioned, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.files import dump, preset_names
from megalite.config.flags import Invocation
from megalite.config.run import RunConfig
from megalite.config.validate import validate


def run(flags: Namespace) -> int:
    invocation = flags.invocation
    if not (flags.show or flags.explain):
        given = [source for source in invocation.provenance.values() if source != "default"]
        if given:
            raise ConfigError(f"{given[0].removeprefix('flag ')} has no effect with --presets; remove it")
        show("\n".join(preset_names()))
        return 0
    # A resolved config belongs to a number of ranks, which the command line of a dry run may name.
    config = validate(invocation.config, world_size_of(invocation), invocation.explicit)
    if flags.explain:
        rows = _explain(config, invocation)
        lines = table([(name, str(row["value"]), row["source"]) for name, row in rows.items()])
        show(json_text(rows) if invocation.json else "\n".join(lines))
    else:
        show(json_text(sectioned(config)) if invocation.json else dump(config).removesuffix("\n"))
    return 0


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
