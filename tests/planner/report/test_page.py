"""What the script of a page does, in a browser; the page without it is tested with the reports."""

import shutil
import subprocess
from pathlib import Path

import pytest

from megalite.planner.page import Dot, Line, Row, Section, Table, draw_curves, page, scatter

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
POKES = """
const heads=[...document.querySelectorAll('th')],column=i=>[...document.querySelectorAll('tbody tr')].map(r=>r.cells[i].textContent);
const said=[];for(const i of [1,1,0,0]){heads[i].click();said.push(column(0).join())}
const slider=document.querySelector('input');slider.value=.9;slider.oninput();
said.push(document.querySelectorAll('.raw').length,document.querySelector('.curve:not(.raw)').getAttribute('d').length>100);
const svg=document.querySelector('svg[data-frame]'),box=svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent('pointermove',{clientX:box.left+box.width/2,clientY:box.top+60}));
said.push(document.querySelector('#tip').textContent);
document.querySelector('circle').dispatchEvent(new PointerEvent('pointerenter',{}));
said.push(document.querySelector('#tip').textContent);
document.body.append(Object.assign(document.createElement('pre'),{id:'said',textContent:said.join('|')}));
"""


def text() -> str:
    rows = [Row((name, size)) for name, size in (("b", "2 GiB"), ("a10", "900 MiB"), ("a9", ""), ("<c>", "1,024 GiB"))]
    falling = [(float(step), 100.0 / step) for step in range(1, 101)]
    curves = draw_curves([Line("one & two", falling, 0), Line("few", falling[:5], 1)], x_label="step", y_label="loss")
    dots = scatter([Dot(1.0, 2.0, "a dot", "best")], x_label="x", y_label="y", diagonal=True)
    table = Table(("name", "memory"), rows, left=(0,))
    return page("A page", [Section(table=table), Section(figures=[(curves, "Curves"), (dots, "")])])


def test_nothing_is_from_outside() -> None:
    assert "//" not in text() and "&lt;c&gt;" in text() and "one &amp; two" in text()


def test_large_numbers_are_short_beside_an_axis() -> None:
    """On a telephone they are large, and the axis has its name beside them."""
    drawn = scatter([Dot(30_000.0, 1_580_000.0, "a dot")], x_label="x", y_label="y")
    assert (
        all(f">{label}</text>" in drawn for label in ("500k", "1M", "1.5M", "10k", "5,000")) and ">1,500k<" not in drawn
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_page_sorts_smooths_and_tells_values(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(text().replace("</body>", f"<script>{POKES}</script></body>"))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'user'}", "--dump-dom"]
    done = subprocess.run([*command, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, timeout=120)
    said = done.stdout.partition('<pre id="said">')[2].partition("</pre>")[0].split("|")
    assert said[:4] == [
        *("&lt;c&gt;,b,a10,a9", "a10,b,&lt;c&gt;,a9"),  # the largest first, then the least; what is empty last
        *("&lt;c&gt;,a9,a10,b", "b,a10,a9,&lt;c&gt;"),
    ]
    assert said[4:6] == ["1", "true"], "five points are not smoothed"
    assert said[6].startswith("step 45\n") and said[6].endswith("  one &amp; two")
    assert float(said[6].split()[2]) > 2.0, "the smoothed value"
    assert said[7] == "a dot: y 2, x 1"
