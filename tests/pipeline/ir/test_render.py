"""Pictures of schedules."""

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.generators import forward_only, gpipe, interleaved, one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.render import render_grid, render_lists
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, simulate


def test_1f1b_golden() -> None:
    assert render_grid(one_f_one_b(3, 4)) == (
        "schedule 1f1b: 3 ranks, one stage each, 4 microbatches; one slot = any one action\n"
        "        0  1  2  3  4  5  6  7  8  9 10 11  bubble  peak\n"
        "rank 0 F0 F1 F2  .  . B0 F3 B1  . B2  . B3   33.3%     3\n"
        "rank 1  . F0 F1  . B0 F2 B1 F3 B2  . B3  .   33.3%     2\n"
        "rank 2  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .   33.3%     1\n"
        "F2 forward of microbatch 2, B its backward, . idle; peak: live activations, in microbatches x stages"
    )


def test_chunks_name_the_stage_and_timelines_show_lengths() -> None:
    timeline = simulate(lower(gpipe(2, 1, 2)), Costs.uniform(4, forward=0.5, backward=1.0))
    assert render_grid(timeline) == (
        "schedule gpipe: 2 ranks, 4 stages, 1 microbatches; one slot = 0.5\n"
        "         0   1   2   3   4   5   6   7   8   9  10  11  bubble  peak\n"
        "rank 0 0F0   . 2F0   .   .   . 2B0 ---   .   . 0B0 ---   50.0%     2\n"
        "rank 1   . 1F0   . 3F0 3B0 ---   .   . 1B0 ---   .   .   50.0%     2\n"
        "5F2 forward of microbatch 2 through stage 5, B its backward, . idle; peak: live activations, in microbatches "
        "x stages"
    )


def test_uneven_costs_keep_each_action_visible() -> None:
    schedule = one_f_one_b(4, 5)
    costs = Costs(forward=(1.0, 1.3, 1.7, 2.5), backward=(2.2, 2.9, 3.1, 4.9), p2p=0.3)
    grid = render_grid(simulate(lower(schedule), costs), width=1000)
    for line, row in zip(grid.split("\n")[2:6], schedule.actions, strict=True):
        cells = [cell for cell in line.split()[2:] if cell[0] in "FB"]
        assert cells == [f"{action.kind}{action.microbatch}" for action in row]


def test_eight_ranks_and_sixteen_microbatches_fit() -> None:
    grid = render_grid(one_f_one_b(8, 16))
    assert "…" not in grid
    assert max(map(len, grid.split("\n"))) <= 240


def test_wide_and_tall_grids_say_what_is_left_out() -> None:
    grid = render_grid(interleaved(24, 2, 48), width=100, max_ranks=8)
    lines = grid.split("\n")
    assert max(map(len, lines[1:-3])) <= 100
    names = [line[:7].strip() for line in lines[2:-3]]
    assert names == [f"rank {rank}" for rank in range(4)] + ["…"] + [f"rank {rank}" for rank in (21, 22, 23)]
    header = lines[1].split()
    cut = header.index("…")
    first, last = int(header[cut - 1]) + 1, int(header[cut + 1]) - 1
    assert lines[-2:] == [f"… slots {first} to {last} are left out", "… ranks 4 to 20 are left out"]
    num_slots = 2 * 48 * 2 + 2 * 23
    assert int(header[-3]) == num_slots - 1  # before the headings "bubble" and "peak"


def test_forward_only_and_stuck_schedules() -> None:
    grid = render_grid(forward_only(2, 1, 2))
    assert "backward" not in grid and grid.split("\n")[2] == "rank 0 F0 F1 .   33.3%     1".replace(
        "F1 .", "F1  ."
    )
    stuck = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n")
    lines = render_grid(stuck).split("\n")
    assert lines[2].startswith("rank 0 F0 F1  .") and lines[2].endswith("stuck at 0B0")
    assert lines[3].endswith("stuck at 1B1") and lines[4].endswith("stuck at 2F0")


def test_lists_are_cut_around_the_mark() -> None:
    actions = [[Action.parse(f"{rank}F{i}") for i in range(60)] for rank in range(20)]
    text = render_lists(actions, {17: 30, 2: 0}, width=60, max_ranks=4)
    lines = text.split("\n")
    assert [line.split(":")[0] for line in lines] == [
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 17",
        "… 16 ranks are left out",
    ]
    assert lines[2].startswith("rank 2:  >2F0< 2F1 ") and lines[2].endswith(" …")
    assert " … 17F" in lines[3] and " 17F29 >17F30< 17F31 " in lines[3] and lines[3].endswith(" …")
    assert max(map(len, lines)) <= 60
    assert render_lists([[], actions[0][:2]], {1: 1}) == "rank 0: (nothing)\nrank 1: 0F0 >0F1<"
