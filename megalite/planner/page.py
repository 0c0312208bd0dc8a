"""Reports as HTML: one page template, dark and light, for a telephone too; nothing from outside, and all there without scripts."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
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
