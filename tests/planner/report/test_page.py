"""The script of a page in a browser; tests of the reports cover pages without scripts."""

from megalite.planner.page import Dot, Line, Row, Section, Table, draw_curves, page, scatter


def text() -> str:
    rows = [Row((name, size)) for name, size in (("b", "2 GiB"), ("a10", "900 MiB"), ("a9", ""), ("<c>", "1,024 GiB"))]
    falling = [(float(step), 100.0 / step) for step in range(1, 101)]
    curves = draw_curves([Line("one & two", falling, 0), Line("few", falling[:5], 1)], x_label="step", y_label="loss")
    dots = scatter([Dot(1.0, 2.0, "a dot", "best")], x_label="x", y_label="y", diagonal=True)
    table = Table(("name", "memory"), rows, left=(0,))
    return page("A page", [Section(table=table), Section(figures=[(curves, "Curves"), (dots, "")])])


def test_page_loads_nothing_external() -> None:
    assert "//" not in text() and "&lt;c&gt;" in text() and "one &amp; two" in text()


def test_large_axis_numbers_are_abbreviated() -> None:
    """On narrow screens the numbers are large, and the axis label is beside them."""
    drawn = scatter([Dot(30_000.0, 1_580_000.0, "a dot")], x_label="x", y_label="y")
    assert (
        all(f">{label}</text>" in drawn for label in ("500k", "1M", "1.5M", "10k", "5,000")) and ">1,500k<" not in drawn
    )
