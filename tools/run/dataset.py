"""The data of a run as a whole, before it starts: what is missing, damaged, or in both splits. What the
trainer itself finds out is found out here, too."""
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from data.inputs import usable_cpus
from train_gpt import (
    Config, Data, Refused, Shard, brief, decoded_bytes, open_data, open_shard, require, show)

# {folder: arguments of ./run.sh data that get it}
ARGUMENTS = {
    "embedded": [], "fineweb10B_sp1024": ["sp1024", "-n", "80"], "fineweb10B_sp8192": ["sp8192", "-n", "128"],
    "fineweb10B_gpt2": ["gpt2"], "climbmix": ["climbmix"], "fineweb_edu": ["fineweb-edu"]}
WHOLE_BYTES = 4 << 30  # train shards of up to this size in all are read whole, which takes some seconds
PLACES = 64  # where each shard of a larger dataset is looked at
PLACE_TOKENS = 1 << 14
BEGINNING = 64  # tokens that identify a document
Log = Callable[..., None]  # takes lines


def command(arguments: list[str]) -> str:
    return " ".join(["./run.sh data", *arguments])


def command_for(folder: Path) -> str:
    """The command that gets a dataset."""
    return command(ARGUMENTS.get(folder.name, ["--text", "PATH", "--name", folder.name or "NAME"]))


def advice(folder: Path) -> str:
    """What to do where there is no dataset: it may be one in data/datasets, or a text."""
    own = Path("data/datasets", folder.name)
    if has_shards(own):
        return f"did you mean DATA_PATH={own}?"
    if os.path.isfile(folder):  # False, too, for a name that is too long
        path = os.path.relpath(folder)
        return f"make one of this text with `{command(['--text', path, '--name', folder.stem])}`"
    return f"get it with `{command_for(folder)}`"


def shards_in(folder: Path, split: str) -> list[str]:
    """The files that the trainer takes for shards."""
    return [path.name for path in folder.glob(f"[!.]*_{split}_*[0-9].bin")]


def has_shards(folder: Path) -> bool:
    """Are there a train and a val shard, or a manifest that tells of them?"""
    try:
        splits = [shards_in(folder, split) for split in ("train", "val")]
        return (folder / "manifest.json").exists() or all(splits)
    except OSError:  # such as for a name that is too long
        return False


def missing_data(cfg: Config) -> list[list[str]]:
    """Arguments of the `./run.sh data` commands that get what a run lacks of published data, or may lack: a
    download that was cut short has left no manifest."""
    constants = vars(cfg)
    folder = Path(constants["data_path"])
    found = []
    if folder.name in ARGUMENTS and not (folder / "manifest.json").exists():
        found.append(ARGUMENTS[folder.name])
    scores_core = constants.get("core") or constants.get("core_metric_every")
    if scores_core and not Path(constants["core_bundle"], "core.yaml").exists():
        found.append(["core"])
    if constants.get("prefix_weight") and not Path(constants["vocab_path"]).exists():
        found.append(["gpt2-vocab"])
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.json; {} if there is none."""
    path = folder / "manifest.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def check_dataset(cfg: Any, log: Log) -> Data:
    """Opens the dataset at cfg.data_path and looks for whatever would spoil a run. Raises Refused."""
    folder = Path(cfg.data_path).absolute()
    get_it = f"get it with `{command_for(folder)}`"
    require(has_shards(folder), f"no train and val shards at {show(cfg.data_path)!r}: {advice(folder)}")
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest, get_it)
        require(cfg.vocab_size or cfg.tokenizer_path or manifest.get("tokenizer"),
                f"{folder.name} names no tokenizer: set VOCAB_SIZE or TOKENIZER_PATH")
        data = open_data(cfg, log)
        check_digests(cfg, manifest, data, get_it)
        if not cfg.eval_from:
            check_contents(manifest, data, log, get_it)
        check_splits(folder, manifest, data)
    except Refused:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise Refused(f"manifest.json, a shard or the tokenizer of {folder.name} is damaged or missing "
                      f"({brief(error)}): {get_it}") from None
    if not manifest and folder.name in ARGUMENTS:
        log(f"data: no manifest.json, so these may not be all shards; {get_it} to be sure")
    wanted = vars(cfg).get("data_fingerprint")
    if wanted and data.about["fingerprint"] != wanted:
        log(f"data: not the text that {cfg.preset} is scored on (fingerprint {wanted})")
    return data


# ---------------------------------------------------------------- files
def check_files(folder: Path, manifest: dict[str, Any], get_it: str) -> None:
    """Raises Refused for a file of the manifest that is missing, has another size or is in both splits, and
    for shards that it does not name, or without one for what is named like the copy of a shard."""
    splits = {}
    for file in manifest.get("files", []):
        path = folder / file["path"]
        require(path.is_file(), f"{path.name} is missing: {get_it}")
        size = (path.stat().st_size - 1024) / 2
        stated = file.get("tokens", size)
        require(size == stated, f"{path.name} is damaged: it has {size:.1f} tokens, but manifest.json says "
                f"{stated}: {get_it}")
        split = splits.setdefault(path.name, file["split"])
        require(split == file["split"], f"{path.name} is a train and a val shard in manifest.json: {get_it}")
    for split in ("train", "val"):
        found = {*shards_in(folder, split)}
        require(found, f"there is no {split} shard in {folder.name}: {get_it}")
        if manifest:
            odd = found ^ {name for name, its_split in splits.items() if its_split == split}
            why = f"is no {split} shard by its name or by manifest.json"
        else:
            odd = {name for name in found if not name.removesuffix(".bin")[-1].isdecimal()}
            why = "is not named like a shard"
        require(not odd, f"{min(odd, default='')} {why}: move it out of {folder.name}, or {get_it}")


def check_digests(cfg: Any, manifest: dict[str, Any], data: Data, get_it: str) -> None:
    """Raises Refused for val shards or a tokenizer that do not match the manifest's digests, and for a number
    of bytes, which val_bpb divides by, that is not what a lossless tokenizer makes of val."""
    made_by = manifest.get("tokenizer") or {}
    stated = {file["path"]: file.get("sha256") for file in manifest.get("files", [])}
    stated[Path(cfg.tokenizer_path or made_by.get("path", "")).name] = made_by.get("sha256")
    for name, digest in data.about["sha256"].items():
        require(stated.get(name) in (None, digest),
                f"{name} does not match its sha256 in manifest.json: {get_it}")
    told = manifest.get("val_bytes")
    require(told is None or type(told) is int and told > 0, f"{data.about['name']}: val_bytes={told!r}")
    if told and data.tokenizer and made_by.get("lossless"):
        decoded = decoded_bytes(data.tokenizer, data.val, data.bos)
        require(told == decoded, f"{data.about['name']}: the manifest says {told} val bytes, the tokens "
                f"{decoded}: prepare it again")


def check_contents(manifest: dict[str, Any], data: Data, log: Log, get_it: str) -> None:
    """Raises Refused for train shards that are not what the manifest's digests say, hold tokens beyond the
    vocabulary, or never arrived in full. A large dataset is sampled, which is said."""
    stated = {file["path"]: file.get("sha256") for file in manifest.get("files", [])}
    size = 2 * sum([shard.size for shard in data.train])
    whole = size <= WHOLE_BYTES

    def check(shard: Shard) -> None:
        if whole:
            digest = read_whole(shard, data.vocab_size, get_it)
            require(stated.get(shard.path.name) in (None, digest),
                    f"{shard.path.name} does not match its sha256 in manifest.json: {get_it}")
            return
        for place, tokens in sampled(shard):
            check_tokens(shard, place, tokens, data.vocab_size, get_it)

    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(check, data.train))
    if not whole:
        log(f"data: {PLACES} places of each train shard were looked at, not its sha256: all have "
            f"{size / 1e9:.0f} GB, and up to {WHOLE_BYTES / 1e9:.0f} GB are read whole")


def read_whole(shard: Shard, vocab_size: int, get_it: str) -> str:
    """Reads a shard once -> its sha256. Raises Refused for tokens that cannot be text."""
    digest = hashlib.sha256()
    with open(shard.path, "rb") as file:
        digest.update(file.read(1024))
        place = 0
        while raw := file.read(1 << 24):
            digest.update(raw)
            tokens = np.frombuffer(raw, "<u2")
            check_tokens(shard, place, tokens, vocab_size, get_it)
            place += len(tokens)
    return digest.hexdigest()


def sampled(shard: Shard) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (place, tokens there) of a shard, evenly from its beginning to its end."""
    tokens = open_shard(shard.path)
    places = min(PLACES, math.ceil(shard.size / PLACE_TOKENS))
    for place in np.linspace(0, max(0, shard.size - PLACE_TOKENS), places).astype(int):
        yield place, tokens[place:place + PLACE_TOKENS]


