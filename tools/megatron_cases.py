"""How many training configurations of Megatron-LM run here: `python tools/megatron_cases.py FOLDER [CASES ...]`.

FOLDER is a copy of the repository. CASES are patterns of files in it, by default its example scripts of GPT models and the
functional tests of GPT. Each is read as it is (its flags unchanged) and as `megalite port` gives it, and both go through
`--dry-run`. What is no training of a GPT (inference, reinforcement learning) is left out.
"""

import argparse
import collections
import re
import sys
from pathlib import Path

import yaml

from megalite.cli.dry_run import report, world_size_of
from megalite.cli.output import show
from megalite.cli.port import Launch, port, read_launches
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.run import least_ranks

CASES = (
    "examples/gpt3/*.sh",
    "examples/llama/*.sh",
    "examples/mixtral/*.sh",
    "tests/functional_tests/test_cases/gpt/*/model_config.yaml",
)
GIVEN = {"REPEAT": "1"}
"""What the program that runs their tests sets, where a number is needed."""


def is_training(path: Path) -> bool:
    """A YAML of a test says its mode; a script trains."""
    if path.suffix != ".yaml":
        return True
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree.get("MODE", "pretraining") == "pretraining" and isinstance(tree.get("MODEL_ARGS"), dict)


def unchanged(launch: Launch) -> list[str]:
    """What `--dry-run` has against the flags as they are."""
    try:
        invocation = parse_arguments([*launch.words, "--dry-run"])
        report(invocation.config, world_size_of(invocation), invocation.explicit)
    except ConfigError as error:
        return list(error.problems)
    return []


def ported(launch: Launch) -> list[str]:
    """What `megalite port`, and then `--dry-run` of what it gives, has against it."""
    result = port(launch)
    if not result.problems:
        try:
            explicit = result.invocation.explicit | set(result.defaults)
            report(result.config, max(launch.ranks or 1, least_ranks(result.config)), explicit)
        except ConfigError as error:
            return list(error.problems)
    return result.problems


def main() -> int:
    """Print the shares and the reasons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    flags = parser.parse_args()
    files = [path for pattern in flags.cases for path in sorted(flags.folder.glob(pattern)) if is_training(path)]
    passed, reasons = collections.Counter[str](), collections.defaultdict[str, list[str]](list)
    for path in files:
        name = str(path.relative_to(flags.folder))
        try:
            launches = read_launches(path, GIVEN)
        except ConfigError as error:
            reasons[str(error)].append(name)
            continue
        for way, check in (("unchanged", unchanged), ("ported", ported)):
            found = [problem for launch in launches for problem in check(launch)]
            passed[way] += not found
            for problem in dict.fromkeys(found):
                reasons[f"{way}: {re.sub(r'[0-9]+', 'N', problem)}"].append(name)
    for way in ("unchanged", "ported"):
        show(f"{way}: {passed[way]} of {len(files)} pass --dry-run ({100 * passed[way] / max(len(files), 1):.1f} %)")
    for reason, names in sorted(reasons.items(), key=lambda item: (item[0].split(":")[0], -len(item[1]))):
        show(f"{len(names):4} {reason} [{names[0]}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
