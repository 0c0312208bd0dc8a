"""Reports as HTML: one page template, dark and light, for a telephone too, and its charts as SVG, dots or curves over two axes;
nothing from outside, and all there without scripts."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from jinja2 import Environment

_STYLE = """
:root{color-scheme:light dark;--text:#1f2328;--quiet:#57606a;--paper:#fff;--line:#d0d7de;--best:#e6f2ff;--bad:#c0202c;
--good:#1f7a3a;--dot:#4878a8;--card:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--text:#e6edf3;--quiet:#9da7b3;--paper:#0d1117;--line:#30363d;--best:#12304f;
--bad:#ff7b72;--good:#56d364;--dot:#79b0e6;--card:#161b22}
.c0{stroke:#4aa8e0}.c1{stroke:#ff8c42}.c2{stroke:#2fc79a}.c3{stroke:#e29ac4}.c6{stroke:#b98ad0}.c7{stroke:#aab2bb}}
body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:80em;padding:0 1em;color:var(--text);background:var(--paper)}
h1{font-size:1.4em;overflow-wrap:anywhere}h2{font-size:1.1em;margin-top:2em}p{overflow-wrap:anywhere}
figcaption{color:var(--quiet);margin-bottom:.4em}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;margin:1em 0}td,th{padding:.3em .45em;border-bottom:1px solid var(--line)}
td,th{text-align:right;font-variant-numeric:tabular-nums;vertical-align:top}.left{text-align:left}
td{white-space:nowrap}.long{white-space:normal;min-width:22em}th{vertical-align:bottom;color:var(--quiet);font-weight:600}tbody tr:hover{background:var(--card)}
th[aria-sort]{color:var(--text)}th[aria-sort=ascending]::after{content:" \\25b2"}th[aria-sort=descending]::after{content:" \\25bc"}
tr.best,tr.best:hover{background:var(--best)}tr.pick{font-weight:600}
.refused,.failed,.oom,.timeout,.killed{color:var(--bad)}.running{color:var(--good)}
figure{display:inline-block;margin:1em 1em 1em 0;max-width:100%;vertical-align:top}.plot{max-width:100%;height:auto}
.plot text{font:11px system-ui,sans-serif;fill:var(--text)}.grid{stroke:var(--line);fill:none}.middle{text-anchor:middle}
.end{text-anchor:end}.line{stroke:#6fa5de;stroke-width:2;fill:none}.diagonal{stroke:var(--quiet);stroke-dasharray:4}
circle{fill:var(--dot);fill-opacity:.8}circle.best{fill:#2c9e4f}circle.pick{fill:#d9782a}
.curve{fill:none;stroke-width:1.8}.raw{opacity:.25}.key{vertical-align:middle;margin-right:.5em}
#tip{position:fixed;pointer-events:none;background:var(--card);color:var(--text);border:1px solid var(--line);border-radius:4px;
padding:.3em .6em;font-size:12px;white-space:pre;max-width:90vw;overflow:hidden;font-variant-numeric:tabular-nums}
@media (max-width:600px){body{margin:1em auto}figure{margin-right:0}.plot text{font-size:17px}}
"""
_SCRIPT = """
const all=(s,of=document)=>[...of.querySelectorAll(s)];
const UNITS={'\\u00b5s':1e-6,ms:1e-3,min:60,h:3600,hours:3600,d:86400,days:86400,years:31557600,KiB:2**10,MiB:2**20,GiB:2**30,
TiB:2**40,k:1e3,M:1e6,B:1e9,T:1e12};
const amount=text=>{const m=/^([-+]?[\\d.,]+(?:e[-+]?\\d+)?)\\s*([^\\s\\d]*)/.exec(text);
return m?parseFloat(m[1].replace(/,/g,''))*(UNITS[m[2]]||1):NaN};
for(const th of all('th')){th.style.cursor='pointer';th.title='sort';th.onclick=()=>{
const body=th.closest('table').tBodies[0],column=th.cellIndex,text=th.classList.contains('left');
const up=th.ariaSort?th.ariaSort!='ascending':text,sign=up?1:-1,of=row=>row.cells[column].textContent.trim();
const order=(a,b)=>{const x=of(a),y=of(b);if(!x||!y)return !x-!y;if(text)return sign*x.localeCompare(y,'en',{numeric:true});
const p=amount(x),q=amount(y);return isNaN(p)||isNaN(q)?isNaN(p)-isNaN(q):sign*(p-q)};
body.append(...[...body.rows].sort(order));for(const other of th.parentNode.cells)other.ariaSort=null;
th.ariaSort=up?'ascending':'descending'}}
const tip=document.body.appendChild(document.createElement('div'));tip.id='tip';tip.hidden=true;
const say=(event,text)=>{tip.hidden=!text;tip.textContent=text;const w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(event.clientX+14,innerWidth-w-4))+'px';
tip.style.top=Math.max(4,event.clientY+18+h>innerHeight?event.clientY-h-10:event.clientY+18)+'px'};
const curves=all('svg[data-frame]').map(svg=>({svg,frame:JSON.parse(svg.dataset.frame),lines:all('.curve',svg).map(path=>
({path,name:path.textContent,points:JSON.parse(path.dataset.points)}))}));
for(const shape of all('svg :has(>title)')){const title=shape.querySelector('title'),text=title.textContent;title.remove();
if(!shape.closest('svg[data-frame]'))for(const kind of ['pointerenter','click'])shape.addEventListener(kind,e=>say(e,text));
shape.addEventListener('pointerleave',e=>say(e,''))}
for(const {svg,frame:[x0,x1,,,left,right,bottom,top],lines} of curves){
const mark=document.createElementNS(svg.namespaceURI,'path');mark.setAttribute('class','diagonal');svg.append(mark);
const leave=e=>{mark.setAttribute('d','');say(e,'')};
svg.onpointerleave=leave;svg.onpointermove=svg.onclick=e=>{const box=svg.getBoundingClientRect();
const at=(e.clientX-box.left)/box.width*svg.viewBox.baseVal.width;if(at<left||at>right)return leave(e);
const x=x0+(at-left)/(right-left)*(x1-x0),near=lines.map(line=>[line,(line.now||line.points).reduce((a,b)=>
Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a)]),step=near.map(n=>n[1][0]).reduce((a,b)=>Math.abs(b-x)<Math.abs(a-x)?b:a);
mark.setAttribute('d',`M${left+(step-x0)/(x1-x0)*(right-left)} ${top}V${bottom}`);
const shown=near.filter(n=>Math.abs(n[1][0]-step)<=(x1-x0)/50);
say(e,[`step ${step}`,...shown.map(([line,p])=>`${p[1]===null?'not finite':+p[1].toPrecision(5)}  ${line.name}`)].join('\\n'))}}
const smooth=share=>{for(const {frame:[x0,x1,y0,y1,left,right,bottom,top],lines} of curves)for(const line of lines){
if(line.points.length<20)continue;
if(!line.raw){line.raw=line.path.cloneNode();line.raw.classList.add('raw');line.path.before(line.raw);line.d=line.path.getAttribute('d')}
line.raw.style.display=share?'':'none';let mean=0,weight=0,pen='M';line.now=line.points.map(([x,y])=>{if(y===null)return[x,y];
mean=share*mean+(1-share)*y;weight=share*weight+1-share;return[x,mean/weight]});
line.path.setAttribute('d',share?line.now.map(([x,y])=>{if(y===null){pen='M';return ''}
const part=`${pen}${(left+(right-left)*(x-x0)/(x1-x0)).toFixed(1)} ${(bottom-(bottom-top)*(y-y0)/(y1-y0)).toFixed(1)}`;
pen='L';return part}).join(''):line.d)}};
if(curves.some(c=>c.lines.some(l=>l.points.length>=20))){const label=document.createElement('label');label.textContent='smoothing ';
const slider=label.appendChild(document.createElement('input'));Object.assign(slider,{type:'range',min:0,max:.99,step:.01,value:0});
slider.oninput=()=>smooth(+slider.value);const first=curves[0].svg.closest('figure');first.parentNode.insertBefore(label,first);
label.style.display='block'}
"""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>{{ style|safe }}</style></head><body><h1>{{ title }}</h1>
{% for section in sections %}
{% if section.heading %}<h2>{{ section.heading }}</h2>{% endif %}
{% for text in section.texts %}<p>{{ text }}</p>{% endfor %}
{% for picture, caption in section.figures %}
<figure class="wide">{% if caption %}<figcaption>{{ caption }}</figcaption>{% endif %}{{ picture|safe }}</figure>
{% endfor %}
{% if section.table %}<div class="wide"><table><thead><tr>
{%- for name in section.table.head %}<th class="{{ section.table.side(loop.index0) }}">{{ name }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in section.table.rows %}<tr class="{{ row.kind }}"{% if row.key %} id="{{ row.key }}"{% endif %}>
{%- for cell in row.cells -%}
<td class="{{ section.table.side(loop.index0) }}
{%- if loop.index0 == section.table.marked or loop.last and section.table.marked is none %} {{ row.status }}{% endif %}
{%- if cell|length > 40 %} long{% endif %}">
{{- row.mark|safe if loop.first }}{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% endfor %}
<script>{{ script|safe }}</script></body></html>
"""
_TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)


