"""CSS of pages, light or dark by the reader's system setting or by a button."""

LIGHT = (
    "--paper:#fff;--card:#f6f8fa;--ink:#1f2328;--faint:#59636e;--line:#d1d9e0;--hover:#eaeef2;"
    "--accent:#0969da;--split:#ddf4ff;--split-ink:#0550ae;--whole:#e6e9ed;--whole-ink:#424a53;"
    "--addend:#ffe7d1;--addend-ink:#953800;--bar:#4e79a7;--box:#e8873a;--back:#59a14f;--half:#76b7b2;--rest:#d4b02a;"
    "--good:#dafbe1;--good-ink:#116329;--bad:#ffebe9;--bad-ink:#a40e26"
)
DARK = (
    "--paper:#0d1117;--card:#151b23;--ink:#e6edf3;--faint:#9198a1;--line:#30363d;--hover:#1c232c;"
    "--accent:#58a6ff;--split:#12304f;--split-ink:#a5d6ff;--whole:#2a313a;--whole-ink:#c4ccd5;"
    "--addend:#4a2a10;--addend-ink:#ffc690;--bar:#6b9bd1;--box:#f0a05c;--back:#74c06a;--half:#8ccbc6;--rest:#e6c860;"
    "--good:#12361f;--good-ink:#7ee2a0;--bad:#4b1a1d;--bad-ink:#ffb3ad"
)

STYLE = (
    f":root{{color-scheme:light;{LIGHT}}}\n"
    f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{DARK}}}}}\n"
    f":root[data-theme=dark]{{color-scheme:dark;{DARK}}}\n"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
  font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 64px}
header{display:flex;justify-content:space-between;align-items:flex-start;gap:16px}
h1{font-size:26px;line-height:1.2;margin:0 0 8px}
h2{font-size:18px;margin:40px 0 4px}
p{margin:4px 0 12px}
.lead{font-size:17px;max-width:62em}
.note{color:var(--faint);font-size:13.5px;max-width:72em}
code,.mono{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
button,input{font:inherit;font-size:13.5px;color:var(--ink);background:var(--card);
  border:1px solid var(--line);border-radius:6px;padding:5px 11px}
button{cursor:pointer;white-space:nowrap}
button:hover{background:var(--hover)}
:focus-visible{outline:2px solid var(--accent);outline-offset:1px}
.numbers{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0 8px}
.numbers div{background:var(--card);border:1px solid var(--line);border-radius:8px;min-width:118px;
  padding:10px 16px}
.numbers b{display:block;font-size:21px;line-height:1.25;font-variant-numeric:tabular-nums}
.numbers span{color:var(--faint);font-size:13px}
.advice{list-style:none;margin:10px 0;padding:0;display:grid;gap:10px}
.advice li{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--box);
  border-radius:6px;padding:10px 16px}
.advice .do{display:block;color:var(--good-ink);font-weight:550}
.bars{display:grid;grid-template-columns:max-content 1fr max-content max-content;gap:7px 14px;
  align-items:center;margin:12px 0}
.bars i{display:block;height:16px;background:var(--bar);border-radius:3px;min-width:2px}
.bars .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.stacks{display:grid;grid-template-columns:max-content 1fr max-content;gap:7px 14px;
  align-items:center;margin:12px 0}
