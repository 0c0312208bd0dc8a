"""The memory replay compared with hand calculation; test_validate compares it with a ledger on thousands of programs."""

from megalite.pipeline.ir.generators import gpipe, one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Peak, Sizes, memory_peaks
from megalite.pipeline.ir.schedule import Schedule


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