def check_tokens(shard: Shard, place: int, tokens: np.ndarray, vocab_size: int, get_it: str) -> None:
    """Raises Refused for tokens beyond the vocabulary, and where PLACE_TOKENS of them are zero, as in a file
    of which a part was reserved and never written. place: where in the shard they begin."""
    full = len(tokens) // PLACE_TOKENS * PLACE_TOKENS
    parts = tokens[:full].reshape(-1, PLACE_TOKENS).max(1)
    empty = np.flatnonzero(parts == 0)
    if len(empty):
        start = place + empty[0] * PLACE_TOKENS
        raise Refused(f"{shard.path.name} holds nothing but zeros from token {start} to "
                      f"{start + PLACE_TOKENS}, at least: {get_it}")
    largest = max(parts.max(initial=0), tokens[full:].max(initial=0))
    require(largest < vocab_size,
            f"{shard.path.name} holds token {largest}, but vocab_size is {vocab_size}")


# ---------------------------------------------------------------- val in train
def check_splits(folder: Path, manifest: dict[str, Any], data: Data) -> None:
    """Raises Refused for documents that are in train and in val: by the hashes that prepare.py leaves, else
    by a sample."""
    hashes = manifest.get("document_hashes")
    if not hashes:
        refuse_val_in_train(data)
        return
    of_val, of_train = np.split(np.fromfile(folder / hashes["path"], "<u8"), [hashes["val"]])
    both = len(np.intersect1d(of_val, of_train))
    require(not both, f"{both} documents of {folder.name} are in train and in val: prepare it again")


def beginnings(tokens: np.ndarray, bos: int) -> set[bytes]:
    """The first BEGINNING tokens of each document that has this many. tokens (n,)."""
    starts = np.flatnonzero(tokens == bos)
    ends = np.append(starts[1:], len(tokens))
    return {tokens[start:start + BEGINNING].tobytes() for start in starts[ends - starts >= BEGINNING]}


def refuse_val_in_train(data: Data) -> None:
    """Samples documents of each train shard. Raises Refused if at least nine of them, and at least a
    twentieth, are in val; web text does not repeat itself that much."""
    known = beginnings(data.val, data.bos)
    for shard in data.train:
        sample = set()
        for _, tokens in sampled(shard):
            sample |= beginnings(tokens, data.bos)
        both = len(sample & known)
        require(both < 9 or 20 * both < len(sample),
                f"{both} of {len(sample)} documents sampled from train shard {shard.path.name} of "
                f"{data.about['name']} are in val: leave it out or prepare the data again")
