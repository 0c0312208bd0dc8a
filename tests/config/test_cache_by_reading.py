"""Results shared by configs that agree in the settings that were read."""

import contextlib

import pytest

from megalite.config import run
from megalite.config.describe import replace, values_of
from megalite.config.run import RunConfig, cache_by_reading

asked: list[tuple[int, int]] = []


@cache_by_reading
def width(config: RunConfig, times: int) -> int:
    asked.append((config.parallel.tp, times))
    if config.training.recompute_granularity == "selective":
        return times * len(config.training.recompute_modules)
    return times * replace(config, lr=1.0).model.head_size


@pytest.fixture(autouse=True)
def forget() -> None:
    asked.clear()


def test_result_is_shared_by_configs_with_equal_reads() -> None:
    base = replace(RunConfig(), hidden_size=64, num_attention_heads=4, micro_batch_size=3)
    assert [width(each, 2) for each in (base, replace(base, dp=2), replace(base, seq_length=1))] == [32, 32, 32]
    assert asked == [(1, 2)]
    assert (
        width(replace(base, lr=2.0), 2) == 32
    )  # replaced by `replace`; the function reads other settings of the section
    assert len(asked) == 1
    assert [width(replace(base, weight_decay=2.0), 2), width(base, 3), width(replace(base, hidden_size=128), 2)] == [
        32,
        48,
        64,
    ]
    assert len(asked) == 4


def test_branches_read_different_settings() -> None:
    """The function reads lists, but not the width."""
    one = replace(RunConfig(), recompute_granularity="selective", recompute_modules=["mlp", "core_attn"], seq_length=7)
    found = [width(each, 1) for each in (one, replace(one, hidden_size=8), replace(one, recompute_modules=["mlp"]))]
    assert found == [2, 2, 1]
    assert len(asked) == 2


def test_results_from_files_or_redefinable_code_are_not_cached() -> None:
    @cache_by_reading
    def path(config: RunConfig) -> str | None:
        asked.append((0, 0))
        return config.parallel.pipeline_schedule_file

    config = replace(RunConfig(), pipeline_schedule_file="a.csv")
    assert [path(each) for each in (RunConfig(), replace(RunConfig(), tp=2))] == [None, None]
    assert len(asked) == 1
    assert [path(config), path(replace(config, tp=2))] == ["a.csv", "a.csv"]
    own = replace(RunConfig(), pipeline_schedule="defined in a notebook")
    assert [path(own), path(replace(own, tp=2))] == [None, None]
    assert len(asked) == 5


def test_reads_of_nested_functions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that keeps no result, or raises, still records its reads for its caller."""
    with monkeypatch.context() as patch:
        patch.setattr(run, "_MOST_ANSWERS", 0)
        size = cache_by_reading(lambda config: config.model.hidden_size)
    refused = cache_by_reading(lambda config: 1 // (config.training.seq_length - 8))

    def ask(config: RunConfig) -> int:
        with contextlib.suppress(ZeroDivisionError):
            return refused(config)
        return size(config)

    given = [replace(RunConfig(), hidden_size=width, seq_length=length) for width, length in ((8, 8), (16, 8), (8, 9))]
    assert list(map(cache_by_reading(ask), given)) == [8, 16, 1]


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST_ANSWERS", 2)

    @cache_by_reading
    def size(config: RunConfig) -> int:
        asked.append((0, 0))
        hidden: int = vars(config.model)["hidden_size"]  # for which the whole section counts as read
        return hidden

    for _ in range(2):
        assert [size(replace(RunConfig(), hidden_size=number)) for number in range(1, 6)] == [1, 2, 3, 4, 5]
    assert len(asked) > 5


def test_iterating_a_section_reads_all_of_it() -> None:
    @cache_by_reading
    def total(config: RunConfig) -> int:
        asked.append((0, 0))
        return int(vars(config.model)["num_layers"]) + len(values_of(config)["pipeline_layers"] or [])

    base = replace(RunConfig(), num_layers=4, pipeline_layers=[1, 3])
    assert [total(base), total(replace(base, num_layers=5)), total(replace(base, pipeline_layers=None))] == [6, 7, 4]
    assert len(asked) == 3
