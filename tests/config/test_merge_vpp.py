"""vpp where nobody gives it: by the layout in words, or by a V."""

from pathlib import Path

import pytest

from megalite.config.flags import parse_arguments


@pytest.mark.parametrize(
    ("flags", "vpp"),
    [
        ("--pp 2", 1),
        ("--pp 2 --pipeline-schedule zb-v", 2),
        ("--pp 2 --pipeline-schedule dualpipe-v --vpp 1", 1),
        ("--pp 2 --pipeline-schedule zb-h1", 1),
        ("--pp 2 --pipeline-model-parallel-layout Et|t|t|tL", 2),
        ("--pp 2 --pipeline-layout Et|t|t|tL --vpp 4", 4),
        ("--pp 2 --pipeline-layout Et|t|tL", 1),
        ("--pp 2 --pipeline-layout Et|tL --pipeline-schedule zb-v", 1),
        ("--pipeline-schedule zb-v", 1),
    ],
)
def test_what_follows_from_flags(flags: str, vpp: int) -> None:
    assert parse_arguments(flags.split()).config.parallel.vpp == vpp


def test_a_flag_that_overrides_the_schedule_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("parallel: {pp: 4, pipeline_schedule: zb-v}\n")
    assert parse_arguments(["--config", str(path)]).config.parallel.vpp == 2
    other = parse_arguments(["--config", str(path), "--pipeline-schedule", "1f1b"])
    assert other.config.parallel.vpp == 1 and "vpp" not in other.explicit
