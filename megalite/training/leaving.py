"""However a run ends, `exit.json` says how."""

from collections.abc import Callable
from pathlib import Path

from megalite.training.ending import Ending, Standing, forget_ending, write_ending
from megalite.training.stopping import StopRequest, StopRequests, StopRun


def run_and_tell(
    run: Callable[[], Ending],
    *,
    run_dir: Path | None,
    stops: StopRequests,
    standing: Standing,
    log: Callable[[str], None],
) -> Ending:
    """Call `run` and leave its end in the folder of the run.

    Until its first step a run has nothing to lose, and a stop ends it wherever it is; also on a rank that is held by a
    collective which then breaks because the others have left.

    Args:
        run_dir: None where there is none, and on ranks other than 0.
        stops: what `run` may be asked.
        standing: `run` keeps it up to date.

    Raises:
        what `run` raises, but for a stop.
    """
    forget_ending(run_dir)
    stops.last_words = lambda request, text: write_ending(run_dir, request.ending(standing.step, text))
    try:
        ending = run()
    except StopRun as stop:
        ending = _stopped_at_start(stop.request, standing, log)
    except BaseException as error:
        request = stops.request
        if request is None or standing.moved or not isinstance(error, RuntimeError):
            write_ending(run_dir, Ending.failed(error, standing.step))
            raise
        ending = _stopped_at_start(request, standing, log)
    write_ending(run_dir, ending)
    return ending


def _stopped_at_start(request: StopRequest, standing: Standing, log: Callable[[str], None]) -> Ending:
    said = "before the first step: there is nothing to save"
    log(f"{request.cause}: stopping {said}")
    return request.ending(standing.step, said)
