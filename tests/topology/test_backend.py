"""Test that backends that do not fit the device are refused before any rank waits."""

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.topology.topology import check_backend


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cpu"), ("gloo", "cuda")])
def test_backend_that_does_not_fit_is_refused(backend: str, device: str) -> None:
    fits = {"cpu": "gloo", "cuda": "nccl"}[device]
    with pytest.raises(ConfigError, match=f"{backend} but the run is on {device}; use {fits} or auto"):
        check_backend(backend, torch.device(device))
    for other in ("auto", fits):
        check_backend(other, torch.device(device))
