"""The wheel: built, installed into a separate folder, and used outside of the clone."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.e2e.programs import REPOSITORY, records

pytestmark = pytest.mark.e2e

PACKED = ("pyproject.toml", "README.md", "LICENSE")
SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --mock-data"


@dataclass(frozen=True)
class Installed:
    """An installed wheel, and an empty working folder."""

    wheel: Path
    packages: Path
    folder: Path

    def run(self, *words: str) -> str:
        """Output of a command, started without access to the clone."""
        variables = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
        }
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**variables, "PYTHONPATH": str(self.packages), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def megalite(self, words: str) -> str:
        """The installed command."""
        return self.run(str(self.packages / "bin" / "megalite"), *words.split())


def build(source: Path, target: Path) -> Path:
    """Build the wheel of a copy of the sources, by the backend of pyproject.toml."""
    script = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel is built from a copy, so that no files are left in the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    source, packages, work = folder / "source", folder / "packages", folder / "work"
    source.mkdir()
    work.mkdir()
    for name in PACKED:
        shutil.copy(REPOSITORY / name, source / name)
    shutil.copytree(REPOSITORY / "megalite", source / "megalite", ignore=shutil.ignore_patterns("__pycache__"))
    wheel = build(source, folder)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    quiet = ["--disable-pip-version-check", "--root-user-action", "ignore"]
    subprocess.run([*install, *quiet, "--target", str(packages), str(wheel)], check=True, timeout=120)
    return Installed(wheel, packages, work)


def test_wheel_has_exactly_the_files_of_the_package(installed: Installed) -> None:
    """Presets, clusters, stacks, kernel preferences and py.typed are data files of the package."""
    packed = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    there = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "megalite").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there
    assert {Path(name).suffix for name in packed} >= {".py", ".yaml", ".typed"}


def test_metadata_of_the_wheel(installed: Installed) -> None:
    archive = zipfile.ZipFile(installed.wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    said = HeaderParser().parsestr(archive.read(name).decode())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (said["Name"], said["Version"]) == (project["name"], project["version"])
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    needed = {line.split(">")[0] for line in said.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"torch", "numpy", "safetensors", "pyyaml", "sentencepiece", "regex", "rich", "jinja2"}
    licence = archive.read(name.replace("METADATA", "licenses/LICENSE")).decode()
    assert licence == (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence and "TERMS AND CONDITIONS" in licence
    assert installed.megalite("--version") == f"megalite {project['version']}\n"


def test_installed_package_is_imported(installed: Installed) -> None:
    where = installed.run(sys.executable, "-c", "import megalite; print(megalite.__file__)").strip()
    assert Path(where).is_relative_to(installed.packages)


def test_installed_package_inspects_and_plans(installed: Installed) -> None:
    """With presets, clusters and stacks, which are files in the package."""
    shown = installed.megalite("train --preset llama3-8b --tp 4 --pp 2 --bf16 --dry-run --world-size 64")
    assert "64 ranks = tp 4 x cp 1 x dp 8 x pp 2" in shown
    assert "bubble" in installed.megalite("schedule --schedule zb-v --pp 2 --microbatches 4")
    batch = "--gpus 8 --global-batch-size 32 --vocab-size 50257 --top 1"
    assert "tp" in installed.megalite(f"plan --preset gpt3-350m --cluster dgx-a100 {batch}")


def test_installed_package_trains(installed: Installed) -> None:
    words = f"train {SMALL} --global-batch-size 2 --train-iters 2 --device cpu --log-interval 1 --run-dir run"
    said = installed.run(sys.executable, "-m", "megalite.cli.main", *words.split())
    assert "step 2/2" in said
    assert [row["step"] for row in records(installed.folder / "run", "train")] == [1, 2]
