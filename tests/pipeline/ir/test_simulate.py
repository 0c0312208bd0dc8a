"""The simulation and the memory replay compared with hand calculation, published numbers and closed forms; ranks that share cores."""

from dataclasses import replace

import pytest

from megalite.pipeline.ir.generators import forward_only, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Peak, Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Action, Kind, Program, Schedule, ScheduleError
from megalite.pipeline.ir.simulate import Costs, Link, shared_makespan, simulate
from megalite.pipeline.ir.study import Conditions, ScheduleRequest, compare, study


def test_simulation_equals_hand_calculation() -> None:
    """Two unequal stages, one second per message: every start and end calculated by hand."""
    costs = Costs(forward=(2.0, 3.0), backward=(4.0, 5.0), p2p=1.0)
    timeline = simulate(lower(one_f_one_b(2, 2)), costs)
    times = {str(event.action): (event.rank, event.start, event.end) for event in timeline.events}
    assert times == {
        "0F0": (0, 0.0, 2.0),
        "0F1": (0, 2.0, 4.0),
        "1F0": (1, 3.0, 6.0),  # the message has arrived one second after 0F0
        "1B0": (1, 6.0, 11.0),
        "1F1": (1, 11.0, 14.0),  # the message of 0F1 has arrived at 7: posted before 1B0, which runs from 6
        "1B1": (1, 14.0, 19.0),
        "0B0": (0, 12.0, 16.0),
        "0B1": (0, 20.0, 24.0),
    }
    assert timeline.makespan == 24.0
    assert timeline.busy == (12.0, 16.0)
    assert timeline.idle == (12.0, 8.0)
    assert timeline.bubble_fraction == pytest.approx(1 - 16 / 24)
    assert timeline.peak_activations == (2, 1)


def test_full_send_window_blocks_the_sender() -> None:
    """Rank 1 is slow: with a window of one, rank 0 runs ahead only as far as receives have been posted."""
    costs = Costs(forward=(1.0, 10.0), backward=(1.0, 1.0))

    def starts(window: int) -> list[float]:
        timeline = simulate(lower(gpipe(2, 4), recv_prefetch=1, send_window=window), costs)
        return [event.start for event in timeline.events if event.rank == 0 and event.action.kind is Kind.F]

    # Receives 0 and 1 are posted at 0, number 2 before 1F1 at 11, so the send of 3 waits; it is the last forward.
    assert starts(1) == [0.0, 1.0, 2.0, 3.0]
    program = lower(gpipe(2, 4), send_window=1)
    naive = Program(program.schedule, _receives_right_before_readers(program), 1)
    forwards = [event.start for event in simulate(naive, costs).events if event.rank == 0][:4]
    # Receive k is posted when 1F(k-1) ends, at 1 + 10 k: send k+1 waits for it, and forward k+2 for that send.
    assert forwards == [0.0, 1.0, 2.0, 11.0]
    wide = Program(program.schedule, naive.actions, 2)
    assert [event.start for event in simulate(wide, costs).events if event.rank == 0][:4] == [0.0, 1.0, 2.0, 3.0]


def _receives_right_before_readers(program: Program) -> tuple[tuple[Action, ...], ...]:
    kept = [[a for a in row if a.kind not in (Kind.RECV_F, Kind.RECV_B)] for row in program.actions]
    kept[1] = [b for a in kept[1] for b in ((Action(Kind.RECV_F, 1, a.microbatch), a) if a.kind is Kind.F else (a,))]
    kept[0] = [b for a in kept[0] for b in ((Action(Kind.RECV_B, 0, a.microbatch), a) if a.kind is Kind.B else (a,))]
    return tuple(map(tuple, kept))


PUBLISHED = [
    (8, 24, (18.52, 18.09, 9.34, 0.60), 3, (0.2431, 0.1055, 0.1585, 0.1083)),
    (8, 64, (29.94, 29.62, 19.39, 0.54), 4, (0.1091, 0.0320, 0.0554, 0.0294)),
]
"""Qi et al., "Zero Bubble Pipeline Parallelism" (2023): ranks, microbatches, profiled milliseconds of F, I, W and a
message, chunks per rank if a chunk is one layer; theoretical bubble rates of 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2."""


ROUNDING = ((-0.005, -0.005, 0.005, -0.005), (0.005, 0.005, -0.005, 0.005))
"""F, I and a message lengthen bubbles, W shortens them: the two extremes that rounding to 0.01 ms allows."""


def bubble_rate(program: Program, milliseconds: tuple[float, ...]) -> float:
    chunks = program.schedule.num_chunks
    forward, inner, weight, message = milliseconds
    costs = Costs.uniform(
        program.schedule.num_stages,
        forward=forward / chunks,
        backward=(inner + weight) / chunks,
        weight_grad=weight / chunks,
        p2p=message,
    )
    return simulate(program, costs).span_bubble_fraction


