"""loss.png of a run: the loss and the record's, the LR beside them, all in the frame; nothing covers it."""
import json

import matplotlib.figure
import pytest

import train_gpt
from helpers import ROOT
from test_curves import demand_whole, legend
from tools.run import show

NEWEST = max((ROOT / "records/track_tiny").iterdir())
# (step, seconds, mean loss of the steps since the line before, LR factor)
TRAIN = [(1, 15.0, 7.4, 1.0), (250, 38.0, 3.0, 1.0), (500, 60.0, 2.5, 1.0), (700, 90.0, 2.1, 0.5),
         (900, 119.0, 1.9, 0.02)]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """(reports of steps, loss of each on a part of val, settings) -> the axes of the losses and of the LR"""
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))

    def draw(train=TRAIN, part=(), fingerprint="", **settings):
        cfg = train_gpt.load_config(settings)
        record = json.loads((NEWEST / "result.json").read_text())
        data = record["data"] | ({"fingerprint": fingerprint, "sha256": {}} if fingerprint else {})
        config = record["config"] | {name: train_gpt.show(value) for name, value in vars(cfg).items()}
        events = [dict(kind="start", config=config, torch="2", hardware="a CPU", data=data,
                       eval=dict(eval_tokens="full", eval_context="4096", eval_stride="4096"))]
        for step, seconds, loss, lr in train:
            events.append(dict(kind="train", step=step, steps=1000, seconds=seconds, train_loss=loss - 0.5,
                               mean_loss=loss, lr_factor=lr, tokens=4096 * step))
        events += [dict(kind="val_part", step=step, val_loss=loss) for step, loss in part]
        events.append(dict(kind="val", step=920, steps=920, seconds=120.0, val_loss=1.46, val_bpb=0.88))
        events.append(dict(kind="score", tag="final_int8_zlib_roundtrip", val_loss=1.46, val_bpb=0.88))
        (tmp_path / "events.jsonl").write_text("".join([json.dumps(event) + "\n" for event in events]))
        told = dict(preset=cfg.preset, seed=cfg.seed, overrides=train_gpt.overrides(cfg), val_loss=1.46,
                    val_bpb=0.88)
        show.draw_run(tmp_path, told)
        return figures.pop().axes

    return draw


def test_a_run_against_the_record(drawn):
    axes, right = drawn()
    assert legend(axes) == [f"record {NEWEST.name.partition('_')[2]}, 5 runs", "seed 1337, one run"]
    record, _, mine, final = axes.get_lines()
    assert record.get_color() == "0.5" != mine.get_color()
    assert (mine.get_xdata()[0], mine.get_xdata()[-1]) == pytest.approx((15, 119))
    assert [*final.get_xdata(), *final.get_ydata()] == pytest.approx([120, 1.46])
    low, high = axes.get_ylim()
    assert low < min(mine.get_ydata()) < max(mine.get_ydata()) < high
    (lr,) = right.get_lines()
    assert [*zip(*lr.get_data())] == [(seconds, factor) for _, seconds, _, factor in TRAIN]


def test_a_part_of_val_is_the_curve_where_there_is_one(drawn):
    """A resumed run trains and scores some again, and its last values count; another text has no record."""
    again = [(700, 92.0, 2.05, 0.4), (900, 121.0, 1.85, 0.01)]
    part = [(250, 3.1), (500, 2.6), (700, 2.4), (700, 2.2), (900, 2.0)]
    axes, right = drawn([*TRAIN, *again], part, "x")
    assert legend(axes) == ["seed 1337, one run"]
    assert axes.get_ylabel().startswith("loss on a part of val, nats per token")
    mine = axes.get_lines()[0]
    assert (mine.get_ydata()[0], mine.get_ydata()[-1]) == (3.1, 2.0)
    (lr,) = right.get_lines()
    assert [*lr.get_xdata()] == [15, 38, 60, 92, 121]


@pytest.mark.parametrize("settings", [{}, dict(
    MATRIX_LR="0.02", EMBED_LR="0.25", HEAD_LR="0.009", SCALAR_LR="0.05", BETA1="0.7", BETA2="0.99",
    RUN_ID="trial_2", COUNT_ORDERS="3,5,8,14,20,30", COPY_ORDERS="1,2,3,4,6,9,12", SEED="7")])
def test_nothing_is_clipped_and_nothing_covered(drawn, settings):
    axes, right = drawn(**settings)
    demand_whole(axes)
    assert right.yaxis.label.get_window_extent().x1 <= axes.figure.bbox.x1


def test_the_title_names_what_was_changed():
    """Not the folder, whose name is a date; as much as fits."""
    overrides = dict(run_id=["", "trial_20261127_232842_580682_0"], seed=["1337", "7"])
    assert show.changes_of(dict(overrides=overrides)) == ""
    overrides |= dict(matrix_lr=["0.03", "0.02"], beta1=["0.8", "0.7"])
    assert show.changes_of(dict(overrides=overrides)) == "matrix_lr=0.02, beta1=0.7"
    overrides |= {f"constant_{i}": ["0", "1"] for i in range(20)}
    changes = show.changes_of(dict(overrides=overrides))
    assert changes.startswith("matrix_lr=0.02, beta1=0.7, constant_0=1, ") and len(changes) <= 80
    assert changes.endswith(" …")
