"""The HTML page of runs: what stands in it, and what Chromium makes of it."""
import json
import re
import shutil
import subprocess
from html import unescape
from urllib.parse import unquote

import pytest

from helpers import ROOT
from records.show import board_chart, board_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RULER = "=" * 100
HEAD = f"import torch\n{RULER}\npython 3.13.1 torch 2.13.0\nhardware: 1 ranks x 2 threads of X\n{RULER}\n"


def add_run(tree, name, loss, lr, sample="return x", scored="full", seed=7):
    """A run as the trainer leaves it."""
    folder = tree / name
    folder.mkdir(parents=True)
    whole = scored == "full"
    val_loss = "val_loss" if whole else "val_loss_partial"
    bpb = f" val_bpb:{loss / 2:.8f}" if whole else ""
    steps = [f"step:{step}/90 train_loss:{loss + 5 / step:.4f} train_time:{step * 100}ms step_avg:100.00ms "
             f"tok/s:4000 lr_factor:1.000 eta:1s" for step in (1, 2, 50, 90)]
    lines = [HEAD + "data: embedded train tokens:9 in 1 shards, val tokens:1001",
             f"eval settings: eval_tokens:{scored} eval_context:64 eval_stride:64 eval_window:full",
             f"config preset=tiny\nconfig matrix_lr={lr}\nconfig seed={seed}", *steps,
             f"step:90/90 {val_loss}:{loss:.4f}{bpb[:15]} train_time:9000ms step_avg:100.00ms",
             f"final_model_exact {val_loss}:{loss:.8f}{bpb}",
             "        train_time_ms  9000", ""]
    (folder / "samples.txt").write_text(f"sample 1: def »{sample}\n")
    (folder / "train.log").write_text("\n".join(lines))
    (folder / "result.json").write_text(json.dumps(dict(
        preset="tiny", val_loss=loss if whole else None, val_bpb=loss / 2 if whole else None,
        code_sha256="1" * 64, train_time_ms=9000, tokens=360_000, bytes_total=10_000 + len(name),
        overrides={"matrix_lr": ["0.03", lr]} if lr != "0.03" else {})))
    return folder


def add_record(tree, name, losses):
    """A record's folder: a log and a result for each seed."""
    home = tree / "track_tiny" / name
    home.mkdir(parents=True)
    (home / "submission.json").write_text("{}")
    for seed, loss in enumerate(losses):
        folder = add_run(tree / "scratch", f"{name}_{seed}", loss, "0.03", seed=seed)
        end = f"_seed{seed}" if seed else ""
        (folder / "train.log").rename(home / f"train{end}.log")
        (folder / "result.json").rename(home / f"result{end}.json")
    shutil.rmtree(tree / "scratch")


@pytest.fixture
def page(tool, tmp_path):
    """(path, text) of a page of three runs, one with text that is no HTML, and two records."""
    add_run(tmp_path / "a tree", "lr_run_one", 2.5, "0.03")
    add_run(tmp_path / "a tree", "lr_run_two", 2.25, "0.02",
            sample="<script>alert(1)</script> & <b>")
    add_run(tmp_path / "a tree", "lr_run_three", 10.5, "0.03")
    add_record(tmp_path / "a tree", "2026-01-02_Better", [2.0, 2.1, 2.2])
    add_record(tmp_path / "a tree", "2026-01-01_First", [3.0, 3.1])
    out = tmp_path / "board.html"
    code, said, err = tool("board", "--html", tmp_path / "a tree", "--out", out)
    assert code == 0 and "8 runs" in said and not err
    return out, out.read_text(encoding="utf-8")


def tables_of(text):
    """The tables of a page, as lists of rows of cells."""
    def parts(tag, whole):
        return re.findall(rf"<{tag}[ >].*?</{tag}>", whole, re.S)

    return [[[unescape(re.sub("<[^>]*>", "", cell)) for cell in parts("t[dh]", row)]
             for row in parts("tr", table)] for table in parts("table", text)]


