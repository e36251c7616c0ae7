"""Pictures of `record plot` and `record compare`: names, frames, legends."""
import matplotlib.figure
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from helpers import ROOT
from records.judge import logs
from records.show import curves


@pytest.fixture
def figures(monkeypatch):
    """What is drawn, in place of files."""
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    return drawn


def legend(axes):
    """The entries of the legend below a picture's axes."""
    box, = axes.figure.legends
    return [text.get_text() for text in box.get_texts()]


def demand_whole(axes):
    """The title is not clipped, and the legend covers no part of the axes."""
    figure = axes.figure
    FigureCanvasAgg(figure).draw()
    title = axes.title.get_window_extent()
    frame = axes.get_window_extent()
    box = figure.legends[0].get_window_extent()
    assert 0 <= title.x0 and title.x1 <= figure.bbox.x1 and title.y1 <= figure.bbox.y1
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0 and box.y1 <= frame.y0


@pytest.mark.parametrize("by, end", [("seconds", 119.98), ("tokens", 2.2e6), ("step", 1060)])
def test_several_runs_are_a_median_in_a_band(tool, figures, by, end):
    """And the record of their track is grey; all inside the frame."""
    home = ROOT / "records/track_tiny"
    newest = max(home.iterdir()).name
    assert tool("plot", home / "2026-11-21_Baseline", "--by", by, "--out", "x.png")[0] == 0
    axes = figures.pop().axes[0]
    record_name = newest.partition("_")[2]
    assert legend(axes) == [f"record {record_name}, 5 runs", "Baseline, 5 runs"]
    assert axes.get_ylabel().startswith("loss on train, nats per token")
    demand_whole(axes)
    assert axes.get_title() == "Baseline"
    record, _, median, finals = axes.get_lines()
    assert record.get_color() == "0.5" != median.get_color() and len(finals.get_xdata()) == 5
    band = axes.collections[1].get_paths()[0].get_extents()
    low, high = axes.get_ylim()
    _, right = axes.get_xlim()
    assert low < band.y0 < median.get_ydata().min() < median.get_ydata().max() <= band.y1 < high
    assert max(finals.get_xdata()) == pytest.approx(end, rel=0.02) and right > max(finals.get_xdata())
    # no curve before the first loss of a log
    first = max(getattr(run.curves["train"][0], by) for run in logs.load_runs([home / "2026-11-21_Baseline"]))
    assert median.get_xdata()[0] == pytest.approx(max(first, 0.02 * median.get_xdata()[-1]))


def test_trials_that_differ_by_seed_are_one_curve(tool, tmp_path, figures):
    """And made-up names are told apart by the constants that differ."""
    folders = []
    for trial, seed, rate in ((0, 1338, "0.02"), (0, 1339, "0.02"), (1, 1340, "0.03")):
        folders.append(tmp_path / f"trial_20261127_232842_580682_{trial}_seed{seed}")
        folders[-1].mkdir()
        text = (ROOT / f"records/track_tiny/2026-11-21_Baseline/train_seed{seed}.log").read_text()
        text = text.replace("config matrix_lr=0.03", f"config matrix_lr={rate}")
        (folders[-1] / "train.log").write_text(text)
    assert tool("plot", *folders, "--out", "x.png")[0] == 0
    assert legend(figures.pop().axes[0])[1:] == ["matrix_lr=0.02, 2 runs", "matrix_lr=0.03, one run"]
    assert tool("compare", f"{folders[0]},{folders[1]}", folders[2], "--out", tmp_path / "x.png")[0] == 0
    assert legend(figures.pop().axes[0]) == ["A, matrix_lr=0.02, 2 runs", "B, matrix_lr=0.03, one run"]


def test_a_part_of_val_is_the_curve_where_validations_are_few(tool, tmp_path, figures, monkeypatch):
    text = (ROOT / "records/track_tiny/2026-11-21_Baseline/train_seed1338.log").read_text()
    parts = [f"val_part step:{step} val_loss:{5 - step / 100}\n" for step in (50, 100, 150, 200)]
    (tmp_path / "train.log").write_text(text + "".join(parts))
    assert tool("plot", tmp_path, "--out", "x.png")[0] == 0
    axes = figures.pop().axes[0]
    assert axes.get_ylabel().startswith("loss on a part of val") and len(axes.get_lines()) == 4
    old = logs.load_runs([ROOT / "records/track_tiny/2026-11-21_Baseline"], print)
    monkeypatch.setattr(curves, "record_to_beat", lambda runs: {"record of old": old})
    assert tool("plot", tmp_path, "--out", "x.png")[0] == 0
    assert figures.pop().axes[0].get_ylabel().startswith("loss on train"), "that record has no such curve"
    monkeypatch.setattr(curves, "record_to_beat", lambda runs: {})
    assert tool("plot", tmp_path, "--by", "step", "--out", "x.png")[0] == 0
    assert figures.pop().axes[0].get_lines()[0].get_ydata()[-1] == pytest.approx(3.0)
