"""Generate docs/config.md, which lists every setting."""

from megalite.config.describe import sections, settings
from megalite.config.files import preset_names
from megalite.config.flags import RUN_OPTIONS


def page() -> str:
    """Return the page: the settings of each section, then the presets."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `make docs` from the config classes; do not edit. -->",
        "",
        "Each setting is a flag (`--num-layers 4`) and a key of a YAML file (`num_layers: 4`, at the top level or in its section).",
        "Later ones win: default < `--preset` < `--config` files < flags. `none` unsets a setting that is empty by default;",
        "`--no-...` turns a switch off. Two commands print this list and the source of each setting:",
        "",
        "```console",
        "$ megalite train --help-all",
        "$ megalite config --explain --preset gpt2-124m --tp 2",
        "```",
        "",
    ]
    lines += [f"- {code(f'{flag} {value}'.strip())}: {text}" for flag, (value, text) in RUN_OPTIONS.items()]
    for section, cls in sections().items():
        lines += ["", f"## {section}", "", " ".join((cls.__doc__ or "").split()), ""]
        for setting in settings().values():
            if setting.section == section:
                also = "".join(f", `{flag}`" for flag in setting.flags if flag[2:].replace("-", "_") != setting.name)
                default = default_of(setting.default)
                kind = "" if default else setting.type.__name__
                kind = f"list[{setting.type.__name__}]" if setting.is_list else kind
                kinds = ", ".join(filter(None, (code("|".join(setting.shipped)) or kind, default)))
                lines.append(f"- `{setting.name}`{also} ({kinds}): {setting.help}")
    lines += ["", "## Presets", "", ", ".join(f"`{name}`" for name in preset_names())]
    return "\n".join(lines) + "\n"


def default_of(value: object) -> str:
    """Format a default as code; an empty one as nothing."""
    if value is None or value == []:
        return ""
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return code(" ".join(map(str, value)) if isinstance(value, list) else text)


def code(text: str) -> str:
    """Format text as Markdown code."""
    return f"`{text}`" if text else ""
