"""Studies of schedules in a program, without the command line."""

from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.study import Conditions, ScheduleRequest, compare, study


def test_a_schedule_and_a_comparison() -> None:
    found = study(Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), Conditions())
    assert (found.timeline.makespan, found.ideal, found.sends) == (9, 6, (2, 2))
    studies, refused = compare(["gpipe", "1f1b"], ScheduleRequest(num_ranks=4, num_microbatches=8, limit=4))
    assert [each.schedule.name for each in studies] == ["1f1b"]
    assert "above the limit of 4" in refused["gpipe"]
