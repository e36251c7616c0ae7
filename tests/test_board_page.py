"""The HTML page of runs: what stands in it, and what Chromium makes of it."""
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from helpers import ROOT
from screens import CHROMIUM
from show import board_page
from test_watch import LINES, RESULT

RULER = "=" * 100
HEAD = f"import torch\n{RULER}\npython 3.13.1 torch 2.13.0\nhardware: 1 ranks x 2 threads of X\n{RULER}\n"


def add_run(tree, name, loss, lr, sample="return x"):
    folder = tree / name
    folder.mkdir(parents=True)
    steps = [f"step:{step}/90 train_loss:{loss + 5 / step:.4f} train_time:{step * 100}ms step_avg:100.00ms "
             f"tok/s:4000 lr_factor:1.000 eta:1s" for step in (1, 2, 50, 90)]
    lines = [HEAD + f"config preset=tiny\nconfig matrix_lr={lr}\nconfig seed=7", *steps,
             f"step:90/90 val_loss:{loss:.4f} val_bpb:{loss / 2:.4f} train_time:9000ms step_avg:100.00ms",
             f"final_model_exact val_loss:{loss:.8f} val_bpb:{loss / 2:.8f}",
             f"sample 1: def »{sample}", "        train_time_ms  9000", ""]
    (folder / "train.log").write_text("\n".join(lines))
    result = RESULT | dict(run_id=name, steps=90, tokens=360_000, bytes_total=10_000 + len(name), seed=7,
                           config=dict(preset="tiny", matrix_lr=lr, seed="7", num_layers="2"),
                           overrides={"matrix_lr": ["0.03", lr]} if lr != "0.03" else {})
    (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture
def page(tool, tmp_path):
    """(path, text) of a page of three runs, one with text that is no HTML."""
    add_run(tmp_path / "a tree", "one", 2.5, "0.03")
    add_run(tmp_path / "a tree", "two", 2.25, "0.02", sample="<script>alert(1)</script> & <b>")
    add_run(tmp_path / "a tree", "three", 10.5, "0.03")
    out = tmp_path / "board.html"
    code, said, err = tool("board", "--html", tmp_path / "a tree", "--out", out)
    assert code == 0 and "3 runs" in said and not err
    return out, out.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Tables as lists of rows of cells, links, and whatever would load something from elsewhere."""
    def __init__(self, text):
        super().__init__()
        self.tables = []
        self.links = []
        self.loads = []
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.in_cell = True
        if tag == "a":
            self.links.append(unquote(attrs["href"]))
        elif attrs.get("src") or tag == "link":
            self.loads.append(attrs)

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self.in_cell:
            self.tables[-1][-1][-1] += data


def test_what_stands_in_it(page):
    path, text = page
    reader = Reader(text)
    main, constants = reader.tables
    assert [row[0].strip() for row in main] == ["run", "● two", "● one", "● three"]     # the best first
    assert main[1][1:10] == ["tiny", "1.12500000", "2.2500", "", "9.0000", "90", "360,000", "10,003", "7"]
    assert [row[1] for row in constants] == ["matrix_lr", "0.02", "0.03", "0.03"] and len(constants[0]) == 2
    assert all((path.parent / link).is_file() for link in reader.links) and len(reader.links) == 6
    assert reader.loads == [] and "alert(1)" in text and "<script>alert" not in text
    assert "2.6000" not in text and '"loss"' in text        # the points are numbers of the plot
    assert path.stat().st_size < 4_000_000


def test_another_script_has_another_colour(tmp_path):
    for name, digest in (("one", "1"), ("two", "1"), ("three", "2")):
        add_run(tmp_path, name, 2.5, "0.03")
        path = tmp_path / name / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"code_sha256": digest}))
    groups = {row.name: row.group for row in board_page.rows_of([tmp_path], print)}
    assert groups["one"] == groups["two"] != groups["three"]


def test_runs_and_records_of_this_repository(tool, tmp_path):
    assert tool("board", "--html", ROOT / "records", "--out", tmp_path / "board.html")[0] == 0
    reader = Reader((tmp_path / "board.html").read_text())
    scores = [re.findall(r"_exact val_loss:\S+ val_bpb:(\S+)", path.read_text())[-1]
              for path in ROOT.glob("records/track_*/*/train*.log")]
    _, best, *others = reader.tables[0]
    assert len(others) == len(scores) - 1 and best[2] == min(scores, key=float)


def test_what_cannot_be_shown(tool, tmp_path, monkeypatch):
    code, _, err = tool("board", "--html", tmp_path, "--out", tmp_path / "x.html")
    assert code == 2 and "no run" in err
    assert tool("board", tmp_path)[0] == 2
    add_run(tmp_path, "one", 2.5, "0.03")
    monkeypatch.setattr(board_page, "LIMIT", 1000)
    code, _, err = tool("board", "--html", tmp_path, "--out", tmp_path / "x.html")
    assert code == 2 and "give fewer" in err and not (tmp_path / "x.html").exists()


def in_chromium(path, script, folder):
    """The page's elements after the script has run in it."""
    probe = folder / "probe.html"
    probe.write_text(path.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"),
                     encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1280,1600", "--virtual-time-budget=10000",
         "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout


SCRIPT = """
window.onerror = message => document.body.dataset.error = message;
const say = (name, value) => document.body.dataset[name] = JSON.stringify(value);
const order = () => [...document.querySelectorAll("tbody")[0].rows].map(row => row.cells[0].innerText);
const heads = [...document.querySelectorAll("th button")];
heads[3].click(); say("up", order()); heads[3].click(); say("down", order());
setTimeout(() => {
  const plot = Bokeh.documents[0].roots()[0], tools = plot.toolbar.tools.map(tool => tool.type);
  say("tools", tools); say("lines", plot.renderers.length);
  const view = Bokeh.index.get_one(plot), box = view.el.getBoundingClientRect();
  say("size", [box.width, box.height]);
  const before = plot.x_range.end;
  const canvas = view.canvas_view.events_el, at = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -500, bubbles: true, cancelable: true,
    clientX: at.left + 500, clientY: at.top + 200}));
  setTimeout(() => say("zoomed", plot.x_range.end < before), 1000);
}, 3000);
"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_in_a_browser(page, tmp_path):
    dom = in_chromium(page[0], SCRIPT, tmp_path)
    found = {name: json.loads(value.replace("&quot;", '"'))
             for name, value in re.findall(r'data-(up|down|tools|lines|size|zoomed)="([^"]*)"', dom)}
    assert "data-error" not in dom, re.search(r'data-error="[^"]*"', dom)
    assert [name.strip("● ") for name in found["up"]] == ["two", "one", "three"], found
    assert [name.strip("● ") for name in found["down"]] == ["three", "one", "two"]
    assert {"HoverTool", "WheelZoomTool", "BoxZoomTool"} <= {*found["tools"]} and found["lines"] == 9
    assert found["size"][0] > 900 and found["size"][1] > 500
    assert found["zoomed"] is True
