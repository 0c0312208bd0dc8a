"""docs/sweep.md and examples/sweep agree with the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from megalite.cli.tool_commands import SWEEP as main
from megalite.config import files
from megalite.config.validate import require_startable, validate
from megalite.sweep import results
from megalite.sweep.spec import KubernetesSpec, RaySpec, SbatchSpec, SweepSpec, read_spec
from tests.e2e.commands import commands_in
from tests.e2e.programs import REPOSITORY
from tests.sweep.sweeps import read_runs, write_sweep

PAGE = (REPOSITORY / "docs" / "sweep.md").read_text(encoding="utf-8")
EXAMPLE = REPOSITORY / "examples" / "sweep"
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")


def names_of(title: str) -> set[str]:
    """Names in the first column of the tables of a section."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall("`(.*?)`", row)}


def test_every_key_and_status_is_explained() -> None:
    assert names_of("What is run") == {key.name for key in fields(SweepSpec)} - {"path"}
    statuses = {results.OK, results.OOM, results.TIMEOUT, results.REFUSED, results.FAILED}
    written = {results.RESULTS, results.TABLE, results.IDENTITY, "report.html", f"{results.RUNS}/NAME/"}
    assert names_of("Results") == statuses | written
    for field in (*fields(SbatchSpec), *fields(KubernetesSpec), *fields(RaySpec)):
        assert f"`{field.name}`" in PAGE or f"  {field.name}: " in PAGE


def test_cluster_blocks_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    kinds = {"sbatch": SbatchSpec, "kubernetes": KubernetesSpec, "ray": RaySpec}
    for block, (name, kind) in zip(blocks, kinds.items(), strict=True):
        spec = getattr(read_spec(write_sweep(tmp_path, **yaml.safe_load(block))), name)
        assert isinstance(spec, kind)
        given = yaml.safe_load(block)[name]
        assert set(given) == {field.name for field in fields(kind)}
        assert spec.gpus_per_node == 8


@pytest.mark.parametrize(("text", "source"), [(PAGE, "docs/sweep.md"), (README, "examples/sweep/README.md")])
def test_commands_run(
    text: str, source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    commands = [command.words for command in commands_in(text, source)]
    assert len(commands) >= 2
    for program, name, *rest in commands:
        assert (program, name) == ("megalite", "sweep")
        assert main.parse(rest).sweep.is_file()
        if "--dry-run" in rest:
            assert main(rest) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[0] in PAGE
            assert len(lines) == 16
            assert lines[2].split("  ")[0] in PAGE


def test_example_is_valid() -> None:
    _, runs = read_runs(EXAMPLE / "sweep.yaml")
    assert [run.refused for run in runs] == 14 * [None]
    require_startable(validate(files.load(EXAMPLE / "run.yaml"), 1))
