"""Style and script of the page of runs: a table on a wide window, a card for each row on a phone."""

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em auto; max-width: 1440px; padding: 0 16px;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6em; margin: 0; } h2 { font-size: 1.25em; margin: 1.6em 0 .5em; }
p { margin: .4em 0; } .same { color: #666; } small { color: #777; font-weight: 400; }
.dot { display: inline-block; width: .75em; height: .75em; border-radius: 50%; margin-right: .45em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; margin-top: .6em; }
th, td { padding: .3em .6em; border-bottom: 1px solid #e2e2e2; text-align: left; vertical-align: top; }
td.n { text-align: right; } .runs td, .runs th { white-space: nowrap; }
td, th { overflow-wrap: anywhere; } .runs td:first-child { white-space: normal; }
@media (min-width: 761px) { .runs td:first-child { min-width: 15em; } }
.runs td[data-label=hardware] { white-space: normal; overflow-wrap: normal; }
.runs td:first-child small { display: block; margin-left: 1.2em; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button::after { content: " \\2195"; color: #999; }
button:focus-visible { outline: 2px solid #1f77b4; }
.own { background: #eaf3fd; } .own td:first-child { border-left: 3px solid #1f77b4; }
.open { font: inherit; border: 0; background: none; color: #1558a0; cursor: pointer; padding: 0 .5em; }
.open::before { content: "\\25b8 "; } .open[aria-expanded=true]::before { content: "\\25be "; }
.part { background: #f7f7f7; } [hidden] { display: none; }
.constants td, .constants th { white-space: normal; } summary { cursor: pointer; margin-top: .6em; }
pre { background: #f5f5f5; padding: .8em; overflow-x: auto; }
@media (max-width: 760px) {
  body { margin: .8em auto; padding: 0 10px; }
  table, thead, tbody, tr, td, tbody th { display: block; } tr[hidden] { display: none; }
  .runs thead tr { display: flex; flex-wrap: wrap; } .runs thead th { border: 0; padding: .1em .5em; }
  .constants thead { display: none; }
  tbody tr { padding: .4em .2em; border-bottom: 1px solid #ccc; }
  td { border: 0; padding: .1em .4em; display: flex; justify-content: space-between; gap: 1em; }
  td.n { text-align: right; } td:not(.n) { text-align: left; }
  td::before { content: attr(data-label); color: #777; } td:first-child::before { content: none; }
  .constants td:first-child::before, .constants td::before { content: attr(data-label); }
  .runs td:first-child { display: block; } .runs td:last-child { flex-wrap: wrap; white-space: normal; }
  .runs td:not([data-value]):not(:last-child) { display: none; }
}
"""
# A click on the head of a column sorts by it, another one turns it round; cells without a value come last.
# A record opens to its runs.
SCRIPT = """
for (const button of document.querySelectorAll(".runs th button")) button.onclick = () => {
  const head = button.parentElement, table = head.closest("table"), bodies = [...table.tBodies];
  const down = head.ariaSort === "ascending";
  for (const other of table.querySelectorAll("th")) other.ariaSort = "none";
  head.ariaSort = down ? "descending" : "ascending";
  const value = body => body.rows[0].cells[head.cellIndex].dataset.value ?? "";
  bodies.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (!x || !y) return !x - !y;
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return down ? -order : order;
  });
  table.append(...bodies);
};
for (const button of document.querySelectorAll(".open")) button.onclick = () => {
  const open = button.ariaExpanded !== "true";
  button.ariaExpanded = open;
  for (const row of button.closest("tbody").querySelectorAll(".part")) row.hidden = !open;
};
"""
