"""What the kernel says of processes."""

import subprocess
import sys
import time

import pytest

from megalite.watchdog.processes import started_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_the_start_of_a_process_as_a_time_of_day() -> None:
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    after = time.time()
    found = started_at(process.pid)
    process.communicate(b"\n")
    assert found is not None and before - 0.05 < found < after + 0.05
    assert started_at(process.pid) is None
