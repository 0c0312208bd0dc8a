"""docs/planner.md names every key of the files, and its example runs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megalite.planner.hardware import Accelerator, Cluster, Efficiency, Network, Node, SoftwareStack, cluster_names

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [Cluster, Accelerator, Node, Network, Efficiency, SoftwareStack])
def test_every_key_is_explained(kind: type) -> None:
    for field in fields(kind):
        assert f"`{field.name}`" in PAGE, field.name


def test_every_cluster_is_named() -> None:
    for name in cluster_names():
        assert f"`{name}`" in PAGE


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    seconds, mfu, parts = capsys.readouterr().out.split(" ", 2)
    assert 1.0 < float(seconds) < 100.0
    assert 0.2 < float(mfu) < 0.7
    for part in ("products", "bubble", "gradients"):
        assert f"'{part}'" in parts
