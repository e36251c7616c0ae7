"""loss.png of a run: everything that it promises is drawn, inside its frame; nothing covers it."""
import json
import shutil
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest

import train_gpt
from helpers import SCRIPT
from tools.run import show

# (step, seconds, mean loss of the steps since the line before, or val loss)
TRAIN = [(1, 0.1, 11.4), (2, 0.2, 9.5), (250, 8.4, 5.0), (707, 23.8, 4.5), (1000, 41.0, 4.2),
         (1414, 66.0, 4.1), (2000, 118.0, 3.8), (2130, 129.0, 3.79), (2160, 132.0, 3.78)]
VAL = [(0, 0.0, 11.0), (1000, 41.0, 3.7), (2160, 132.0, 3.27)]


def event_of(kind, step, seconds, loss):
    if kind == "train":
        return dict(kind=kind, step=step, seconds=seconds, train_loss=loss - 0.5, mean_loss=loss)
    return dict(kind=kind, step=step, seconds=seconds, val_loss=loss, val_bpb=None, steps=VAL[-1][0])


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """settings, curves -> figure, axes of the losses and of the LR, and cfg of a run with these events"""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    shutil.copy(SCRIPT, tmp_path / "train_gpt.py")

    def draw(train=TRAIN, val=VAL, target=None, part=(), result=(), again=(), **settings):
        cfg = train_gpt.load_config(settings)
        config = {name: train_gpt.show(value) for name, value in vars(cfg).items()}
        events = [dict(kind="start", config=config, torch="2", hardware="a CPU", data=dict(
            fingerprint="x", val_tokens=9))]
        events += [event_of("train", *row) for row in train]
        events += [dict(kind="val_part", step=step, val_loss=loss) for step, loss in part]
        events += [event_of("val", *row) for row in val]
        (tmp_path / "events.jsonl").write_text("".join([json.dumps(event) + "\n" for event in events]))
        changed = {name: pair for name, pair in train_gpt.overrides(cfg).items()}
        told = dict(preset=cfg.preset, seed=cfg.seed, overrides=changed, val_loss=3.27, val_bpb=1.2)
        show.draw_run(tmp_path, told | dict(result), target or {})
        figure = figures.pop()
        axes, right = figure.axes
        return SimpleNamespace(figure=figure, axes=axes, right=right, cfg=cfg)

    return draw


def legend_of(figure):
    """{label: what is drawn} of a figure's legend."""
    (legend,) = figure.legends
    return dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles))


def band_of(axes):
    (band,) = axes.patches
    return band.get_x(), band.get_x() + band.get_width()


def curve(axes, label):
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return line


TRAIN_LABEL = "train, mean of many batches"
PART_LABEL = "a part of val, during training"
LR_LABEL = "LR factor (right axis)"


def test_a_run_with_stages(drawn):
    """Losses inside the frame, the schedule, where the warmdown lowers it, where stages begin."""
    found = drawn(PRESET="speedrun")
    assert [*legend_of(found.figure)] == [
        TRAIN_LABEL, "val, trained weights 3.2700", "warmdown", "a stage begins", LR_LABEL]
    axes = found.axes
    low, high = axes.get_ylim()
    left, end = axes.get_xlim()
    losses = [curve(axes, TRAIN_LABEL), curve(axes, "val, trained weights 3.2700")]
    for line in losses:
        assert low < min(line.get_ydata()) and max(line.get_ydata()) < high
        assert left <= min(line.get_xdata()) and max(line.get_xdata()) < end
    # the first two lines are of single steps, and are not drawn
    assert list(losses[0].get_ydata()) == pytest.approx([loss for *_, loss in TRAIN[2:]])
    # the warmdown, from the time of the first step in it
    cfg = found.cfg
    done = [train_gpt.scheduled_progress(cfg, step / 2160) for step in range(2160)]
    step = int(np.argmax(np.array(done) > 1 - cfg.warmdown_frac))
    known = sorted({(step, seconds) for step, seconds, _ in [*TRAIN, *VAL]})
    steps, seconds = zip(*known)
    assert band_of(axes) == pytest.approx((np.interp(step, steps, seconds), 132.0), abs=0.2)
    begin = [np.interp(stage.first_step, steps, seconds) for stage in cfg.stages()[1:]]
    ends = [(line.get_xdata()[0], line.get_xdata()[-1]) for line in axes.get_lines()]
    assert [left for left, right in ends if left == right] == pytest.approx(begin, abs=0.2)


