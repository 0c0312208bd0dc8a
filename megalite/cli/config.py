"""`megalite config`: show a resolved config, the source of each value, or the presets."""

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
        sources = [source for source in invocation.provenance.values() if source != "default"]
        if sources:
            raise ConfigError(f"{sources[0].removeprefix('flag ')} has no effect with --presets; remove it")
        show("\n".join(preset_names()))
        return 0
    # Resolution depends on the number of ranks; --world-size sets it, as in a dry run.
    config = validate(invocation.config, world_size_of(invocation), invocation.explicit)
    if flags.explain:
        rows = _explain(config, invocation)
        lines = table([(name, str(row["value"]), row["source"]) for name, row in rows.items()])
        show(json_text(rows) if invocation.json else "\n".join(lines))
    else:
        show(json_text(sectioned(config)) if invocation.json else dump(config).removesuffix("\n"))
    return 0


def _explain(config: RunConfig, invocation: Invocation) -> dict[str, dict[str, Any]]:
    """Return setting -> value and source, for settings with a source other than the default."""
    rows = {}
    for name, value in values_of(config).items():
        source = invocation.provenance[name]
        if source == "default" and value != settings()[name].default:
            source = "derived"
        if source != "default":
            rows[name] = {"value": value, "source": source}
    return rows