def test_what_stands_in_it(page):
    path, text = page
    (main,) = tables_of(text)
    assert main[0] == ["run", "val_bpb", "val_loss", "seconds", "steps", "tokens", "bytes", "seed", "files"]
    # one's own first, the best of them first; then records with their runs, the best first
    names = [row[0] for row in main[1:]]
    logs = ["train.log", "train_seed1.log", "train_seed2.log"]
    assert names == ["lr_run_twomatrix_lr=0.02", "lr_run_one", "lr_run_three",
                     "Betterrecord of 2026-01-02 3 runs", *logs,
                     "Firstrecord of 2026-01-01 2 runs", *logs[:2]]
    assert main[1][1:8] == ["1.12500000", "2.2500", "9.0000", "90", "360,000", "10,010", "7"]
    assert main[4][1:8] == ["1.05000000 ± 0.0500", "2.1000 ± 0.1000", "9.0000 ± 0.0000", "90", "360,000",
                            "10,019", "n=3"]
    assert "<p>Runs: 3. Records: 2." in text
    body = re.sub(r"(<script[^>]*>).*?</script>", r"\1", text, flags=re.S)
    links = [unquote(link) for link in re.findall(r'<a href="([^"]*)"', body)]
    assert all((path.parent / link).is_file() for link in links) and len(links) == 3 * 2 + 7 * 2
    assert not re.search(r"<link|<[^>]* src=", body)            # nothing comes from elsewhere
    assert "alert(1)" in text and "<script>alert" not in text


def test_scores_of_other_tokens_are_apart(tool, tmp_path):
    """A run that scored a part of val has a section of its own, which says what its loss is; so has another
    text."""
    add_run(tmp_path / "logs", "whole", 2.5, "0.03")
    add_run(tmp_path / "logs", "part", 1.5, "0.03", scored="500")
    other = add_run(tmp_path / "logs", "other", 1.0, "0.03") / "train.log"
    other.write_text(other.read_text().replace("val tokens:1001", "val tokens:2001"))
    assert tool("board", "--html", tmp_path / "logs", "--out", tmp_path / "x.html")[0] == 0
    text = (tmp_path / "x.html").read_text()
    sections = text.split("<section>")[1:]
    assert len(sections) == 3
    titles = {re.search("<b>(.*)</b>", part)[1]: re.search("<h2>(.*)</h2>", part)[1] for part in sections}
    assert titles == {"whole": "tiny: all 1,000 val tokens of embedded",
                      "part": "tiny: the first 500 of 1,001 val tokens of embedded",
                      "other": "tiny: all 2,000 val tokens of embedded"}
    part, = [part for part in sections if "the first 500" in part]
    assert "val_loss_partial: the loss on the first 500 of 1,001 val tokens" in part
    assert "val_loss_partial" in tables_of(part)[0][0] and "val_bpb" not in tables_of(part)[0][0]


def section_of(tree):
    (section,) = board_rows.sections_of(board_rows.items_of(board_rows.runs_below([tree], print)))
    return section


def test_names_and_what_was_asked_for(tmp_path):
    add_run(tmp_path, "relu", 2.1, "0.03")
    add_run(tmp_path, "gelu", 2.2, "0.02")
    add_run(tmp_path, "gelu_again", 2.3, "0.02", seed=8)
    section = section_of(tmp_path)
    assert [(item.name, item.note) for item in section.items] == [
        ("relu", ""), ("gelu", "matrix_lr=0.02"), ("gelu_again", "matrix_lr=0.02")]
    # one colour for one script and setting, whatever its runs are called
    assert [*board_chart.names_of(section).values()] == ["relu", "gelu and 1 more"]


def test_curves_are_smooth_and_records_grey(tmp_path):
    add_run(tmp_path, "one", 2.5, "0.03")
    add_record(tmp_path, "2026-01-02_Better", [2.0, 2.1, 2.2])
    add_record(tmp_path, "2026-01-01_First", [3.0, 3.1])
    for log in (tmp_path / "track_tiny").glob("*/*.log"):       # single batches, every other one far below
        text = log.read_text()
        loss = float(re.search(r"final_model_exact val_loss:(\S+)", text)[1])
        steps = "".join([f"step:{step}/90 train_loss:{loss + step % 2 - 0.5:.4f} train_time:{step}00ms "
                         "step_avg:1.00ms\n" for step in range(1, 91)])
        log.write_text(re.sub(r"(step:\d+/90 train_loss.*\n)+", steps, text))
    section = section_of(tmp_path)
    own, better, first = section.items
    assert board_chart.colors_of(section) == {own.key: board_chart.PALETTE[0], better.key: board_chart.BEST,
                                              first.key: board_chart.GREY}
    lines = board_chart.chart_of(section).renderers
    curve = lines[0].data_source.data["loss"]
    assert all(abs(loss - 2.1) < 0.2 for loss in curve)
    assert [line.data_source.data["run"][0] for line in lines] == [
        name + end for name in ("Better", "First", "one") for end in ("", ": final val")]
    # without runs of one's own, records have colours
    alone = section._replace(items=[better, first])
    assert {*board_chart.colors_of(alone).values()} == {*board_chart.PALETTE[:2]}


