"""./run.sh sample RUN ["prompt" …]: how the model of a run continues the prompts.

    ./run.sh sample tiny_seed1337_20261126_214814_174435 "def main(" "class " --tokens=200 --temperature=0.5
    ./run.sh sample logs/RUN/checkpoint.pt      no prompts: the beginnings of three val documents

RUN is the name of a run under logs/, a run's or record's folder, or a model file: an artifact (.ptz),
final_model.pt or checkpoint.pt. A run that still trains is sampled from its last checkpoint, on the CPU. A
sample ends where the model ends its document, or after --tokens. The train_gpt.py beside a model file, which
wrote it, loads it; without one, this checkout's does.
"""
import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data import inputs
from records.judge.logs import Refused, demand, demand_no_dead_link, read_events
from train_gpt import brief, file_sha256

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("final_model*.ptz", "final_model.pt", "checkpoint.pt")    # which model of a folder is sampled
SAMPLES = "samples.txt"         # in the run's folder: what was sampled from it
PROMPT_TOKENS = 24              # of a val document, at most
SEED = 1337


class Settings(NamedTuple):
    """How samples are drawn."""
    tokens: int = 96            # at most
    temperature: float = 0.8    # 0: the likeliest token
    top_k: int = 0              # draw from the k likeliest tokens; 0: from all
    seed: int = SEED            # of the first sample; the next ones have seed + 1, seed + 2, ...

    def flags(self) -> str:
        """As one types them."""
        return " ".join([f"--{name.replace('_', '-')}={value:g}" for name, value in self._asdict().items()])


# ------------------------------------------------------------ the model
def find_model(word: str) -> Path:
    """The model file that a word of the command line means. Raises Refused."""
    path = Path(word)
    if path.is_file():
        return path
    demand_no_dead_link(path)
    records = sorted(ROOT.glob("records/track_*/*/"))
    runs = sorted(Path("logs").glob("[!.]*/"), key=lambda folder: folder.stat().st_mtime)
    known = {folder.name: folder for folder in (*records, *runs)}
    folder = known.get(word)    # before a folder of that name, such as mine/ of docs/first_change.md
    if folder is None and path.is_dir():
        folder = path
    demand(folder, f"no run, record or model file is called {word!r}: here are "
           + ", ".join([*known][:-4:-1]))
    for pattern in MODELS:
        if found := sorted(folder.glob(pattern)):
            return found[0]
    raise Refused(f"{folder} holds no model: neither an artifact (.ptz) nor final_model.pt nor checkpoint.pt "
                  "(a run that still trains writes checkpoints with SAVE_EVERY_SECONDS=60)")


