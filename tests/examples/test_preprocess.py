"""Examples of preprocessing on several machines, run here in sequence; merged parts equal one machine's output."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megalite.cli.main import main
from tests.docs.execution import run_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/preprocess"
PARTS = "2"  # of 8 files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a tokenizer, and one machine's output as `whole`; puts `megalite` in PATH."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "corpus").mkdir()
    (folder / "bin").mkdir()
    program = folder / "bin" / "megalite"
    program.write_text(f'#!/bin/bash\nexec {sys.executable} -m megalite.cli.main "$@"\n')
    program.chmod(0o755)
    builder = [str(ROOT / "examples/quickstart/build_corpus.py"), "--max-megabytes", "0.2"]
    assert run_script([*builder, "--output", str(folder / "corpus" / "a.jsonl")]) == 0
    lines = (folder / "corpus" / "a.jsonl").read_text().splitlines(keepends=True)
    (folder / "corpus" / "b.jsonl").write_text("".join(lines[: len(lines) // 3]))
    trained = ("--input", "corpus", "--output-prefix", "tokenizer", "--vocab-size", "384")
    common = ("--input", "corpus/", "--tokenizer-model", "tokenizer.model", "--append-eod")
    with contextlib.chdir(folder):
        assert main(["train-tokenizer", *trained]) == 0
        assert main(["preprocess", *common, "--output-prefix", "whole"]) == 0
    return folder


def said(folder: Path, *words: str | Path, **variables: str) -> str:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TOKENIZER": "tokenizer.model", **variables}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def require_whole(folder: Path, prefix: str) -> None:
    for suffix in (".bin", ".idx", ".json"):
        ours = (folder / f"{prefix}_text_document{suffix}").read_bytes()
        assert ours == (folder / f"whole_text_document{suffix}").read_bytes(), suffix


def test_slurm_array(folder: Path) -> None:
    array = {"OUTPUT": "slurm/corpus", "PARTS": PARTS}
    for task in range(int(PARTS)):
        said(folder, "bash", EXAMPLE / "slurm.sbatch", SLURM_ARRAY_TASK_ID=str(task), **array)
    said(folder, "bash", EXAMPLE / "merge.sh", **array)
    require_whole(folder, "slurm/corpus")
    assert "#SBATCH --array=0-7\n" in (EXAMPLE / "slurm.sbatch").read_text()


def test_kubernetes_indexed_job(folder: Path) -> None:
    job = yaml.safe_load((EXAMPLE / "kubernetes.yaml").read_text())["spec"]
    assert (job["completions"], job["completionMode"]) == (8, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    (line,) = container["args"]
    assert line.endswith('"$JOB_COMPLETION_INDEX/8"')
    line = line.replace("tokenizer.json", "tokenizer.model").replace('/8"', f'/{PARTS}"')
    for index in range(int(PARTS)):
        said(folder, *container["command"], line, JOB_COMPLETION_INDEX=str(index))
    said(folder, "bash", EXAMPLE / "merge.sh", OUTPUT="corpus", PARTS=PARTS)
    require_whole(folder, "corpus")


def test_ray_data(folder: Path) -> None:
    pytest.importorskip("ray")
    words = ("--input", "corpus/", "--output-prefix", folder / "ray/corpus", "--tokenizer-model", "tokenizer.model")
    script = (sys.executable, EXAMPLE / "with_ray.py", *words)
    assert "parts" in said(folder, *script, "--parts", "5", RAY_DATA_DISABLE_PROGRESS_BARS="1")
    require_whole(folder, "ray/corpus")
