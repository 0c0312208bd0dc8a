"""The cases of `make rehearse-cuda`: each config is legal; with a CUDA build of torch some of them run."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from megalite.config.flags import parse_arguments
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.config.strategies import STRATEGIES
from megalite.config.validate import validate
from tests.rehearsal.cuda.run import CASES, build, rehearse, words_of


def test_cases_are_valid_and_cover_strategies_and_schedules() -> None:
    configs = []
    for name, (ranks, _) in CASES.items():
        invocation = parse_arguments([*words_of(name), "--run-dir", "runs"])
        configs.append(validate(invocation.config, ranks, invocation.explicit).parallel)
    assert {config.dp_strategy for config in configs} == set(STRATEGIES.builtin)
    assert {config.schedule_name for config in configs} >= set(PIPELINE_SCHEDULES.builtin) - {"auto", "looped-bfs"}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_libraries_compile(tmp_path: Path) -> None:
    assert build(tmp_path).stat().st_size > 10_000


@pytest.mark.skipif(torch.version.cuda is None, reason="no CUDA build of torch")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_train_and_resume(tmp_path: Path) -> None:
    well, line = rehearse("tp2 pp2 ZeRO-1", build(tmp_path), sys.executable, tmp_path)
    assert well, line