@pytest.mark.parametrize(("ranks", "microbatches", "milliseconds", "chunks", "rates"), PUBLISHED)
def test_bubble_rates_equal_published_ones(
    ranks: int, microbatches: int, milliseconds: tuple[float, ...], chunks: int, rates: tuple[float, ...]
) -> None:
    """Inputs are printed to 0.01 ms, so the rates are known only within half a unit of these: the published values are in
    this range, and at most 2e-4 from its middle."""
    one_f, looped, h1, h2 = rates
    schedules = (one_f_one_b(ranks, microbatches), zb_h1(ranks, microbatches), zb_h2(ranks, microbatches))
    for schedule, printed in zip(schedules, (one_f, h1, h2), strict=True):
        program = lower(schedule)
        assert bubble_rate(program, milliseconds) == pytest.approx(printed, abs=2e-4)
        ends = [
            bubble_rate(program, tuple(value + sign for value, sign in zip(milliseconds, signs, strict=True)))
            for signs in ROUNDING
        ]
        assert ends[0] - 5e-5 <= printed <= ends[1] + 5e-5, schedule.name
    program = lower(interleaved(ranks, chunks, microbatches))
    assert bubble_rate(program, milliseconds) == pytest.approx(looped, abs=3.5e-3)


def test_links_equal_hand_calculation() -> None:
    """A message occupies its link for three seconds and arrives two seconds later; the next leaves after it."""
    program = lower(forward_only((0, 1), 3), recv_prefetch=9, send_window=3)
    costs = Costs(forward=(1.0, 1.0), backward=(0.0, 0.0), p2p=50.0, links={(0, 1): Link(2.0, seconds_per_message=3.0)})

    def starts(program: Program) -> list[list[float]]:
        events = simulate(program, costs).events
        return [[event.start for event in events if event.rank == rank] for rank in range(2)]

    # Sent at 1, 2, 3; off the link at 4, 7, 10.
    assert starts(program) == [[0.0, 1.0, 2.0], [6.0, 9.0, 12.0]]
    # With a window of one the second send waits until the first message arrives at 6, and leaves the link at 9; the third
    # waits until 11. Forwards wait behind sends.
    narrow = lower(forward_only((0, 1), 3), recv_prefetch=9, send_window=1)
    assert starts(narrow) == [[0.0, 1.0, 6.0], [6.0, 11.0, 16.0]]


def test_links_are_directed_and_latency_does_not_queue() -> None:
    program = lower(forward_only((0, 1), 3), recv_prefetch=9, send_window=3)
    costs = Costs(forward=(1.0, 1.0), backward=(0.0, 0.0), links={(0, 1): Link(5.0)})
    events = [event for event in simulate(program, costs).events if event.rank == 1]
    assert [event.start for event in events] == [6.0, 7.0, 8.0]
    costs = Costs(forward=(1.0, 1.0), backward=(1.0, 1.0), p2p=0.5, links={(0, 1): Link(5.0)})
    times = {str(event.action): event.start for event in simulate(lower(one_f_one_b(2, 1)), costs).events}
    assert times == {"0F0": 0.0, "1F0": 6.0, "1B0": 7.0, "0B0": 8.5}


def test_durations_of_halves_and_recomputation() -> None:
    costs = Costs(forward=(1.0,), backward=(10.0,), weight_grad=(4.0,), recompute=(0.5,))

    def lengths(text: str) -> list[float]:
        events = simulate(lower(Schedule.from_csv(text)), costs).events
        return [event.end - event.start for event in events]

    # Without any R each B or I recomputes first; otherwise only R recomputes.
    assert lengths("0F0,0F1,0B0,0I1,0W1\n") == [1.0, 1.0, 10.5, 6.5, 4.0]
    assert lengths("0F0,0F1,0R0,0B0,0I1,0W1\n") == [1.0, 1.0, 0.5, 10.0, 6.0, 4.0]
    halves = Costs(forward=(1.0,), backward=(10.0,))
    split = simulate(lower(Schedule.from_csv("0F0,0I0,0W0\n")), halves)
    assert [event.end for event in split.events] == [1.0, 6.0, 11.0]


def test_span_is_from_first_start_to_last_end_of_a_rank() -> None:
    """ZB-H2 never idles between each rank's first and last action, although a synchronous step has the ramp."""
    timeline = simulate(lower(zb_h2(4, 8)), Costs.uniform(4))
    assert timeline.spans == (24.0,) * 4 and timeline.makespan == 27.0
    assert timeline.span_bubble_fraction == 0.0
    assert timeline.bubble_fraction == pytest.approx(3 / 27)


