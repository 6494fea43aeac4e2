"""The look of the page, light or dark as the reader's system is, and the few lines that sort tables."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --text: #1c2128; --faint: #5b6570; --rule: #d5dae0; --band: #f4f6f8; --heat: 31, 119, 180;
  --s0: #1f6fb4; --s1: #d9480f; --s2: #2b8a3e; --s3: #c2255c; --s4: #7048c8; --s5: #93660a; --s6: #0b7f8a;
  --s7: #6b6f14;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --text: #e4e8ed; --faint: #9aa5b1; --rule: #38414b; --band: #1d232a;
    --heat: 88, 166, 255;
    --s0: #6cb2f5; --s1: #ff9d66; --s2: #6fcf7f; --s3: #ff86ab; --s4: #b79bff; --s5: #e0b24d; --s6: #4fcbd6;
    --s7: #c9cf5a;
  }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 21px; margin: 44px 0 4px; padding-top: 14px; border-top: 2px solid var(--rule); }
h3 { font-size: 16px; margin: 28px 0 0; overflow-wrap: anywhere; }
h4 { font-size: 14px; margin: 20px 0 6px; }
a { color: var(--s0); }
p { margin: 4px 0 10px; max-width: 90ch; }
.origin, .explanation, nav { color: var(--faint); }
.origin { overflow-wrap: anywhere; font-size: 13px; }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: 4px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
thead th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; min-width: 190px; max-width: 330px; overflow-wrap: anywhere; }
tr.dense th { font-weight: 600; }
tbody tr:hover { background: var(--band); }
tr.dense { font-weight: 600; background: var(--band); }
tr.foreign { font-style: italic; }
.number { text-align: right; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.heat { background: rgba(var(--heat), var(--share)); }
td.raw { font: 12px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
.sortable.live thead th { cursor: pointer; }
.sortable.live thead th:hover { color: var(--text); }
.badge {
  font-size: 11px; font-style: normal; font-weight: 400; color: var(--faint); border: 1px solid var(--rule);
  border-radius: 8px; padding: 0 6px;
}
.pictures { display: flex; flex-wrap: wrap; gap: 14px 24px; margin: 14px 0 4px; }
figure { margin: 0; max-width: 100%; }
figcaption { font-size: 13px; font-weight: 600; margin: 0 0 4px; max-width: 540px; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .tick, svg .title { fill: var(--faint); }
svg .name { font-size: 11px; }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .grid { stroke: var(--rule); stroke-width: 1; opacity: 0.7; }
svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .base { stroke: var(--text); stroke-width: 1; stroke-dasharray: 2 4; opacity: 0.6; }
.ink { --own: var(--text); } .s0 { --own: var(--s0); } .s1 { --own: var(--s1); } .s2 { --own: var(--s2); }
.s3 { --own: var(--s3); } .s4 { --own: var(--s4); } .s5 { --own: var(--s5); } .s6 { --own: var(--s6); }
.s7 { --own: var(--s7); }
svg .mark, svg .fill { fill: var(--own); stroke: var(--own); stroke-width: 1.6; }
svg .mark.foreign { fill: var(--paper); }
svg .fill.foreign { fill-opacity: 0.25; stroke-dasharray: 3 2; }
svg .line { fill: none; stroke: var(--own); stroke-width: 1.8; }
svg .line.foreign { stroke-dasharray: 6 4; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 0 0 12px; padding: 0; }
.legend li { display: flex; align-items: center; gap: 6px; font-size: 12px; overflow-wrap: anywhere; }
.legend svg { flex: none; }
details { margin: 6px 0; }
summary { cursor: pointer; color: var(--faint); font-size: 13px; }
.skipped { margin: 0; padding-left: 20px; font-size: 13px; overflow-wrap: anywhere; }
@media print { details > * { display: revert; } .scroll { overflow: visible; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.classList.add("live");
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const column = head.cellIndex, up = head.dataset.up !== "1";
    head.dataset.up = up ? "1" : "0";
    const key = (row) => {
      const cell = row.cells[column], value = cell.dataset.value;
      return value === undefined ? (cell.classList.contains("number") ? NaN : cell.textContent) : +value;
    };
    const order = (a, b) => {
      const x = key(a), y = key(b);
      if (typeof x === "number" && typeof y === "number") return isNaN(x) - isNaN(y) || x - y;
      return String(x).localeCompare(String(y));
    };
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a)));
    body.append(...rows);
  });
}
"""
