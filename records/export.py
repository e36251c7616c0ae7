"""A trained model for other programs: ./run.sh record export RUN writes safetensors and config.json."""
import json
import sys
from dataclasses import asdict
from pathlib import Path

from folders import ROOT
from runs import Refused


# Constants of tiny that docs/load_model.py takes at any value but 0 where tiny has another one; the others,
# and the preset, it takes as tiny has them
SIZES = {"vocab_size", "train_seq_len", "bos_id", "num_layers", "model_dim", "num_heads", "mlp_mult",
         "logit_softcap", "qk_gain_init", "rope_base", "bigram_rows", "count_orders", "count_bits",
         "copy_orders", "window_schedule"}


def model_file(run):
    """What a run is scored by: its artifact, else its weights; or the file itself. Raises Refused."""
    for path in (Path(run), Path("logs", run)):
        files = [path, *sorted(path.glob("final_model.*.ptz")), path / "final_model.pt"]
        for file in files:
            if file.is_file():
                return file
    raise Refused(f"{run} holds no model: give a run folder, a record folder or a model file")


def export(args, say):
    """model.safetensors and config.json beside the model, or in --out. Returns their folder."""
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError:
        raise Refused("export needs safetensors: pip install -r requirements.txt") from None
    sys.path.insert(0, str(ROOT))
    import train_gpt
    path = model_file(args.run)
    try:
        model, cfg = train_gpt.load_model(path)
    except train_gpt.Refused as error:
        raise Refused(str(error)) from None
    folder = Path(args.out or path.parent / "export")
    folder.mkdir(parents=True, exist_ok=True)
    # A tied head is the embedding, which named_parameters() lists once
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    counts, text = dict(model.named_modules()).get("counts"), 0
    if counts and any(cfg.count_orders):
        tensors["counts.text"] = torch.from_numpy(counts.text.view("<i2").copy())
        text = len(counts.text)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shape = {name: value for name, value in asdict(cfg).items() if name in cfg.model_fields()}
    tiny = asdict(train_gpt.load_config({}))
    unlike = [name for name, value in shape.items()
              if value != tiny.get(name) and (name not in SIZES or not value)]
    shape |= dict(scoring_window=cfg.scoring_window(), unlike_tiny=unlike)
    (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n", encoding="utf-8")
    weights = sum(p.numel() for p in model.parameters())
    counted = f" and the {text:,} training tokens that n-grams are counted from" if text else ""
    say(f"wrote {folder}/model.safetensors ({weights:,} weights{counted}) and config.json; "
        "docs/load_model.py " + (f"lacks {', '.join(unlike)}" if unlike else "reads them"))
    return str(folder)