class Row(NamedTuple):
    """Of a table: the cells, and how they are marked."""

    cells: Sequence[str]
    kind: str = ""  # `best` or `pick`
    key: str = ""  # to link to
    status: str = ""  # class of the cell that says how it stands
    mark: str = ""  # SVG before the first cell


@dataclass(frozen=True)
class Table:
    """Cells of the columns in `left` are text, the others numbers; a click on a head sorts."""

    head: Sequence[str]
    rows: Sequence[Row]
    left: Collection[int] = ()
    marked: int | None = None  # the column with the class of a row's `status`; None: the last

    def side(self, column: int) -> str:
        return "left" if column in self.left else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: text, pictures (SVG) with their captions, and a table."""

    heading: str = ""
    texts: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()
    table: Table | None = None


def page(title: str, sections: Sequence[Section]) -> str:
    return _TEMPLATE.render(title=title, sections=sections, style=_STYLE, script=_SCRIPT) + "\n"


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#555555")
"""Different also for those who see fewer colours; then the dashes change."""
DASHES = ("", "6 3", "2 3")

_WIDTH, _HEIGHT = 560, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 534, 12, 284
_MOST_POINTS = 600


class Dot(NamedTuple):
    """One run or layout of a plot."""

    x: float
    y: float
    title: str  # shown where the mouse rests
    kind: str = ""  # `best` or `pick`


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending; NaN leaves a gap
    number: int  # of the run: its colour and dashes


@dataclass(frozen=True)
class _Axes:
    x: list[float]
    y: list[float]

    def across(self, x: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (x - self.x[0]) / (self.x[-1] - self.x[0])

    def down(self, y: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (y - self.y[0]) / (self.y[-1] - self.y[0])

    def picture(self, body: Sequence[str], x_label: str, y_label: str, more: str = "") -> str:
        x_label, y_label = escape(x_label), escape(y_label)
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" class="plot" role="img" '
            f'aria-label="{y_label} over {x_label}"{more}>'
        ]
        for x in self.x:
            parts.append(f'<path class="grid" d="M{self.across(x):.1f} {_TOP}V{_BOTTOM}"/>')
            parts.append(f'<text x="{self.across(x):.1f}" y="{_BOTTOM + 16}" class="middle">{_number(x)}</text>')
        for y in self.y:
            parts.append(f'<path class="grid" d="M{_LEFT} {self.down(y):.1f}H{_RIGHT}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{self.down(y) + 4:.1f}" class="end">{_number(y)}</text>')
        middle = (_TOP + _BOTTOM) / 2
        return "".join(
            [
                *parts,
                *body,
                f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 8}" class="middle">{x_label}</text>',
                f'<text transform="translate(14 {middle}) rotate(-90)" class="middle">{y_label}</text></svg>',
            ]
        )


def scatter(
    dots: Sequence[Dot],
    *,
    x_label: str,
    y_label: str,
    diagonal: bool = False,
    frontier: Sequence[tuple[float, float]] = (),
) -> str:
    """Dots over linear axes that start at 0. `diagonal` draws x = y, with the same scale on both axes; `frontier` a
    staircase: more x is no less y."""
    points = [*((dot.x, dot.y) for dot in dots), *frontier]
    xs, ys = ([0.0, *(point[axis] for point in points)] for axis in (0, 1))
    most_x, most_y = (max(xs + ys),) * 2 if diagonal else (max(xs), max(ys))
    axes = _Axes(ticks(0.0, most_x or 1.0), ticks(0.0, most_y or 1.0))
    body = [f'<path class="diagonal" d="M{_LEFT} {_BOTTOM}L{_RIGHT} {_TOP}"/>'] if diagonal else []
    if frontier:
        (x, y), *steps = frontier
        stairs = "".join(f"H{axes.across(x):.1f}V{axes.down(y):.1f}" for x, y in steps)
        body.append(f'<path class="line" d="M{axes.across(x):.1f} {axes.down(y):.1f}{stairs}H{_RIGHT}"/>')
    body += [
        f'<circle class="{dot.kind}" cx="{axes.across(dot.x):.1f}" cy="{axes.down(dot.y):.1f}" r="5">'
        f"<title>{escape(f'{dot.title}: {y_label} {dot.y:,.4g}, {x_label} {dot.x:,.4g}')}</title></circle>"
        for dot in dots
    ]
    return axes.picture(body, x_label, y_label)


def draw_curves(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Lines over axes that hold all finite points; the y axis starts where they do. Nothing where there are none."""
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    if not finite:
        return ""
    axes = _Axes(*(ticks(min(p[axis] for p in finite), max(p[axis] for p in finite)) for axis in (0, 1)))
    body = []
    for line in lines:
        color, dashes = style_of(line.number)
        points = thinned(line.points)
        values = json.dumps([[x, float(f"{y:.6g}") if math.isfinite(y) else None] for x, y in points])
        placed = [(axes.across(x), axes.down(y)) for x, y in points]
        body.append(
            f'<path class="curve c{line.number % len(COLORS)}" fill="none" stroke="{color}" stroke-dasharray="{dashes}" '
            f'data-points="{values}" d="{_path(placed)}"><title>{escape(line.label)}</title></path>'
        )
    frame = json.dumps([axes.x[0], axes.x[-1], axes.y[0], axes.y[-1], _LEFT, _RIGHT, _BOTTOM, _TOP])
    return axes.picture(body, x_label, y_label, f' data-frame="{frame}"')


