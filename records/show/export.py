"""A trained model for other programs: ./run.sh record export RUN writes its weights as safetensors,
config.json, and model.py: the recipe's script, with load(folder) for log_probs(model, tokens)."""
import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from data import inputs
from records.judge.logs import Refused, demand_no_dead_link, make_folder
from tools.run.script import BANNER, script

LOAD = '''
def load(folder: Path | str) -> Model:
    """The model in folder/model.safetensors, for log_probs()."""
    from safetensors.torch import load_file

    tensors = load_file(Path(folder, "model.safetensors"))
    shape = json.loads(Path(folder, "config.json").read_bytes())
    shape = {name: tuple(value) if isinstance(value, list) else value for name, value in shape.items()}
    cfg = recipe_of(shape["preset"])(**shape, train_batch_tokens=shape["train_seq_len"])
    model = cfg.make_model()
    for name, p in model.named_parameters():
        p.data.copy_(tensors.pop(name))
    model.load_state(tensors)
    return model.eval()

'''


def model_script(preset: str, text: str) -> str:
    """The text of model.py. text: of train_gpt.py."""
    whole = script(preset, text)
    start = whole.index(f"{BANNER}15 start")
    return whole[:start] + LOAD.lstrip("\n") + whole[start:]


def export(args: argparse.Namespace, say: Callable) -> str:
    """model.safetensors, config.json and model.py beside the model, or in --out. Returns their folder."""
    from safetensors.torch import save_file
    import train_gpt
    from tools.run.sample import find_model
    demand_no_dead_link(Path("logs", args.run))
    path = find_model(args.run)
    folder = Path(args.out or path.parent / "export")
    cfg: Any
    try:
        model, cfg = train_gpt.load_model(path)
    except train_gpt.Refused as error:
        raise Refused(str(error)) from None
    make_folder(folder)
    # A tied head is the embedding, which named_parameters() lists once
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights | model.state(), folder / "model.safetensors", {"format": "pt"})
    # the constants that a model depends on
    shape = {field.name: getattr(cfg, field.name) for field in fields(cfg) if field.metadata["model"]}
    (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")
    model_text = model_script(cfg.preset, inputs.read_text(Path(train_gpt.__file__)))
    (folder / "model.py").write_text(model_text, encoding="utf-8")
    count = sum(p.numel() for p in model.parameters())
    say(f"wrote {folder}/model.safetensors ({count:,} weights), config.json and model.py, which reads them "
        "with torch, numpy and safetensors")
    return str(folder)
