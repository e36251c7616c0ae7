"""loss.png of a run: everything that it promises is drawn, inside its frame."""
import matplotlib.figure
import pytest

import train_gpt
from helpers import ROOT
from judge import trials

TRAIN = [(1, 0.1, 10.9), (2, 0.2, 9.0), (250, 8.4, 4.5), (707, 23.8, 4.0), (1000, 41.0, 3.7),
         (1414, 66.0, 3.6), (2000, 118.0, 3.3), (2130, 129.0, 3.29), (2160, 132.0, 3.28)]
VAL = [(0, 0.0, 11.0), (1000, 41.0, 3.7), (2160, 132.0, 3.27)]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """settings, curves -> (axes of the losses, axes of the LR) of a run whose log holds them"""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))

    def draw(train=TRAIN, val=VAL, target=None, part=(),
             final="final_model val_loss:3.27", **settings):
        cfg = train_gpt.load_config(settings)
        lines = []
        last = train_gpt.total_steps(cfg)
        length = train[-1][1]
        lines += [f"limits: at most {last} steps", *train_gpt.stage_lines(cfg), f"config preset={cfg.preset}"]
        for step, seconds, loss in train:
            lr = cfg.schedule(step, step / last).lr
            lines.append(f"step:{step}/{last} train_loss:{loss:.4f} {train_gpt.time_text(seconds, step)} "
                         f"tok/s:9 lr_factor:{lr:.3f} eta:{length - seconds:.0f}s mean_loss:{loss + 0.5:.4f}")
        lines += [f"step:{step}/{last} val_loss:{loss:.4f} {train_gpt.time_text(seconds, step)}"
                  for step, seconds, loss in val]
        lines += [f"val_part step:{step} val_loss:{loss:.4f}" for step, loss in part]
        (tmp_path / "train.log").write_text("\n".join([*lines, final, ""]))
        trials.draw_run(tmp_path, target)
        return figures.pop().axes

    return draw


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_run_with_stages(drawn):
    axes, right = drawn(PRESET="speedrun")
    assert labels(axes) == ["train, mean of many batches", "val, at the end 3.2700"]
    low, high = axes.get_ylim()
    left, end = axes.get_xlim()
    for line in axes.get_lines():
        assert low < min(line.get_ydata()) and max(line.get_ydata()) < high
        assert left <= min(line.get_xdata()) and max(line.get_xdata()) < end
    means, _ = (line.get_ydata() for line in axes.get_lines())
    # the first two lines are of single steps, and are drawn with the third
    first = (11.4 + 9.5 + 248 * 5.0) / 250
    assert list(means) == pytest.approx([first, *[loss + 0.5 for *_, loss in TRAIN[3:]]])
    # the second and the fourth of four stages are shaded: from the first log line in each to that of the next
    spans = [(band.get_x(), band.get_x() + band.get_width()) for band in axes.patches]
    assert spans == [pytest.approx((23.8, 66.0)), pytest.approx((129.0, 132.0))]
    lr = right.get_lines()[0].get_ydata()
    assert list(lr[:2]) == [1.0, 1.0] and max(lr) > 1.4 and lr[-1] == pytest.approx(0.1)


def test_a_part_of_val_is_a_curve_of_its_own(drawn):
    """At the seconds of its steps; a resumed run trains and scores some again, and its last values count."""
    again = [(2000, 119.0, 3.35), (2130, 129.0, 3.29), (2160, 132.0, 3.28)]
    axes, _ = drawn(TRAIN + again, val=VAL[-1:], part=[(1414, 3.9), (2065, 3.4), (1414, 3.7)])
    means = axes.get_lines()[0]
    assert list(means.get_ydata())[-3:] == pytest.approx([3.85, 3.79, 3.78])
    assert list(means.get_xdata()) == sorted(means.get_xdata())
    assert labels(axes)[1:] == ["a part of val, during training", "val, at the end 3.2700"]
    curve = axes.get_lines()[1]
    assert list(curve.get_xdata()) == pytest.approx([66.0, 119 + 10 / 2])
    assert list(curve.get_ydata()) == [3.7, 3.4]


def test_the_record_is_grey(drawn):
    axes, _ = drawn(target=dict(curve=[(1.0, 5.0), (120.0, 3.0)], curve_of="part"))
    assert labels(axes)[0] == "the record: a part of val, median of its runs"
    assert axes.get_lines()[0].get_color() == "0.6"


def test_final_scores_to_compare_with_are_levels(drawn):
    """Their bits per byte as the nats per token that this run would have had; other metrics are left out."""
    others = [dict(name="the record", metric="val_bpb", value=0.9), dict(name="CORE", metric="core", value=1)]
    axes, _ = drawn(target=dict(compare=others), final="final_model val_loss:3.0 val_bpb:1.2")
    level = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in level] == [[pytest.approx(2.25)] * 2]
    assert [text.get_text() for text in axes.texts] == ["the record ended at val_bpb 0.9000"]


def test_a_run_of_one_step(drawn):
    axes, _ = drawn([(1, 0.1, 7.0)], [(1, 0.1, 6.0)], ITERATIONS="1")
    assert len(axes.get_lines()) == 2