def test_what_cannot_be_shown(tool, tmp_path):
    code, _, err = tool("board", "--html", tmp_path, "--out", tmp_path / "x.html")
    assert code == 2 and "no run" in err
    assert tool("board", tmp_path)[0] == 2


def in_frames(path, script, folder, widths):
    """{width: what the page says to the page around it, when its script has run in frames of these widths}"""
    probe = folder / "probe.html"
    probe.write_text(path.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"),
                     encoding="utf-8")
    frames = "".join([f'<iframe id=w{width} src="{probe.as_uri()}" '
                      f'style="border:0;width:{width}px;height:1500px"></iframe>' for width in widths])
    outer = folder / "outer.html"
    outer.write_text("""<script>window.onmessage = event => {
        for (const frame of document.querySelectorAll("iframe"))
            if (frame.contentWindow === event.source) frame.dataset.said = event.data;
        };</script>""" + frames)
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--window-size=1700,6000", "--virtual-time-budget=15000", "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, timeout=120)
    said = re.findall(r'<iframe id="w(\d+)"[^>]* data-said="([^"]*)"', done.stdout)
    return {int(width): json.loads(text.replace("&quot;", '"')) for width, text in said}


SCRIPT = """
const found = {};
window.onerror = message => { found.error = message; };
const table = document.querySelector("table.runs"), own = () => [...table.tBodies].map(
  body => body.querySelector("b").innerText);
const heads = [...table.querySelectorAll("th button")];
heads[2].click(); found.up = own(); heads[2].click(); found.down = own();
const opener = document.querySelector(".open");
const heights = () => [...opener.closest("tbody").querySelectorAll(".part")].map(row => row.offsetHeight);
found.closed = heights(); opener.click(); found.open = heights();
setTimeout(() => {
  const plot = Bokeh.documents[0].roots()[0];
  found.tools = plot.toolbar.tools.map(tool => tool.type); found.lines = plot.renderers.length;
  found.legend = plot.below.find(part => part.type === "Legend").click_policy;
  const view = Bokeh.index.get_one(plot), box = view.el.getBoundingClientRect();
  found.size = [box.width, box.height]; found.above = box.bottom <= table.getBoundingClientRect().top;
  const page = document.documentElement; found.page = [page.scrollWidth, page.clientWidth];
  found.right = Math.max(...[...document.querySelectorAll("td, th")].map(
    part => part.getBoundingClientRect().right));
  const before = plot.x_range.end;
  const canvas = view.canvas_view.events_el, at = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -500, bubbles: true, cancelable: true,
    clientX: at.left + at.width / 2, clientY: at.top + 200}));
  setTimeout(() => {
    found.zoomed = plot.x_range.end < before; parent.postMessage(JSON.stringify(found), "*");
  }, 1000);
}, 3000);
"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_in_a_browser(page, tmp_path):
    """Sorts, opens, zooms, and fits the width of a laptop, of a screen and of a phone."""
    widths = (390, 1366, 1600)
    said = in_frames(page[0], SCRIPT, tmp_path, widths)
    assert {*said} == {*widths}
    for width, found in said.items():
        assert "error" not in found, found["error"]
        assert found["up"] == ["Better", "lr_run_two", "lr_run_one", "First", "lr_run_three"], found
        assert found["down"] == ["lr_run_three", "First", "lr_run_one", "lr_run_two", "Better"]
        assert found["closed"] == [0, 0] and min(found["open"]) > 10
        assert {"HoverTool", "WheelZoomTool", "BoxZoomTool"} <= {*found["tools"]}
        assert found["lines"] == 3 * 2 + 2 * 2 and found["legend"] == "hide"
        content, view = found["page"]       # less than the width by that of a scroll bar
        assert content <= view and width - 20 <= view <= width and found["right"] <= view
        assert found["size"][0] > width - 170 and found["size"][1] > 400 and found["above"]
        assert found["zoomed"] is True
