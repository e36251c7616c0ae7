"""A model outside of the trainer: the export, docs/load_model.py, the eight lines of README."""
import json
import re
import struct
import sys
from pathlib import Path

import pytest
import torch

import export
import train_gpt
from helpers import ROOT, init_parameters, toy_environment

sys.path.insert(0, str(ROOT / "docs"))
import load_model  # noqa: E402


def save(path, **settings):
    """final_model.pt of a model with made-up weights, none of which is 0 or 1."""
    tables = {} if "PRESET" in settings else dict(BIGRAM_ROWS="4096", COUNT_BITS="14")
    cfg = train_gpt.load_config(dict(VOCAB_SIZE="512", BOS_ID="1") | tables | settings)
    model = cfg.make_model(train_gpt.Kernels())
    init_parameters(model, 7)
    generator = torch.Generator().manual_seed(7)
    if cfg.keeps_text():
        model.counts.count(torch.randint(1, 40, (5000,), generator=generator).numpy().astype("uint16"))
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(train_gpt.to_bytes(cfg, train_gpt.stored(model)))
    return path


SHAPES = [{}, dict(WINDOW_SCHEDULE="0", LOGIT_SOFTCAP="30"), dict(NUM_LAYERS="5", WINDOW_SCHEDULE="128,64"),
          dict(NUM_HEADS="4", QK_GAIN_INIT="1", MLP_MULT="4"),
          dict(COUNT_ORDERS="0", COPY_ORDERS="0"), dict(COUNT_ORDERS="3,1")]


@pytest.mark.parametrize("settings", SHAPES, ids=[
    "tiny", "all tokens", "five layers", "more heads", "no candidates", "two orders"])
def test_the_loader_gives_the_same_log_probs(tool, tmp_path, one_thread, settings):
    path = save(tmp_path / "run" / "final_model.pt", **settings)
    code, out, err = tool("export", path.parent)
    assert code == 0 and out.strip().endswith("docs/load_model.py reads them"), (out, err)
    model, _ = train_gpt.load_model(path)
    loaded = load_model.load(path.parent / "export")
    for T in (1, 2, 129, 300, 700):
        tokens = torch.randint(40, (2, T), generator=torch.Generator().manual_seed(T))
        with torch.no_grad():
            want = train_gpt.log_probs(model, tokens)
        assert torch.allclose(loaded(tokens), want, atol=2e-5), (T, (loaded(tokens) - want).abs().max())
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 512
        assert T == 1 or not torch.allclose(loaded(changed), want, atol=2e-2)


def test_a_folder_without_a_model_hides_no_run(tmp_path, monkeypatch):
    """The tutorials make a folder `mine` and a run `mine`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(export.Refused, match="mine holds no model"):
        export.model_file("mine")
    save(tmp_path / "logs/mine/final_model.pt")
    assert export.model_file("mine") == Path("logs/mine/final_model.pt")


def test_the_files(tool, tmp_path):
    """safetensors' own reader and ours agree; config.json holds what the artifact does."""
    from safetensors.torch import load_file
    path = save(tmp_path / "final_model.pt")
    assert tool("export", path, "--out", tmp_path / "out")[0] == 0
    theirs, ours = (read(tmp_path / "out/model.safetensors") for read in (
        load_file, load_model.read_safetensors))
    model, cfg = train_gpt.load_model(path)
    assert {*theirs} == {*ours} == {"counts.text", *dict(model.named_parameters())}
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("unlike_tiny") == [] and config.pop("scoring_window") == 128
    assert {name: getattr(cfg, name) for name in cfg.model_fields()} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    size = struct.unpack("<Q", (tmp_path / "out/model.safetensors").read_bytes()[:8])[0]
    assert size % 8 == 0


def test_the_loader_needs_torch_only_and_refuses_what_it_leaves_out(tool, tmp_path):
    lines = (ROOT / "docs/load_model.py").read_text().splitlines()
    assert len(lines) <= 60
    text = "\n".join([*lines, (ROOT / "docs/load_candidates.py").read_text()])
    assert max(map(len, text.splitlines())) <= 110
    modules = {*re.findall(r"(?m)^(?:import|from) (\w+)", text)}
    assert modules == {"json", "pathlib", "torch", "load_candidates"}
    for name, value in (("KEY_OFFSET", "0"), ("BIGRAM_ROWS", "0"), ("VALUE_EMBED_LAYERS", "0"),
                        ("UNET_SKIPS", "0"), ("WINDOW_PATTERN", "SL"), ("LOGIT_SOFTCAP", "0"),
                        ("PRESET", "golf")):
        path = save(tmp_path / name / "final_model.pt", **{name: value})
        code, out, _ = tool("export", path)
        assert code == 0 and f"docs/load_model.py lacks {name.lower()}" in out
        with pytest.raises(AssertionError, match=name.lower()):
            load_model.load(path.parent / "export")


def test_what_is_no_model(tool, tmp_path):
    code, _, err = tool("export", tmp_path)
    assert code == 2 and "holds no model" in err
    (tmp_path / "final_model.pt").write_bytes(b"x")
    code, _, err = tool("export", tmp_path)
    assert code == 2 and "damaged or no model" in err and len(err.splitlines()) == 1


def test_the_lines_of_readme(tiny_data, tmp_path, monkeypatch, capsys):
    """They load a run's artifact, score a text, and continue it."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert len(code.strip().splitlines()) <= 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(tiny_data / "data")
    assert train_gpt.main([], toy_environment(run_id="RUN", iterations=2)) == 0
    capsys.readouterr()
    code = code.replace("embedded.model", "toy.model")
    compiled = compile(code, "README.md", "exec")
    names = {}
    exec(compiled, names)
    assert "def " in capsys.readouterr().out and names["nats"] > 0
