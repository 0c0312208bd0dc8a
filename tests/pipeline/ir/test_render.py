"""Text drawings of schedules."""

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.generators.many_chunks import interleaved, looped_bfs
from megalite.pipeline.ir.generators.one_chunk import one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.render import render_grid, render_lists
from megalite.pipeline.ir.simulate import Costs, simulate


def test_expected_grid_of_1f1b() -> None:
    assert render_grid(one_f_one_b(3, 4)) == (
        "schedule 1f1b: 3 ranks, one stage each, 4 microbatches; one slot = any one action\n"
        "        0  1  2  3  4  5  6  7  8  9 10 11  bubble  peak\n"
        "rank 0 F0 F1 F2  .  . B0 F3 B1  . B2  . B3   33.3%     3\n"
        "rank 1  . F0 F1  . B0 F2 B1 F3 B2  . B3  .   33.3%     2\n"
        "rank 2  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .   33.3%     1\n"
        "F2 forward of microbatch 2, B its backward, . idle; peak: live activations, in microbatches x stages"
    )


def test_chunks_name_stages_and_timelines_show_durations() -> None:
    timeline = simulate(lower(looped_bfs(2, 2, 1)), Costs.uniform(4, forward=0.5, backward=1.0))
    assert render_grid(timeline) == (
        "schedule looped-bfs: 2 ranks, 4 stages, 1 microbatches; one slot = 0.5\n"
        "         0   1   2   3   4   5   6   7   8   9  10  11  bubble  peak\n"
        "rank 0 0F0   . 2F0   .   .   . 2B0 ---   .   . 0B0 ---   50.0%     2\n"
        "rank 1   . 1F0   . 3F0 3B0 ---   .   . 1B0 ---   .   .   50.0%     2\n"
        "5F2 forward of microbatch 2 through stage 5, B its backward, . idle; peak: live activations, in microbatches "
        "x stages"
    )


def test_wide_and_tall_grids_are_truncated() -> None:
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


def test_lists_are_truncated_around_the_mark() -> None:
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


def test_wide_grids_can_wrap() -> None:
    schedule = one_f_one_b(2, 12)
    whole = render_grid(schedule).split("\n")
    lines = render_grid(schedule, width=60, wrap=True).split("\n")
    assert max(map(len, lines[1:-1])) <= 60
    assert lines[0] == whole[0] and lines[-1] == whole[-1]
    panels = [lines[1 + 3 * index : 4 + 3 * index] for index in range((len(lines) - 2) // 3)]
    assert len(panels) >= 2
    for row in range(3):
        joined = " ".join(" ".join(panel[row].removeprefix(f"rank {row - 1}").split()) for panel in panels)
        assert joined == " ".join(whole[1 + row].removeprefix(f"rank {row - 1}").split())
    # After some screens the rest is omitted.
    long = render_grid(one_f_one_b(2, 2000), width=60, wrap=True).split("\n")
    assert len(long) < 70 and "slots" in long[-1]
