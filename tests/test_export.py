"""A model outside of the trainer: the export, its model.py, the lines of docs/running.md."""
import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_gpt
from helpers import ROOT, SCRIPT, init_parameters, slow_but, toy_environment
from records.show import export
from test_script import TOY_RUN
from tools.run import script


def save(path, **settings):
    """final_model.pt of a model with made-up weights, none of which is 0 or 1."""
    tables = {} if "PRESET" in settings else dict(BIGRAM_ROWS="4096", COUNT_BITS="14")
    cfg = train_gpt.load_config(dict(VOCAB_SIZE="512", BOS_ID="1") | tables | settings)
    model = cfg.make_model()
    init_parameters(model, 7)
    generator = torch.Generator().manual_seed(7)
    if model.state():
        model.counts.starts[5:15] = False
        model.counts.count(torch.randint(1, 40, (5000,), generator=generator).numpy().astype("uint16"))
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(train_gpt.to_payload(model, dict(model.named_parameters()) | model.state()), path)
    return path


MODELS = {preset: dict(PRESET=preset) | {name: text for name, text in settings.items() if name != "FP8"}
          for preset, settings in TOY_RUN.items()}
MODELS |= {
    "tiny, its own size": {}, "tiny, all tokens": dict(WINDOW_SCHEDULE="0", LOGIT_SOFTCAP="30"),
    "tiny, five layers": dict(NUM_LAYERS="5", WINDOW_SCHEDULE="128,64", WINDOW_PATTERN="SL"),
    "tiny, more heads": dict(NUM_HEADS="4", QK_GAIN_INIT="1", MLP_MULT="4", KEY_OFFSET="0"),
    "tiny, no candidates": dict(COUNT_ORDERS="0", COUNT_WORDS="0", COPY_ORDERS="0",
                                BIGRAM_ROWS="0", VALUE_EMBED_LAYERS="0"),
    "tiny, two orders": dict(COUNT_ORDERS="3,1", UNET_SKIPS="0"),
    "golf, wide": dict(PRESET="golf", NUM_LAYERS="1", MODEL_DIM="64", NUM_HEADS="2", NUM_KV_HEADS="0"),
    "golf_plus, plain": MODELS["golf_plus"] | dict(LOOP_LAYERS="0", EXCLUSIVE="0", SKIP_MIX="0"),
    "speedrun, no documents": MODELS["speedrun"] | dict(MAX_DOC_LEN="0", SMEAR_DIM="0"),
    "speedrun_plus, no DC": MODELS["speedrun_plus"] | dict(DC_WINDOW="0", BIGRAM_SIGN_ROWS="0")}
FEW = ["tiny", "golf", "speedrun_plus"]     # what `./run.sh test` exports
LENGTHS = (1, 2, 17, 129, 300)

# In an interpreter of its own, with no other package: folders -> log_probs.pt
CHILD = """
import importlib.util, sys
import torch
allowed = sys.stdlib_module_names | {"torch", "numpy", "safetensors"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"{name} is not needed")

sys.meta_path.insert(0, Refuse())
torch.set_num_threads(1)
tokens = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    spec = importlib.util.spec_from_file_location("model", folder + "/model.py")
    module = sys.modules["model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.load(folder)
    with torch.no_grad():
        torch.save([module.log_probs(model, rows) for rows in tokens], folder + "/log_probs.pt")
"""


def some_tokens():
    """[(2, T)] of several T, with some documents in a row."""
    rows = [torch.randint(1, 40, (2, T), generator=torch.Generator().manual_seed(T)) for T in LENGTHS]
    rows[-1][:, 100::70] = 1
    return rows


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name -> folder of the export, in which model.py has written log_probs.pt. The few are exported
    together, the others too, when one of them is asked for."""
    folders = {}

    def export_all(names):
        root = tmp_path_factory.mktemp("exported")
        for number, name in enumerate(names):
            path = save(root / f"{number}" / "final_model.pt", **MODELS[name])
            said = []
            folders[name] = Path(export.export(argparse.Namespace(run=path, out=""), said.append))
            assert "and model.py" in said[0]
        torch.save(some_tokens(), root / "tokens.pt")
        done = subprocess.run(
            [sys.executable, "-I", "-c", CHILD, root / "tokens.pt", *[folders[name] for name in names]],
            capture_output=True, text=True, timeout=600, cwd=root)
        assert done.returncode == 0, done.stderr

    def folder_of(name):
        if name not in folders:
            export_all(FEW if name in FEW else [other for other in MODELS if other not in FEW])
        return folders[name]

    return folder_of


@pytest.mark.parametrize("name", slow_but(FEW, MODELS))
def test_its_model_gives_the_same_log_probs(exported, one_thread, name):
    """To the bit."""
    folder = exported(name)
    model, _ = train_gpt.load_model(folder.parent / "final_model.pt")
    found = torch.load(folder / "log_probs.pt")
    for tokens, ours in zip(some_tokens(), found, strict=True):
        with torch.no_grad():
            want = train_gpt.log_probs(model, tokens)
        assert torch.equal(ours, want), (tokens.shape, (ours - want).abs().max())
    # every log-probability depends on the weights: another model has others
    for p in model.parameters():
        p.data *= 1.01
    with torch.no_grad():
        assert not torch.allclose(train_gpt.log_probs(model, some_tokens()[-1]), found[-1], atol=1e-4)


@pytest.mark.parametrize("preset", slow_but(FEW, train_gpt.RECIPES))
def test_model_py_is_the_recipes_script(exported, preset):
    """Verbatim, apart from load()."""
    text = (exported(preset) / "model.py").read_text(encoding="utf-8")
    before, load, after = text.partition(export.LOAD.strip("\n"))
    assert load and before + after.lstrip("\n") == script.script(preset, SCRIPT.read_text(encoding="utf-8"))


def test_the_files(tool, tmp_path):
    """What the artifact holds."""
    from safetensors.torch import load_file
    path = save(tmp_path / "final_model.pt")
    assert tool("export", path, "--out", tmp_path / "out")[0] == 0
    model, cfg = train_gpt.load_model(path)
    assert {*load_file(tmp_path / "out/model.safetensors")} == {
        "counts.text", "counts.starts", *dict(model.named_parameters())}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {"preset", "model_dim", "window_pattern"} < {*config} and "matrix_lr" not in config
    assert config == json.loads(json.dumps({name: getattr(cfg, name) for name in config}))


def test_the_lines_of_running(tiny_data, tmp_path, monkeypatch, capsys):
    """They load a run's artifact and score a text."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/running.md").read_text(), re.S)[1]
    assert len(code.strip().splitlines()) <= 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(tiny_data / "data")
    assert train_gpt.main([], toy_environment(run_id="RUN", iterations=2, val_tokens=512)) == 0
    capsys.readouterr()
    code = code.replace("embedded.model", "toy.model")
    compiled = compile(code, "running.md", "exec")
    names = {}
    exec(compiled, names)
    assert float(capsys.readouterr().out) == names["nats"] > 0