@cache
def import_script(path: Path) -> ModuleType:
    """The train_gpt.py at path as a module of its own. Raises Refused."""
    sys.dont_write_bytecode = True      # no __pycache__ in the run's folder
    spec = importlib.util.spec_from_file_location("train_gpt_of_the_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module     # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Refused(f"{path}, which wrote the model, cannot be imported ({brief(error)})") from None
    return module


class Opened(NamedTuple):
    """A model that is ready to be sampled."""
    log_probs: Callable[[Tensor], Tensor]   # tokens int64 (B, T) -> log-probabilities of the next (B, T, V)
    cfg: Any                # its constants
    data: dict[str, Any]    # what its file tells of the dataset
    device: str


def open_model(path: Path, device: str) -> Opened:
    """Opens a model file by the script beside it, or by this checkout's. Raises Refused."""
    script = path.with_name("train_gpt.py")
    if not script.is_file():
        script = ROOT / "train_gpt.py"
    module = import_script(script)
    try:
        model, cfg = module.load_model(path, device)
    except Exception as error:      # a damaged file may raise anything
        why = str(error) if type(error).__name__ == "Refused" else brief(error)
        raise Refused(f"{path} cannot be opened by {script}: {why}") from None
    return Opened(partial(module.log_probs, model), cfg, getattr(model, "trained_on", None) or {}, device)


# ------------------------------------------------------------ its text
class Text(NamedTuple):
    """What turns text into tokens and back, and where val documents are."""
    tokenizer: Any          # SentencePieceProcessor
    bos: int                # token that begins a document
    ends: set[int]          # tokens that end one
    folder: Path | None     # of the dataset


def run_of(model: Path) -> dict[str, Any]:
    """What result.json beside a model or, while its run trains, the run's events tell of it; or {}."""
    result = model.with_name("result.json")
    if result.is_file():
        return json.loads(inputs.read_text(result))
    starts = [event for event in read_events(model.parent) if event["kind"] == "start"]
    return starts[-1] if starts else {}


def dataset_of(config: dict[str, Any], data: dict[str, Any]) -> Path | None:
    """Where the dataset of a run lies: as the run was told, as the environment says, by its name."""
    places = [config.get("data_path"), os.environ.get("DATA_PATH")]
    if data.get("name"):
        places.append(f"data/datasets/{data['name']}")
    return next((Path(place) for place in places if place and Path(place).is_dir()), None)


def find_tokenizer(config: dict[str, Any], data: dict[str, Any], folder: Path | None) -> Path | None:
    """The tokenizer that a run was trained with: as the run was told, as the environment says, that of its
    dataset. What has another digest is none."""
    places = [config.get("tokenizer_path"), os.environ.get("TOKENIZER_PATH")]
    if folder and (folder / "manifest.json").is_file():
        manifest = json.loads(inputs.read_text(folder / "manifest.json"))
        if inside := (manifest.get("tokenizer") or {}).get("path"):
            places.append(str(folder / inside))
    digests = {digest for file, digest in (data.get("sha256") or {}).items() if not file.endswith(".bin")}
    for path in [Path(place) for place in places if place and Path(place).is_file()]:
        if not digests or file_sha256(path) in digests:
            return path
    return None


def open_text(model: Path, opened: Opened) -> Text:
    """The tokenizer that a model was trained with. Raises Refused."""
    told = run_of(model)
    config = told.get("config") or {}
    data = told.get("data") or opened.data
    folder = dataset_of(config, data)
    chosen = find_tokenizer(config, data, folder)
    demand(chosen, f"no samples of {model}: the tokenizer that it was trained with, of the dataset "
           f"{data.get('name') or '(unknown)'}, is not here; TOKENIZER_PATH=PATH before ./run.sh names it")
    import sentencepiece
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(chosen))
    except (OSError, RuntimeError):
        raise Refused(f"{chosen} is no SentencePiece model") from None
    size = processor.vocab_size()
    demand(size <= opened.cfg.vocab_size,
           f"{chosen} has {size} tokens, but {model} only {opened.cfg.vocab_size}: it is another tokenizer")
    bos = max(0, getattr(opened.cfg, "bos_id", 0) or processor.bos_id())
    return Text(processor, bos, {bos, processor.eos_id()}, folder)


def decode(text: Text, ids: Sequence[int]) -> str:
    """Tokens as text. Those beyond the tokenizer's, which pad the vocabulary, and an incomplete character at
    the end are left out."""
    known = [token for token in ids if token < text.tokenizer.vocab_size()]
    return text.tokenizer.decode(known).rstrip("\ufffd")