def test_the_trainers_own_picture(tmp_path):
    """Of a run without run.sh; what cannot be drawn is said."""
    said = []
    path = tmp_path / "loss.png"
    train_gpt.plot_curves({"train": [], "mean": TRAIN, "val": VAL}, "a title", path, said.append)
    assert path.stat().st_size > 5000 and not said
    train_gpt.plot_curves({"train": TRAIN, "mean": [], "val": VAL}, "a title", path, said.append)
    assert said[0].startswith("loss.png: not drawn")


# ---------------------------------------------------------------- record plot
@pytest.mark.parametrize("by, end", [("seconds", 119.98), ("tokens", 2.2e6), ("step", 1060)])
def test_several_runs_are_a_median_in_a_band(tool, monkeypatch, by, end):
    """And the record of their track is grey, unless it is what is drawn; all inside the frame."""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    home = ROOT / "records/track_tiny"
    newest = max(home.iterdir()).name
    assert tool("plot", home / "2026-11-21_Baseline", "--by", by, "--out", "x.png")[0] == 0
    axes = figures.pop().axes[0]
    names = [name.partition(":")[0] for name in labels(axes)]
    assert names == 2 * [f"record {newest}"] + 2 * ["2026-11-21_Baseline"]
    record, _, median, finals = axes.get_lines()
    assert record.get_color() == "0.5" != median.get_color() and len(finals.get_xdata()) == 5
    band = axes.collections[1].get_paths()[0].get_extents()
    low, high = axes.get_ylim()
    _, right = axes.get_xlim()
    assert low < band.y0 < median.get_ydata().min() < median.get_ydata().max() <= band.y1 < high
    assert max(finals.get_xdata()) == pytest.approx(end, rel=0.02) and right > max(finals.get_xdata())
    assert tool("plot", home / newest, "--by", by, "--out", "x.png")[0] == 0
    assert not any(name.startswith("record") for name in labels(figures.pop().axes[0]))


def test_trials_that_differ_by_seed_are_one_curve(tool, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    for trial, seed in ((0, 1338), (0, 1339), (1, 1340)):
        folder = tmp_path / f"trial_20260101_{trial}_seed{seed}"
        folder.mkdir()
        log = ROOT / f"records/track_tiny/2026-11-21_Baseline/train_seed{seed}.log"
        (folder / "train.log").write_bytes(log.read_bytes())
    assert tool("plot", *sorted(tmp_path.iterdir()), "--out", "x.png")[0] == 0
    names = labels(figures.pop().axes[0])
    assert [name for name in names if "2 runs" in name] == ["trial_20260101_0: train, 2 runs"]
    assert [name for name in names if "one run" in name] == ["trial_20260101_1: train, one run"]


def test_a_dot_in_a_run_s_name_is_part_of_it(tool, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    for rate, seed in (("0.02", 1338), ("0.03", 1339)):
        folder = tmp_path / f"lr{rate}"
        folder.mkdir()
        log = ROOT / f"records/track_tiny/2026-11-21_Baseline/train_seed{seed}.log"
        (folder / "train.log").write_bytes(log.read_bytes())
    assert tool("plot", *sorted(tmp_path.iterdir()), "--out", "x.png")[0] == 0
    names = labels(figures.pop().axes[0])
    assert {"lr0.02: train, one run", "lr0.03: train, one run"} <= {*names}


def test_a_part_of_val_is_the_curve_where_validations_are_few(tool, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    text = (ROOT / "records/track_tiny/2026-11-21_Baseline/train_seed1338.log").read_text()
    parts = [f"val_part step:{step} val_loss:{5 - step / 100}\n" for step in (50, 100, 150, 200)]
    (tmp_path / "train.log").write_text(text + "".join(parts))
    assert tool("plot", tmp_path, "--out", "x.png")[0] == 0
    names = [name for name in labels(figures.pop().axes[0]) if "a part of val" in name]
    assert len(names) == 2 and names[0].startswith("record "), "the record has such a curve, too"
    old = trials.load_runs([ROOT / "records/track_tiny/2026-11-21_Baseline"], print)
    monkeypatch.setattr(trials, "record_to_beat", lambda runs: {"record of old": old})
    assert tool("plot", tmp_path, "--out", "x.png")[0] == 0
    assert not any("a part of val" in name for name in labels(figures.pop().axes[0])), "that record has none"
    monkeypatch.setattr(trials, "record_to_beat", lambda runs: {})
    for by in ("seconds", "step"):
        assert tool("plot", tmp_path, "--by", by, "--out", "x.png")[0] == 0
        axes = figures.pop().axes[0]
        place, = [i for i, name in enumerate(labels(axes)) if name.endswith("a part of val, one run")]
        assert axes.get_lines()[place].get_ydata()[-1] == pytest.approx(3.0)
    assert tool("plot", tmp_path, "--by", "tokens", "--out", "x.png")[0] == 0
    assert not any("a part of val" in name for name in labels(figures.pop().axes[0]))