@pytest.mark.parametrize("preset, steps, highest", [
    ("speedrun", 64, 1.51), ("speedrun_plus", 64, 1.52), ("gpt2_plus", 64, 0.6385), ("golf_plus", 64, 1.0)])
def test_the_learning_rate_is_the_schedule_s(drawn, preset, steps, highest):
    """That of each step, though a short run has few lines, none in some of its stages."""
    extension = 0
    if preset.startswith("speedrun"):
        extension = 4
    settings = dict(PRESET=preset, ITERATIONS=str(steps - extension), MAX_WALLCLOCK_SECONDS="0")
    if extension:
        settings["EXTENSION_ITERATIONS"] = str(extension)
    found = drawn([(1, 1.0, 9.0), (10, 10.0, 8.0), (steps, float(steps), 7.0)], [(steps, float(steps), 6.0)],
                  **settings)
    line = curve(found.right, LR_LABEL)
    wanted = [found.cfg.schedule(step, found.cfg.progress(step, step)).lr for step in range(steps)]
    assert list(line.get_ydata()) == pytest.approx([*wanted, wanted[-1]])
    assert max(line.get_ydata()) == pytest.approx(highest, abs=0.005)
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()[1:]) == pytest.approx([*range(1, steps + 1)])


def test_the_clock_of_a_capped_run_lowers_the_learning_rate(drawn):
    """tiny: half of the seconds, whatever the steps."""
    found = drawn([(1, 20.0, 9.0), (100, 50.0, 8.0), (300, 119.0, 7.0)], [(301, 120.0, 6.0)])
    seconds, lr = curve(found.right, LR_LABEL).get_data()
    assert np.interp([30, 59, 90, 119], seconds, lr) == pytest.approx([1, 1, 0.5, 1 / 60], abs=0.02)
    assert band_of(found.axes) == pytest.approx((60, 120), abs=0.5)


def test_without_a_warmdown_there_is_no_band(drawn):
    found = drawn([(1, 20.0, 9.0), (300, 119.0, 7.0)], [(301, 120.0, 6.0)], WARMDOWN_FRAC="0",
                  BATCH_SCHEDULE="1")
    assert not found.axes.patches
    found = drawn([(1, 1.0, 9.0), (50, 50.0, 8.0)], [(50, 50.0, 6.0)], PRESET="golf", WARMDOWN_ITERS="0")
    assert [*legend_of(found.figure)] == [TRAIN_LABEL, "val, trained weights 6.0000", LR_LABEL]


def test_a_part_of_val_is_a_curve_of_its_own(drawn):
    """At the seconds of its steps; a resumed run trains and scores some again, and its last values count."""
    again = [(2000, 119.0, 3.85), (2130, 129.0, 3.79), (2160, 132.0, 3.78)]
    found = drawn(TRAIN + again, val=VAL[-1:], part=[(1414, 3.9), (2065, 3.4), (1414, 3.7)])
    means = curve(found.axes, TRAIN_LABEL)
    assert list(means.get_ydata())[-3:] == pytest.approx([3.85, 3.79, 3.78])
    assert list(means.get_xdata()) == sorted(means.get_xdata())
    part = curve(found.axes, PART_LABEL)
    assert list(part.get_xdata()) == pytest.approx([66.0, 119 + 10 / 2])
    assert list(part.get_ydata()) == [3.7, 3.4]
    seconds = curve(found.right, LR_LABEL).get_xdata()
    assert list(seconds) == sorted(seconds)


def test_the_record_is_grey(drawn):
    found = drawn(target=dict(curve=[(1.0, 5.0), (120.0, 3.0)], curve_of="part"))
    line = curve(found.axes, "the record: a part of val, median of runs")
    assert line.get_color() == "0.65" and [*legend_of(found.figure)][0] == line.get_label()