def val_prompts(text: Text, count: int = 3) -> list[list[int]]:
    """The beginnings of `count` val documents: at most half of each and PROMPT_TOKENS. Raises Refused."""
    shards = sorted(text.folder.glob("*_val_*.bin")) if text.folder else []
    demand(shards, 'there are no val documents here to begin with: give a "prompt"')
    val = np.memmap(shards[0], "<u2", "r", 1024)
    edges = np.append(np.flatnonzero(val == text.bos), len(val))    # where documents begin, and the last ends
    prompts = []
    for place in np.unique(np.linspace(0, len(edges) - 1, count, endpoint=False).astype(int)):
        first, end = edges[place:place + 2]
        prompts.append(val[first:first + min(PROMPT_TOKENS, max(1, (end - first) // 2))].tolist())
    return prompts


# ------------------------------------------------------------ samples
def draw(scores: Tensor, settings: Settings, generator: torch.Generator) -> int:
    """A token by its log-probabilities (V,)."""
    if not settings.temperature:
        return int(scores.argmax())
    best, which = scores.topk(min(settings.top_k or len(scores), len(scores)))
    odds = (best / settings.temperature).softmax(-1)
    return int(which[torch.multinomial(odds, 1, generator=generator)])


class Sample(NamedTuple):
    """How a model continued a prompt."""
    prompt: list[int]
    said: list[int]     # without the token that ended it
    ended: bool         # did the model end its document?


@torch.no_grad()
def generate(opened: Opened, prompt: list[int], settings: Settings, ends: set[int]) -> Sample:
    """Continues a prompt until the model draws one of `ends`."""
    row = [*prompt]
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.tokens):
        scores = opened.log_probs(torch.tensor([row], device=opened.device))
        token = draw(scores[0, -1].cpu(), settings, generator)
        if token in ends:
            return Sample(prompt, row[len(prompt):], True)
        row.append(token)
    return Sample(prompt, row[len(prompt):], False)


def sample_line(number: int, sample: Sample, text: Text) -> str:
    """sample 1: prompt»continuation; what --tokens cut short ends with its last whole line, if it has one."""
    prompt = decode(text, sample.prompt)
    said = decode(text, [*sample.prompt, *sample.said])[len(prompt):]
    if not sample.ended:
        said = said.rpartition("\n")[0] or said
    return f"sample {number}: {prompt}»{said}"


def sample_lines(model: Path, prompts: Sequence[str] = (), settings: Settings = Settings()) -> list[str]:
    """[sample 1: prompt»continuation, …]; without prompts, val documents are continued. Raises Refused."""
    device = os.environ.get("DEVICE", "auto")
    if device == "auto":
        # a run that still trains keeps its GPU to itself
        device = "cuda" if torch.cuda.is_available() and model.name != "checkpoint.pt" else "cpu"
    opened = open_model(model, device)
    text = open_text(model, opened)
    ids = [[text.bos, *text.tokenizer.encode(prompt)] for prompt in prompts] or val_prompts(text)
    lines = []
    for i, prompt in enumerate(ids):
        found = generate(opened, prompt, settings._replace(seed=settings.seed + i), text.ends)
        lines.append(sample_line(i + 1, found, text))
    return lines


# ------------------------------------------------------------ the command
def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line. Raises Refused."""
    standard = Settings()
    parser = argparse.ArgumentParser(prog="./run.sh sample", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run, a run's or record's folder, or a model file")
    parser.add_argument("prompts", metavar="prompt", nargs="*", help="text for the model to continue")
    parser.add_argument("--tokens", type=int, default=standard.tokens,
                        help="maximum length of a sample [%(default)s]")
    parser.add_argument("--temperature", type=float, default=standard.temperature,
                        help="0: always the likeliest token [%(default)s]")
    parser.add_argument("--top-k", type=int, default=standard.top_k,
                        help="draw from the k likeliest tokens; 0: from all [%(default)s]")
    parser.add_argument("--seed", type=int, default=standard.seed,
                        help="of the first sample, 1 more for each further one [%(default)s]")
    asked = parser.parse_intermixed_args(argv)
    good = asked.tokens > 0 and asked.top_k >= 0 and 0 <= asked.seed < 2**31
    demand(good and 0 <= asked.temperature < math.inf,
           "--tokens is 1 or more, --top-k and --temperature 0 or more, --seed from 0 to 2**31 - 1")
    return asked


def main(argv: Sequence[str]) -> int:
    """Prints samples; of a run's model, also to samples.txt in its folder. Returns the exit code."""
    try:
        asked = parse(argv)
        # what was typed is UTF-8, whatever the locale
        prompts = [os.fsencode(prompt).decode() for prompt in asked.prompts]
        model = find_model(asked.run)
        settings = Settings(asked.tokens, asked.temperature, asked.top_k, asked.seed)
        lines = [f"{model} {settings.flags()}"]
        lines += sample_lines(model, prompts, settings)
    except Refused as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeError, MemoryError, torch.OutOfMemoryError) as error:
        print(f"sample: {brief(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(*lines, sep="\n")
    keep(model.parent, lines)
    return 0


def keep(folder: Path, lines: list[str], mode: str = "a") -> None:
    """Adds lines to a run's samples.txt, or begins it anew (mode w). Other folders, such as records, stay as
    they are."""
    if (folder / "events.jsonl").is_file():
        with open(folder / SAMPLES, mode, encoding="utf-8") as file:
            print(*lines, sep="\n", file=file)


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main(sys.argv[1:]))