def test_invalid_arguments_are_errors() -> None:
    stuck = lower(Schedule.from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n", name="mine"))
    with pytest.raises(
        ScheduleError,
        match="mine deadlocks whenever its sends complete: 1B1 on rank 1 -> 2SEND_B1 on rank 2; 2F0 on rank 2 -> ",
    ):
        simulate(stuck, Costs.uniform(3))
    program = lower(one_f_one_b(2, 2))
    unread = replace(program, actions=(program.actions[0], program.actions[1][1:]))
    with pytest.raises(ScheduleError, match=r"1F0 .* needs 1RECV_F0, which does not exist"):
        simulate(unread, Costs.uniform(2))


SHARED = {"1f1b": one_f_one_b(4, 8), "gpipe": gpipe(4, 8), "interleaved": interleaved(4, 8, 2), "zb-h1": zb_h1(4, 8)}


def uneven(schedule: Schedule) -> Costs:
    stages = schedule.num_stages
    forward = tuple(1.0 + 0.5 * stage for stage in range(stages))
    return Costs(forward=forward, backward=tuple(2.0 * each for each in forward))


def test_two_ranks_on_one_core_never_idle() -> None:
    """One rank alone is twice as fast: 0F0 until 1; 0F1 with 1F0 until 3; 1B0 alone until 5; ...: 24 s of work in 12."""
    costs = Costs(forward=(2.0, 2.0), backward=(4.0, 4.0))
    assert shared_makespan(one_f_one_b(2, 2), costs, 2.0) == pytest.approx(12.0)
    assert simulate(lower(one_f_one_b(2, 2)), costs).makespan == pytest.approx(18.0)


def test_messages_use_the_cores_of_both_ends() -> None:
    """If no rank computes, each end needs half of the link's time. Four ranks on one core keep it busy."""
    costs = Costs.uniform(4, p2p=5.0)
    assert shared_makespan(one_f_one_b(4, 1), costs, 2.0) == pytest.approx(4 * 3.0 / 2 + 6 * 5.0)
    assert shared_makespan(one_f_one_b(4, 8), costs, 4.0) == pytest.approx(8 * (3.0 + 6 * 2 * 5.0 / 4))


@pytest.mark.parametrize("name", SHARED)
def test_shared_cores_with_a_core_per_rank_equal_the_simulator(name: str) -> None:
    schedule = SHARED[name]
    costs = uneven(schedule)
    assert shared_makespan(schedule, costs, 1.0) == pytest.approx(simulate(lower(schedule), costs).makespan)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("ranks_per_core", [1.5, 2.0, 4.0])
def test_makespan_is_between_total_work_and_the_longest_chain(name: str, ranks_per_core: float) -> None:
    schedule = SHARED[name]
    apart = simulate(lower(schedule), uneven(schedule))
    taken = shared_makespan(schedule, uneven(schedule), ranks_per_core)
    work = sum(apart.busy) / 4
    assert max(work, apart.makespan / ranks_per_core) <= taken * (1 + 1e-12)
    assert taken < apart.makespan
    if ranks_per_core == 4.0:  # one core: it never idles
        assert taken == pytest.approx(work)


def test_memory_of_gpipe_and_1f1b_equals_the_formula() -> None:
    sizes = Sizes.uniform(4, activation=10.0)
    assert [peak.size for peak in memory_peaks(lower(gpipe(4, 6)), sizes)] == [60.0] * 4
    assert [peak.size for peak in memory_peaks(lower(one_f_one_b(4, 6)), sizes)] == [40.0, 30.0, 20.0, 10.0]
    own = Sizes(activation=(7.0, 11.0), deferred=(0.0, 0.0), kept_input=(0.0, 0.0))
    assert [peak.size for peak in memory_peaks(lower(one_f_one_b(2, 3)), own)] == [14.0, 11.0]


def test_memory_of_halves_and_recomputation() -> None:
    """0F0 keeps its input (3), 0F1 its graph (10): 13; R adds 10: 23, which I exchanges for 4."""
    schedule = Schedule.from_csv("0F0,0F1,0R0,0I0,0I1,0W0,0W1\n")
    sizes = Sizes(activation=(10.0,), deferred=(4.0,), kept_input=(3.0,), message=100.0)
    assert memory_peaks(lower(schedule), sizes) == (Peak(23.0, 2),)
    # The deferred state is larger than the graph: 12 at the end of the first I, 12 + 12 after the second.
    sizes = Sizes(activation=(10.0,), deferred=(12.0,), kept_input=(3.0,))
    assert memory_peaks(lower(schedule), sizes) == (Peak(25.0, 3),)
    sooner = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    assert memory_peaks(lower(sooner), sizes) == (Peak(24.0, 3),)


def test_backward_with_recomputation_needs_memory_for_the_graph() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0I1,0W1\n")
    sizes = Sizes(activation=(3.0,), deferred=(2.0,), kept_input=(0.0,), workspace=(10.0,))
    assert memory_peaks(lower(schedule), sizes) == (Peak(16.0, 2),)


def test_a_schedule_and_a_comparison() -> None:
    found = study(Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), Conditions())
    assert (found.timeline.makespan, found.ideal, found.sends) == (9, 6, (2, 2))
    studies, refused = compare(["gpipe", "1f1b"], ScheduleRequest(num_ranks=4, num_microbatches=8, limit=4))
    assert [each.schedule.name for each in studies] == ["1f1b"]
    assert "above the limit of 4" in refused["gpipe"]
