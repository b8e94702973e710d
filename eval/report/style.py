"""The looks of a page, light and dark, on a desk and on a phone."""

from __future__ import annotations

_LIGHT = (
    "--a:#2563a8;--b:#b3560f;--c:#2f7a41;--d:#8a3f9c;--e:#7a6a16;--f:#5b6673;--ink:#1d2329;--soft:#5b6673;"
    "--line:#dfe3e8;--back:#fff;--bad:#b3261e;--tint:37,99,168;--other:179,86,15;--free:47,122,65"
)
_DARK = (
    "--a:#6aa8ee;--b:#eb9350;--c:#74c487;--d:#c99ad6;--e:#d3c15f;--f:#a7b1bb;--ink:#e6e9ec;--soft:#a7b1bb;"
    "--line:#363d45;--back:#15191d;--bad:#ff8a80;--tint:106,168,238;--other:235,147,80;--free:116,196,135"
)

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
body{{background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;
padding:0 1em;overflow-wrap:break-word}}
h1{{font-size:1.5em;margin-bottom:.1em}}h2{{font-size:1.1em;margin:1.8em 0 .4em}}h3{{font-size:1em;margin:1.2em 0 0}}
.soft,figcaption{{color:var(--soft);font-size:13px}}.bad{{color:var(--bad);font-weight:600}}
.scroll{{overflow-x:auto;max-width:100%}}
table{{border-collapse:collapse;margin:.4em 0}}
td,th{{padding:.2em .8em .2em 0;text-align:left;border-bottom:1px solid var(--line)}}
td.n{{text-align:right;font-variant-numeric:tabular-nums}}
.facts td{{text-align:left;overflow-wrap:anywhere;vertical-align:top}}.facts td:first-child{{min-width:9em}}
.charts{{display:flex;flex-wrap:wrap;gap:1.2em;align-items:flex-start}}
figure{{margin:0;max-width:100%;min-width:0}}.charts figure{{flex:0 1 460px}}
svg{{font:11px system-ui,sans-serif;max-width:100%;height:auto;display:block}}.wide svg{{max-width:none}}
svg text{{fill:var(--ink)}}svg .in{{fill:var(--back)}}.title{{font-weight:600;font-size:13px}}
.grid{{stroke:var(--line)}}.mark{{stroke:var(--ink);stroke-dasharray:5 4}}.whisker{{stroke:var(--ink);fill:none}}
.path{{stroke:var(--a);stroke-width:3;fill:none}}.branch{{stroke:var(--soft);stroke-dasharray:3 3;fill:none}}
.kept rect{{fill:rgba(var(--tint),.25);stroke:var(--a);stroke-width:2}}.kept text{{font-weight:700}}
.lost rect{{fill:none;stroke:var(--soft);stroke-dasharray:3 3}}
details{{margin:.4em 0}}summary{{cursor:pointer;font-size:13px}}
.prompt{{white-space:pre-wrap;border-left:3px solid var(--line);padding-left:.6em;color:var(--soft);margin:.4em 0}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;font-size:14px;line-height:1.9}}
.drafted{{text-decoration:underline;text-underline-offset:3px}}
.corrected{{text-decoration:underline wavy;text-underline-offset:3px;background:rgba(var(--other),.22)}}
.bonus{{text-decoration:underline double;text-underline-offset:3px;background:rgba(var(--free),.22)}}
{"".join(f".d{d}{{background:rgba(var(--tint),{0.06 + 0.07 * d:.2f})}}" for d in range(1, 7))}
.legend{{list-style:none;padding:0;font-size:13px}}
@media (max-width:600px){{body{{margin:1em auto;font-size:14px}}}}
@media print{{details{{display:block}}}}
"""
