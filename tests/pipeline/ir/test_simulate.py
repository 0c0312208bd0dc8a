"""The clock against hand calculation, published numbers and closed forms."""

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.errors import ScheduleError
from megalite.pipeline.ir.generators import forward_only, gpipe, interleaved, one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.simulate import Costs, simulate


def test_by_hand() -> None:
    """Two uneven stages, one second a message: every start and end worked out on paper."""
    costs = Costs(forward=(2.0, 3.0), backward=(4.0, 5.0), p2p=1.0)
    timeline = simulate(lower(one_f_one_b(2, 2)), costs)
    times = {str(event.action): (event.rank, event.start, event.end) for event in timeline.events}
    assert times == {
        "0F0": (0, 0.0, 2.0),
        "0F1": (0, 2.0, 4.0),
        "1F0": (1, 3.0, 6.0),  # message there one second after 0F0
        "1B0": (1, 6.0, 11.0),
        "1F1": (1, 11.0, 14.0),  # 0F1's message was there at 7: posted before 1B0, which runs from 6
        "1B1": (1, 14.0, 19.0),
        "0B0": (0, 12.0, 16.0),
        "0B1": (0, 20.0, 24.0),
    }
    assert timeline.makespan == 24.0
    assert timeline.busy == (12.0, 16.0)
    assert timeline.idle == (12.0, 8.0)
    assert timeline.bubble_fraction == pytest.approx(1 - 16 / 24)
    assert timeline.peak_activations == (2, 1)


def test_a_full_send_window_holds_the_sender() -> None:
    """Rank 1 is slow: with a window of one, rank 0 runs only as far ahead as its receives have been posted."""
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
    assert [event.start for event in simulate(wide, costs).events if event.rank == 0][:4] == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]


def _receives_right_before_readers(program: Program) -> tuple[tuple[Action, ...], ...]:
    kept = [[a for a in row if a.kind not in (Kind.RECV_F, Kind.RECV_B)] for row in program.actions]
    kept[1] = [
        b for a in kept[1] for b in ((Action(Kind.RECV_F, 1, a.microbatch), a) if a.kind is Kind.F else (a,))
    ]
    kept[0] = [
        b for a in kept[0] for b in ((Action(Kind.RECV_B, 0, a.microbatch), a) if a.kind is Kind.B else (a,))
    ]
    return tuple(map(tuple, kept))


@pytest.mark.parametrize(
    ("schedule", "latency", "ratio"),
    [
        (gpipe(8, 16), 0.1, 1.467),
        (one_f_one_b(8, 16), 0.1, 1.521),
        (gpipe(8, 16), 0.5, 1.583),
        (one_f_one_b(8, 16), 0.5, 1.854),
        (interleaved(8, 2, 16), 0.5, 1.531),
        (interleaved(8, 4, 16), 0.5, 1.917),
        (interleaved(8, 2, 16, 16), 0.5, 1.365),
        (gpipe(8, 16, 2), 0.5, 1.365),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else str(value),
)
def test_latency_against_another_simulator(schedule: Schedule, latency: float, ratio: float) -> None:
    """Makespan / ideal with B = 2F and messages of 0.1 F and 0.5 F, from an independent discrete-event simulator whose
    receives are posted at will; hence the deep prefetch."""
    chunks = schedule.num_chunks
    costs = Costs.uniform(schedule.num_stages, forward=1 / chunks, backward=2 / chunks, p2p=latency)
    timeline = simulate(lower(schedule, recv_prefetch=4), costs)
    assert timeline.makespan / (3 * schedule.num_microbatches) == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize(
    (
        "ranks",
        "microbatches",
        "forward",
        "backward",
        "latency",
        "chunks",
        "bubble_1f1b",
        "bubble_interleaved",
    ),
    [
        (8, 24, 18.52, 18.09 + 9.34, 0.60, 3, 0.2431, 0.1055),
        (8, 64, 29.94, 29.62 + 19.39, 0.54, 4, 0.1091, 0.0320),
        (16, 48, 11.35, 11.25 + 8.13, 0.38, 3, 0.2552, 0.1104),
        (32, 256, 10.40, 10.25 + 7.70, 0.46, 2, 0.1352, 0.0624),
    ],
)
def test_published_bubble_rates(
    ranks: int,
    microbatches: int,
    forward: float,
    backward: float,
    latency: float,
    chunks: int,
    bubble_1f1b: float,
    bubble_interleaved: float,
) -> None:
    """Qi et al., "Zero Bubble Pipeline Parallelism" (2023): profiled milliseconds and theoretical bubble rates, with a
    layer a chunk in the interleaved column."""

    def bubble(schedule: Schedule, chunks: int) -> float:
        costs = Costs.uniform(
            schedule.num_stages, forward=forward / chunks, backward=backward / chunks, p2p=latency
        )
        return simulate(lower(schedule), costs).bubble_fraction

    assert bubble(one_f_one_b(ranks, microbatches), 1) == pytest.approx(bubble_1f1b, abs=2e-4)
    assert bubble(interleaved(ranks, chunks, microbatches), chunks) == pytest.approx(
        bubble_interleaved, abs=4e-3
    )


def test_slowest_stage_sets_the_pace() -> None:
    """With one stage twice as slow, a long run takes its time per microbatch plus a ramp."""
    costs = Costs(forward=(1.0, 1.0, 2.0, 1.0), backward=(2.0, 2.0, 4.0, 2.0))
    short, long = (simulate(lower(one_f_one_b(4, m)), costs).makespan for m in (20, 40))
    assert long - short == pytest.approx(20 * 6.0)


def test_forward_only_timeline() -> None:
    timeline = simulate(lower(forward_only(4, 2, 8)), Costs.uniform(8))
    assert timeline.makespan == 16 + 3
    assert timeline.peak_activations == (1, 1, 1, 1)
    assert len(timeline.events) == 64


def test_what_it_refuses() -> None:
    program = lower(one_f_one_b(2, 2))
    with pytest.raises(ConfigError, match="forward costs are given for 3 stages, but schedule 1f1b has 2"):
        simulate(program, Costs.uniform(3))
    with pytest.raises(ConfigError, match=r"a pipeline cost is -1\.0"):
        simulate(program, Costs.uniform(2, p2p=-1.0))
    stuck = lower(Schedule.from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n", name="mine"))
    with pytest.raises(
        ScheduleError, match=r"mine gets stuck: rank 1 waits in 1B1 for 2SEND_B1 on rank 2; rank 2 "
    ):
        simulate(stuck, Costs.uniform(3))
