"""The style sheet of the plan's page."""

STYLE = """
:root { --ink:#1d2733; --quiet:#66727f; --line:#d8dee5; --paper:#ffffff; --ground:#f5f7f9;
  --c0:#1f5fa8; --c1:#a8611f; --c2:#2d7a4f; --c3:#7a3f8f; --data:#8a94a0; }
@media (prefers-color-scheme: dark) { :root { --ink:#e3e8ee; --quiet:#93a0ad; --line:#37424d;
  --paper:#1b222a; --ground:#12171d; --c0:#6aa7ea; --c1:#e0a060; --c2:#6cc295; --c3:#c391d6;
  --data:#7b8793; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink);
  font:14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 24px 64px; }
h1 { font-size:22px; font-weight:650; margin:0 0 6px; }
h2 { font-size:13px; font-weight:600; color:var(--quiet); margin:22px 0 8px; }
.quiet { color:var(--quiet); }
.mesh { display:flex; flex-wrap:wrap; gap:8px; align-items:center; margin:0; }
.axis { border:1px solid currentColor; border-radius:4px; padding:1px 8px; font-size:13px; }
.a0 { color:var(--c0); } .a1 { color:var(--c1); } .a2 { color:var(--c2); }
.data { color:var(--data); }
.columns { display:grid; grid-template-columns:minmax(0,1.7fr) minmax(0,1fr); gap:36px; }
@media (max-width:860px) { .columns { grid-template-columns:1fr; gap:0; } }
section ul { list-style:none; margin:8px 0 0; padding:0; }
section li { margin:3px 0; }
.legend li { display:flex; gap:10px; align-items:center; }
.legend li > :first-child { flex:none; }
table.cost { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; }
.cost th { text-align:right; font-weight:500; color:var(--quiet); padding:3px 10px; }
.cost td { text-align:right; padding:3px 10px; border-top:1px solid var(--line); }
.cost th:nth-child(-n+2), .cost td:nth-child(-n+2) { text-align:left; padding-left:0; }
.dot { display:inline-block; width:9px; height:9px; border-radius:50%; background:currentColor;
  margin-right:7px; }
details { margin:0; }
summary { cursor:pointer; list-style:none; display:flex; flex-wrap:wrap; gap:4px 9px;
  align-items:baseline; padding:4px 10px; }
summary::-webkit-details-marker { display:none; }
summary::before { content:"\\25B8"; color:var(--quiet); font-size:11px; width:10px; }
details[open] > summary::before { content:"\\25BE"; }
summary .name { font-weight:600; }
summary .bytes { font-size:13px; }
.plain > :not(summary) { margin-left:20px; }
.plain > summary .name { font-weight:500; color:var(--quiet); }
.box { border:1px solid var(--line); border-radius:6px; background:var(--paper); margin:8px 0;
  overflow:hidden; }
.region { border-style:dashed; border-color:var(--quiet); }
.kind { font-size:12px; color:var(--quiet); border:1px solid var(--line); border-radius:3px;
  padding:0 6px; }
.kind.opaque { border-style:dashed; border-color:var(--quiet); }
.inside { padding:2px 12px 2px 20px; }
.edges { background:var(--ground); padding:3px 12px; }
.edges.in { border-top:1px solid var(--line); border-bottom:1px solid var(--line); }
.edges.out { border-top:1px solid var(--line); margin-top:4px; }
.edge { display:flex; flex-wrap:wrap; gap:2px 10px; align-items:center; padding:2px 0;
  font-size:13px; }
.sign { color:var(--quiet); width:10px; }
.tensor { min-width:130px; }
.arrow { color:var(--quiet); }
.move { font-weight:550; }
.back { color:var(--quiet); font-weight:400; }
.bytes { margin-left:auto; color:var(--quiet); font-variant-numeric:tabular-nums; }
.only { color:var(--quiet); font-size:12px; font-style:italic; }
.parameter { display:grid; align-items:center; gap:2px 14px; padding:2px 0 2px 10px; font-size:13px;
  grid-template-columns:170px 250px max-content 1fr; }
.parameter:hover, .edge:hover { background:color-mix(in srgb, var(--line) 40%, transparent); }
.parameter .only { grid-column:1 / -1; }
.shape { font-variant-numeric:tabular-nums; color:var(--quiet); }
.local { color:var(--ink); }
.role { color:var(--quiet); }
.marks { display:inline-flex; gap:4px; }
.mark { display:inline-block; width:60px; text-align:center; border:1px solid var(--line);
  border-bottom:2px solid var(--here, var(--line)); border-radius:3px; font-size:12px;
  line-height:19px; white-space:nowrap; overflow:hidden; }
.mark.whole { color:var(--quiet); }
.mark.cut { background:var(--here); border-color:var(--here); color:var(--paper); }
.mark.sum { border:1px dashed var(--here); color:var(--here); }
.mark.a0 { --here:var(--c0); } .mark.a1 { --here:var(--c1); } .mark.a2 { --here:var(--c2); }
.mark i { font-style:normal; color:var(--here, var(--quiet)); margin-left:4px; }
@media (max-width:700px) { .parameter { grid-template-columns:1fr; } .tensor { min-width:0; } }
@media print { .box { break-inside:avoid; } }
"""