.stacks .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.stacks div{display:flex;height:18px;border-radius:3px;overflow:hidden}
.stacks i{display:block;height:100%}
.legend{font-size:13.5px;color:var(--faint)}
.tools{display:flex;gap:10px;align-items:center;margin:10px 0}
.tools input{width:min(340px,60vw)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:6px 11px;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
tbody tr:hover{background:var(--hover)}
th{background:var(--card);font-weight:600;font-size:13px;white-space:nowrap;position:sticky;top:0}
th button{all:unset;cursor:pointer;display:inline-block;width:100%}
th button:focus-visible{outline:2px solid var(--accent)}
th[aria-sort=ascending] button::after{content:" \\25B2";font-size:10px}
th[aria-sort=descending] button::after{content:" \\25BC";font-size:10px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.site{width:34%;max-width:0}
td.site span{display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
td.site code{display:block;color:var(--faint);overflow:hidden;text-overflow:ellipsis;
  white-space:nowrap}
td.lays,td.moves{white-space:nowrap}
.sbp{font:600 12px/1 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;padding:2px 6px;
  border-radius:4px;background:var(--whole);color:var(--whole-ink);margin:1px 0;
  display:inline-block}
.sbp.s{background:var(--split);color:var(--split-ink)}
.sbp.p{background:var(--addend);color:var(--addend-ink)}
.move{color:var(--faint);font-size:12.5px}
.tag{font-size:12px;border-radius:10px;padding:1px 9px;background:var(--bad);color:var(--bad-ink);
  white-space:nowrap}
.tag.gone,.tag.less{background:var(--good);color:var(--good-ink)}
.tag.changed{background:var(--addend);color:var(--addend-ink)}
.tag.plain{background:var(--whole);color:var(--whole-ink)}
.tag.box{background:var(--addend);color:var(--addend-ink)}
.small{display:grid;grid-template-columns:5.6em minmax(48px,1fr);gap:8px;align-items:center;
  font-size:12.5px;font-variant-numeric:tabular-nums;white-space:nowrap}
.small>span{text-align:right}
.small i{display:block;height:9px;border-radius:2px;background:var(--bar);min-width:2px}
.small.sent i{background:var(--box)}
.listing{width:100%;border-collapse:collapse}
.listing td{padding:1px 10px;border:0;vertical-align:top}
.listing td.no{color:var(--faint);text-align:right;width:1%;user-select:none}
.listing td.src{white-space:pre-wrap;padding-left:14px}
.listing tr.none td.src{color:var(--faint)}
.listing tr.boxes td.no{box-shadow:inset 4px 0 var(--box)}
.listing td.lays{white-space:nowrap;width:1%;font-size:12.5px}
.listing td.sent{width:180px;min-width:180px}
.listing tr.head td{padding:9px 10px 5px;background:var(--card)}
.listing tr.head:not(:first-child) td{border-top:1px solid var(--line)}
.listing tr.head code{font-weight:600}
.listing tr.head span{color:var(--faint);font-size:13px}
.stages{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(430px,1fr);gap:14px;
  overflow-x:auto;margin:12px 0;padding-bottom:6px}
.stages>section{background:var(--card);border:1px solid var(--line);border-radius:8px;
  padding:10px 14px;min-width:0}
.stages h3{font-size:15.5px;margin:0}
.stages .note{margin:0 0 8px;overflow-wrap:anywhere}
.stages code.at{display:block;color:var(--faint);border-top:1px solid var(--line);margin-top:7px;
  padding-top:7px}
.stages code{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.stages div.step{display:grid;grid-template-columns:minmax(90px,1fr) max-content 118px;gap:10px;
  align-items:center;padding:2px 0 2px 12px;font-size:12.5px}
.stages div.step>span{white-space:nowrap}
.stages div.step .small{grid-template-columns:4.6em minmax(30px,1fr)}
.stages div.moves{background:var(--paper);border-left:4px solid var(--box);border-radius:4px;
  padding:5px 0 5px 8px;margin:5px 0;row-gap:2px}
.stages div.moves code{grid-column:1/-1}
.stages div.moves>span:nth-child(2){grid-column:1/3}
.drawing{overflow-x:auto;border:1px solid var(--line);border-radius:8px;margin:10px 0}
.drawing svg{display:block;--empty:var(--card)}
td.long{max-width:0;width:46%}
td.long code{display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
tr.boxes td:first-child{box-shadow:inset 4px 0 var(--box)}
details{margin:14px 0}
summary{cursor:pointer;font-weight:600}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;margin:0 5px 0 14px}
#time{display:block;width:100%;background:var(--card);border:1px solid var(--line);
  border-radius:8px;cursor:grab;touch-action:none}
#told{min-height:1.5em}
@media(max-width:640px){main{padding:18px 12px}header{flex-direction:column-reverse}}
/* On a narrow screen the cells of a line flow, and its numbers say what they count. */
@media(max-width:760px){
  #lines,#lines tbody,#lines td{display:block}
  #lines tr{display:flex;flex-wrap:wrap;align-items:baseline;column-gap:14px;
    border-bottom:1px solid var(--line)}
  #lines th{border:0}
  #lines tbody tr{padding:7px 11px}
  #lines td{border:0;padding:1px 0;width:auto;max-width:none;white-space:normal;text-align:left}
  #lines td.n{color:var(--faint);font-size:13px}
  #lines td.n::before{content:attr(data-head) " "}
  #lines td.site{flex-basis:100%}
  #lines td:empty,#lines td.site code,#lines tr[hidden]{display:none}
  .bars{grid-template-columns:minmax(0,max-content) minmax(40px,1fr) max-content max-content;
    gap:7px 8px}
  .bars code{overflow-wrap:anywhere}
}
@media print{button,.tools{display:none}}
"""
)