def test_final_scores_to_compare_with_are_levels(drawn):
    """Their bits per byte as the nats per token that this run would have had; other metrics are left out. The
    legend names them: a text on a line is hard to read."""
    others = [dict(name="the record", metric="val_bpb", value=0.9), dict(name="CORE", metric="core", value=1),
              dict(name="a plain GPT", metric="val_bpb", value=1.8)]
    found = drawn(target=dict(compare=others), result=dict(val_loss=3.0, val_bpb=1.2))
    levels = {"the record: final val_bpb 0.9000": 2.25, "a plain GPT: final val_bpb 1.8000": 4.5}
    for label, nats in levels.items():
        assert list(curve(found.axes, label).get_ydata()) == [pytest.approx(nats)] * 2
        assert label in legend_of(found.figure)
    dashes = {str(line._dash_pattern) for line in found.axes.get_lines() if "final" in line.get_label()}
    assert len(dashes) == 2, "one can tell them apart"
    assert not found.axes.texts and not found.right.texts


def test_a_run_of_one_step(drawn):
    found = drawn([(1, 0.1, 7.0)], [(1, 0.1, 6.0)], ITERATIONS="1")
    assert len(curve(found.axes, TRAIN_LABEL).get_xdata()) == 1


@pytest.mark.parametrize("settings", [{}, {"PRESET": "speedrun"}, dict(MATRIX_LR="0.02"), dict(
    MATRIX_LR="0.02", EMBED_LR="0.25", HEAD_LR="0.009", SCALAR_LR="0.05", BETA1="0.7", BETA2="0.99",
    RUN_ID="trial_2", COUNT_ORDERS="3,5,8,14,20,30", COPY_ORDERS="1,2,3,4,6,9,12", SEED="7")])
def test_nothing_is_clipped_and_nothing_covered(drawn, settings):
    """At the size at which README shows it: the legend is beside the curves, the title within the picture."""
    target = show.target_of(dict(preset="tiny", overrides={}))
    found = drawn(target=target, result=dict(val_loss=1.46, val_bpb=0.88), part=[(1414, 3.9), (2065, 3.4)],
                  **settings)
    figure = found.figure
    figure.set_dpi(110)
    figure.draw_without_rendering()
    width, height = figure.canvas.get_width_height()
    assert (width, height) == (880, 572)
    (legend,) = figure.legends
    texts = [*legend.get_texts(), found.axes.title, figure._suptitle, found.axes.xaxis.label,
             found.axes.yaxis.label, found.right.yaxis.label]
    for text in texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= width and 0 <= box.y0 <= box.y1 <= height, text.get_text()
    assert not legend.get_window_extent().overlaps(found.axes.get_window_extent())
    assert not found.axes.get_legend() and not found.right.get_legend()
    assert found.axes.get_window_extent().height > 0.6 * height


def test_the_title_is_a_name():
    """Preset, seed, scores, what was changed; not the folder, whose name is a date."""
    told = dict(preset="tiny", seed=7, val_bpb=0.88261, val_loss=1.45693, overrides=dict(
        run_id=["", "trial_20261127_232842_580682_0"], seed=["1337", "7"]))
    assert show.name_of(told) == "tiny, seed 7: val_bpb 0.8826, val_loss 1.4569"
    assert show.changes_of(told) == ""
    told["overrides"] |= dict(matrix_lr=["0.03", "0.02"], beta1=["0.8", "0.7"])
    assert show.changes_of(told) == "matrix_lr=0.02, beta1=0.7"
    told["overrides"] |= {f"constant_{i}": ["0", "1"] for i in range(20)}
    changes = show.changes_of(told)
    assert changes.startswith("matrix_lr=0.02, beta1=0.7, constant_0=1, ")
    assert changes.endswith(f" and {22 - changes.count('=')} more") and 70 < len(changes) < 105
    told["overrides"] = dict(order=["0", ",".join(map(str, range(60)))])
    assert show.changes_of(told) == "constants changed: 1"