def _number(value: float) -> str:
    return f"{value / 1e3:,.10g}k" if abs(value) >= 1e4 else f"{value:,.10g}"


def style_of(number: int) -> tuple[str, str]:
    """(colour, dashes) of a run's lines."""
    return COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]


def key(number: int) -> str:
    """A piece of a run's line, for its row in a table."""
    color, dashes = style_of(number)
    stroke = f'stroke="{color}" stroke-dasharray="{dashes}"'
    return f'<svg class="key" width="26" height="8"><path class="curve c{number % len(COLORS)}" d="M0 4H26" {stroke}/></svg>'


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: means of equal stretches, each at its middle."""
    if len(points) <= most:
        return list(points)
    found = []
    for index in range(most):
        stretch = points[index * len(points) // most : (index + 1) * len(points) // most]
        found.append((stretch[len(stretch) // 2][0], math.fsum(y for _, y in stretch) / len(stretch)))
    return found


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers, evenly apart, from one that is not above `low` to one that is not below `high`."""
    if high <= low:
        spread = abs(low) or 1.0
        low, high = low - 0.05 * spread, high + 0.05 * spread
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= (high - low) / about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A polyline; what is not finite breaks it. A point alone is a short line, so that it is seen."""
    parts: list[str] = []
    drawing = False
    for index, (x, y) in enumerate(points):
        if not math.isfinite(y):
            drawing = False
            continue
        parts.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}")
        followed = index + 1 < len(points) and math.isfinite(points[index + 1][1])
        if not drawing and not followed:
            parts.append("h2")
        drawing = True
    return "".join(parts)
