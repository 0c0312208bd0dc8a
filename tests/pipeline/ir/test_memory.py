"""The memory replay against sums made by hand; test_validate compares it with a ledger on thousands of programs."""

from megalite.pipeline.ir.generators.one_chunk import gpipe, loop_placement, one_f_one_b
from megalite.pipeline.ir.generators.registry import forward_only
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Peak, Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Schedule


def test_gpipe_and_1f1b_by_formula() -> None:
    sizes = Sizes.uniform(4, activation=10.0)
    assert [peak.size for peak in memory_peaks(lower(gpipe(4, 6)), sizes)] == [60.0] * 4
    assert [peak.size for peak in memory_peaks(lower(one_f_one_b(4, 6)), sizes)] == [40.0, 30.0, 20.0, 10.0]
    own = Sizes(activation=(7.0, 11.0), deferred=(0.0, 0.0), kept_input=(0.0, 0.0))
    assert [peak.size for peak in memory_peaks(lower(one_f_one_b(2, 3)), own)] == [14.0, 11.0]


def test_halves_and_recomputation_on_one_rank() -> None:
    """0F0 keeps its input (3), 0F1 its graph (10): 13; R adds 10: 23, which I exchanges for 4."""
    schedule = Schedule.from_csv("0F0,0F1,0R0,0I0,0I1,0W0,0W1\n")
    sizes = Sizes(activation=(10.0,), deferred=(4.0,), kept_input=(3.0,), message=100.0)
    assert memory_peaks(lower(schedule), sizes) == (Peak(23.0, 2),)
    # More is deferred than the graph held: it is there at the end of I, and all of both after the second: 12 + 12.
    sizes = Sizes(activation=(10.0,), deferred=(12.0,), kept_input=(3.0,))
    assert memory_peaks(lower(schedule), sizes) == (Peak(25.0, 3),)
    sooner = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    assert memory_peaks(lower(sooner), sizes) == (Peak(24.0, 3),)


def test_a_backward_needs_room_to_compute_again() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0I1,0W1\n")
    sizes = Sizes(activation=(3.0,), deferred=(2.0,), kept_input=(0.0,), workspace=(10.0,))
    assert memory_peaks(lower(schedule), sizes) == (Peak(16.0, 2),)


def test_what_is_handed_over_on_a_rank_waits_like_a_message() -> None:
    """Stages 0 and 1 on one rank: outputs wait for the F of stage 1, gradients for the B of stage 0."""
    sizes = Sizes.uniform(2, activation=10.0, message=1.0)
    row = "0F0,0F1,1F0,1B0,0F2,0B0,1F1,1B1,0B1,1F2,1B2,0B2\n"
    # At 0B0: the graphs of 0F0, 0F1 and 0F2, the outputs of the last two, the gradient of 1B0.
    assert memory_peaks(lower(Schedule.from_csv(row)), sizes) == (Peak(33.0, 5),)
    alone = Schedule.from_csv("0F0,1F0,1B0,0B0\n")
    assert memory_peaks(lower(alone), sizes) == (Peak(20.0, 1),)


def test_messages_in_and_out() -> None:
    """Rank 0 of 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1: the first send is pending until the second takes
    its place, the second until the end; two gradients are received ahead. A window of two keeps both sends."""
    sizes = Sizes.uniform(2, activation=10.0, message=1.0)
    narrow, wide = (lower(one_f_one_b(2, 2), send_window=window) for window in (1, 2))
    assert memory_peaks(narrow, sizes)[0] == Peak(20.0 + 1.0 + 2.0, 5)
    assert memory_peaks(wide, sizes)[0] == Peak(20.0 + 2.0 + 2.0, 5)
    # 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 ...: what is received becomes part of the graph.
    assert memory_peaks(narrow, sizes)[1] == Peak(10.0 + 1.0, 2)


def test_forward_only_keeps_nothing_but_messages() -> None:
    program = lower(forward_only(loop_placement(2, 1), 3), recv_prefetch=0)
    sizes = Sizes.uniform(2, activation=10.0, message=1.0)
    assert [peak.size for peak in memory_peaks(program, sizes)] == [11.0, 10.0]


def test_a_rank_without_work_holds_nothing() -> None:
    schedule = Schedule("mine", 1, (1,), ((), Schedule.from_csv("0F0,0B0\n").actions[0]))
    assert memory_peaks(lower(schedule), Sizes.uniform(1)) == (Peak(0.0, 0), Peak(1.0, 0))
