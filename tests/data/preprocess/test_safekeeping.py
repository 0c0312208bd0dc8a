"""What is safe is known whenever a signal comes."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megalite.data.inputs.places import Place
from megalite.data.preprocess.job import Progress
from megalite.data.preprocess.journal import Journal, Mark
from megalite.data.preprocess.safekeeping import Safekeeper


def test_a_save_that_a_signal_cut_off_from_its_future_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between handing the save to the thread and taking its future: the journal has the mark, so it is safe."""
    marks: list[Mark] = []
    slow = threading.Event()

    def mark(new: Mark) -> None:
        slow.wait(30)
        marks.append(new)

    keeper = Safekeeper(cast(Journal, SimpleNamespace(mark=mark)), [], None, 0, 0.0)
    place = cast(Place, SimpleNamespace())
    submit = keeper._thread.submit

    def interrupted(*arguments: Any) -> Any:
        submit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(keeper._thread, "submit", interrupted)
        keeper.save_soon(place, Progress(disk_total=None))
    threading.Timer(0.1, slow.set).start()
    keeper.save_now(place, Progress(disk_total=None))
    assert keeper.safe is marks[0] and len(marks) == 1
    keeper.close()
