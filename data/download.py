"""Download published data, verify it, and lay it out as the trainer reads it.

    python -m data.download sp1024            # 10 train shards (1B tokens), all val shards, the tokenizer
    python -m data.download sp1024 -n 80      # more train shards; complete files are kept
    python -m data.download sp1024 -n 0       # all that the repository lists
    python -m data.download sp8192 -n 128     # the same text by 8,192 pieces
    python -m data.download gpt2              # the speedrun's: GPT-2 tokens, 9 train shards (900M tokens)
    python -m data.download gpt2-vocab        # the bytes of GPT-2's tokens (1 MB), for speedrun_plus
    python -m data.download climbmix          # text, 220 train shards and val (22 GB), tokenized here
    python -m data.download fineweb-edu       # the same with another text
    python -m data.download core              # the 22 tasks of CORE

Token shards: writes OUT/datasets/<name>/*.bin, OUT/tokenizers/*.model and, last, manifest.json beside the
shards. It lists the first N train shards and all val shards, all verified in this run.
Text: writes OUT/parquet/<name>/*.parquet. The last file that the repository lists is val. Then prepare.py
makes dataset and tokenizer from them (vocabulary 32,768; val is cut to 50,000,000 bytes). A shard of some
250M characters gives some 52M tokens. 26 layers at 7.25 tokens per weight need 6.7B tokens; the default is
more because the trainer cuts documents to fill rows (its log line `documents:` counts what it reads).
GPT-2's vocabulary: writes OUT/tokenizers/gpt2_vocab.json; GPT2_VOCAB_URL is another address of that file.
CORE: writes OUT/core_bundle/ in one step; CORE_BUNDLE_URL is another address of the zip.
huggingface_hub fetches the files and tries again where that may help; an interrupted download of shards
continues where it stopped. HF_ENDPOINT is another hub; HF_TOKEN is sent to it; HF_HUB_DOWNLOAD_TIMEOUT is how
many seconds without data fail.
Exit 0: everything is there. 1: it failed, stderr says which file and why. 2: refused.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

from data import inputs

if TYPE_CHECKING:  # imported where they are needed: without them, this says what to install
    import numpy as np
    from sentencepiece import SentencePieceProcessor

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
HEADER_BYTES = 1024
DISK_MARGIN = 500_000_000                        # bytes that stay free after the download
TRIES = 3                                        # of a file; each reconnects several times
DECODE_DOCUMENTS = 1000                          # decoded at a time
TOKENS_PER_PARQUET = 1.3                         # bytes of token shards per byte of parquet, at most
# What tiktoken reads, too: {characters of a token: its number}
GPT2_VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json"
GPT2_VOCAB_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
ADVICE = {404: "it is not there", 401: "it does not exist or needs a valid HF_TOKEN",
          403: "it is not there, or not for everyone: HF_TOKEN may be one that may read it"}


class Source(NamedTuple):
    repo: str                                    # dataset repository on the hub
    name: str                                    # our folder under OUT/datasets
    default_shards: int                          # train shards without -n
    shards: str                                  # path in the repository of fineweb_{train,val}_%06d.bin
    tokenizer: str = ""                          # path in the repository of the SentencePiece model, if any
    vocab_size: int = 0                          # without one: of the tokenizer that made the shards,
    bos_id: int = 0                              # and its BOS
    parquet: bool = False                        # text, as shard_%05d.parquet; prepare.py makes the tokenizer


SOURCES = {
    "sp1024": Source("willdepueoai/parameter-golf", "fineweb10B_sp1024", 10,
                     "datasets/datasets/fineweb10B_sp1024/", "datasets/tokenizers/fineweb_1024_bpe.model"),
    "sp8192": Source("kevclark/parameter-golf", "fineweb10B_sp8192", 10,
                     "datasets/datasets/fineweb10B_sp8192/", "datasets/tokenizers/fineweb_8192_bpe.model"),
    "gpt2": Source("kjj0/fineweb10B-gpt2", "fineweb10B_gpt2", 9, "", vocab_size=50257, bos_id=50256),
    "fineweb-edu": Source("karpathy/fineweb-edu-100b-shuffle", "fineweb_edu", 220, "", vocab_size=32768,
                          parquet=True),
    "climbmix": Source("karpathy/climbmix-400b-shuffle", "climbmix", 220, "", vocab_size=32768, parquet=True),
}


class File(NamedTuple):
    remote: str                                  # path in the repository
    local: Path
    split: str                                   # train, val or tokenizer
    size: int
    sha256: str | None                           # the hub states it for LFS files,
    blob_id: str | None                          # for other files git's SHA-1

    @property
    def part(self) -> Path:
        """The file while it is incomplete or not yet verified."""
        return self.local.with_name(self.local.name + ".part")


class Failed(Exception):
    """The message is the one sentence that the user reads; `code` is the exit status."""
    code = 1


class Refused(Failed):
    code = 2


class Damaged(Exception):
    """Wrong bytes, or too few: another try may help."""


def retry(what: str, action: Callable[[], Any]) -> Any:
    """action(), which downloads something and checks it, again where that may help; raises Failed in the
    end."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
    for trial in range(TRIES):
        try:
            return action()
        except OfflineModeIsEnabled:
            raise Failed(f"{what} cannot be reached while HF_HUB_OFFLINE is set") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status < 500 and status != 429:
                raise Failed(f"the server answered {status} for {what}: "
                             f"{ADVICE.get(status, 'another try would not help')}") from None
            reason = f"the server answered {status}"
        except HTTPError as error:               # not connected, connection lost, or timed out
            reason = " ".join(str(error).split()) or type(error).__name__
        except Damaged as error:
            reason = str(error)
        if trial + 1 < TRIES:
            time.sleep(2 ** trial)
    raise Failed(f"{what}: {TRIES} tries failed, the last one: {reason}. Is there a network, and are "
                 "HF_ENDPOINT and the like right?")


def fetch(url: str, part: Path, size: int | None = None, headers: dict[str, str] | None = None) -> None:
    """Downloads to `part`, which goes on where it ends if the size is known. Raises Damaged where it has
    another size in the end."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    have = part.stat().st_size if part.exists() else 0
    if size is None or have > size:
        part.unlink(missing_ok=True)
        have = 0
    if have == size:
        return
    try:
        with open(part, "ab") as file:
            http_get(url, file, resume_size=have, headers=(headers or {}) | {"Accept-Encoding": "identity"},
                     expected_size=size, displayed_filename=part.name.removesuffix(".part"))
    except OSError as error:
        if error.errno or isinstance(error, HfHubHTTPError):     # of the disk, or the server's answer
            raise
        raise Damaged("the file came with another size") from None


def list_files(endpoint: str, repo: str) -> tuple[str, list[Any]]:
    """(commit, files with their rfilename, size, lfs and blob_id) of a dataset repository."""
    from huggingface_hub import HfApi
    what = f"the dataset repository {repo}"
    try:
        info = retry(what, lambda: HfApi(endpoint=endpoint).dataset_info(repo, files_metadata=True))
        return info.sha, [item for item in info.siblings if item.size is not None]
    except Failed:
        raise
    except Exception as error:                   # a server that is no hub can cause any error
        raise Failed(f"{what}: the server that HF_ENDPOINT names does not answer like a Hugging Face hub "
                     f"({type(error).__name__})") from None


def select(source: Source, listing: list[Any], train_shards: int, out: Path) -> list[File]:
    """The tokenizer if there is one, the first `train_shards` train shards (0: all) and all val shards, each
    sorted by name; of parquet shards the last one is val."""
    def matching(pattern: str, split: str, folder: Path) -> list[File]:
        items = [item for item in listing if re.fullmatch(pattern, item.rfilename)]
        return [File(item.rfilename, folder / Path(item.rfilename).name, split, item.size,
                     item.lfs.sha256 if item.lfs else None, item.blob_id)
                for item in sorted(items, key=lambda item: item.rfilename)]

    tokenizer = matching(re.escape(source.tokenizer), "tokenizer", out / "tokenizers")
    if source.parquet:
        shards = matching(r"shard_\d{5}\.parquet", "train", out / "parquet" / source.name)
        train = shards[:-1]
        val = [file._replace(split="val") for file in shards[-1:]]
    else:
        folder = out / "datasets" / source.name
        prefix = re.escape(source.shards)
        train = matching(prefix + r"fineweb_train_\d{6}\.bin", "train", folder)
        val = matching(prefix + r"fineweb_val_\d{6}\.bin", "val", folder)

    if source.tokenizer and not tokenizer:
        raise Failed(f"the dataset repository {source.repo} lists no {source.tokenizer}")
    for split, files in ("train", train), ("val", val):
        if not files:
            pattern = "shard_*.parquet" if source.parquet else f"{source.shards}fineweb_{split}_*.bin"
            raise Failed(f"the dataset repository {source.repo} lists no {pattern} for {split}")
    if train_shards > len(train):
        raise Refused(f"-n {train_shards}: {source.repo} lists only {len(train)} train shards")
    return tokenizer + train[:train_shards or None] + val


def verify(path: Path, file: File) -> str:
    """The sha256 of `path`; raises Damaged if it differs from what the hub states, Failed if it is a .bin
    that is no token shard."""
    if path.stat().st_size != file.size:
        raise Damaged(f"{path.stat().st_size:,} bytes instead of {file.size:,}")
    with inputs.open_binary(path) as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if file.sha256:
        good = sha256 == file.sha256
    else:
        git = hashlib.sha1(b"blob %d\0" % file.size + inputs.read_bytes(path)).hexdigest()
        good = file.blob_id in (None, git)
    if not good:
        raise Damaged("its bytes are not those that the hub states")
    if file.local.suffix == ".bin":
        shard_tokens(path)
    return sha256


def check_disk(missing: list[File], out: Path, more: int = 0) -> None:
    """Raises Refused if the folders are not writable or their disks, which may be several, have no room for
    `missing`, for `more` bytes of datasets and for the margin."""
    need = Counter()
    for file in missing:
        there = sum(min(path.stat().st_size, file.size) for path in (file.part, file.local) if path.exists())
        need[file.local.parent] += file.size - there
    if more:
        need[out / "datasets"] += more
    places = {}     # {disk: its folders}
    for folder in sorted(need):
        if reason := inputs.why_not_writable(folder):
            raise Refused(reason)
        folder.mkdir(parents=True, exist_ok=True)
        places.setdefault(os.stat(folder).st_dev, []).append(folder)
    for disk, folders in places.items():
        size = sum(need[folder] for folder in folders) + DISK_MARGIN
        free = shutil.disk_usage(folders[0]).free
        if free < size:
            place = out if disk == os.stat(out).st_dev else folders[0]
            raise Refused(f"{place} needs {size / 1e9:,.2f} GB of free disk space ({DISK_MARGIN / 1e9:g} GB "
                          f"of it as a margin) and has {free / 1e9:,.2f} GB")


def download(endpoint: str, source: Source, revision: str | None, files: list[File]) -> dict[File, str]:
    """Fetch and verify each file, then give it its name; returns their sha256."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers
    digests = {}
    for file in files:
        url = hf_hub_url(source.repo, file.remote, repo_type="dataset", revision=revision, endpoint=endpoint)

        def attempt() -> str:
            fetch(url, file.part, file.size, build_hf_headers())
            try:
                return verify(file.part, file)
            except Damaged:
                file.part.unlink()
                raise

        file.local.unlink(missing_ok=True)
        digests[file] = retry(file.remote, attempt)
        file.part.replace(file.local)
    return digests


def shard_tokens(path: Path) -> int:
    """Token count of a shard; raises Failed if its header is wrong or does not fit the file's size."""
    with inputs.open_binary(path) as stream:
        header = stream.read(HEADER_BYTES)
    magic, version, count = struct.unpack("<3i", header[:12].ljust(12, b"\0"))
    if (magic, version, 2 * count) != (SHARD_MAGIC, SHARD_VERSION, path.stat().st_size - HEADER_BYTES):
        raise Failed(f"{path.name.removesuffix('.part')} is no token shard: magic {magic}, version "
                     f"{version}, {count:,} tokens in {path.stat().st_size:,} bytes")
    return count


def decoded_bytes(sp: SentencePieceProcessor, tokens: np.ndarray, bos_id: int) -> int:
    """UTF-8 bytes of the text of `tokens`, each document decoded by itself. BOS starts a document and counts
    no bytes. `tokens` may be a memory map: DECODE_DOCUMENTS are decoded at a time."""
    import numpy as np
    edges = np.unique(np.concatenate([[0], np.flatnonzero(tokens == bos_id), [len(tokens)]]))
    total = 0
    for first in range(0, len(edges) - 1, DECODE_DOCUMENTS):
        part = edges[first:first + DECODE_DOCUMENTS + 1]
        documents = np.split(np.asarray(tokens[part[0]:part[-1]]), part[1:-1] - part[0])
        texts = sp.decode([document[document != bos_id] for document in documents], out_type=bytes,
                          num_threads=min(inputs.usable_cpus(), 16))
        total += sum(map(len, texts))
    return total


def count_val(sp: SentencePieceProcessor | None, shards: list[Path], vocab_size: int,
              bos_id: int) -> tuple[int | None, int]:
    """(bytes, documents) of the val shards, read as one stream of tokens; bytes is None without sp."""
    import numpy as np
    parts = [np.memmap(path, "<u2", "r", HEADER_BYTES) for path in shards if shard_tokens(path)]
    if not parts:
        raise Failed("the val shards hold no tokens")
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if tokens.max() >= vocab_size:
        raise Failed(f"the val shards hold token {tokens.max()}, but the vocabulary has {vocab_size} tokens")
    unknown = int(np.count_nonzero(tokens == sp.unk_id())) if sp else 0
    if unknown:
        raise Failed(f"{unknown:,} tokens of the val shards stand for text that the tokenizer does not know, "
                     "so its bytes cannot be counted")
    documents = np.count_nonzero(tokens == bos_id) + (tokens[0] != bos_id)
    return decoded_bytes(sp, tokens, bos_id) if sp else None, int(documents)


def read_tokenizer(file: File, digests: dict[File, str],
                   folder: Path) -> tuple[SentencePieceProcessor, dict[str, Any]]:
    """(SentencePieceProcessor, its entry for the manifest in `folder`); raises Failed."""
    import sentencepiece
    try:
        sp = sentencepiece.SentencePieceProcessor(model_proto=inputs.read_bytes(file.local))
    except RuntimeError:
        raise Failed(f"{file.remote} is no SentencePiece model") from None
    if sp.bos_id() < 0:
        raise Failed(f"{file.remote} has no BOS token")
    return sp, {"path": inputs.path_between(folder, file.local), "sha256": digests[file],
                "vocab_size": sp.vocab_size(), "bos_id": sp.bos_id(), "lossless": False}


def write_manifest(path: Path, source: Source, revision: str | None,
                   digests: dict[File, str]) -> dict[str, Any]:
    """Write manifest.json in one step; the first of `digests` is the tokenizer, if there is one."""
    shards = [file for file in digests if file.split != "tokenizer"]
    files = [{"path": file.local.name, "split": file.split, "tokens": shard_tokens(file.local),
              "sha256": digests[file]} for file in shards]
    sp = None
    about = {"vocab_size": source.vocab_size, "bos_id": source.bos_id, "lossless": False}
    if source.tokenizer:
        sp, about = read_tokenizer(next(iter(digests)), digests, path.parent)
    val_bytes, val_docs = count_val(sp, [file.local for file in shards if file.split == "val"],
                                    about["vocab_size"], about["bos_id"])
    manifest = {"version": 1, "name": source.name, "source": source.repo, "revision": revision,
                "tokenizer": about, "files": files, "train_bytes": None, "val_bytes": val_bytes,
                "train_docs": None, "val_docs": val_docs, "text_fingerprint": None, "document_hashes": None}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    part.replace(path)
    return manifest


def fetch_missing(source: Source, files: list[File], revision: str | None, out: Path, endpoint: str,
                  more: int = 0) -> tuple[dict[File, str], list[File]]:
    """Verify the files that are there and download the others; the disk must have room for `more` bytes
    besides. Returns (sha256 of each file, files that were downloaded)."""
    digests = {}
    for file in [file for file in files if file.local.is_file()]:
        try:
            digests[file] = verify(file.local, file)
        except Damaged as error:
            print(f"{file.local.name}: {error}; it will be fetched again", file=sys.stderr)
    missing = [file for file in files if file not in digests]
    check_disk(missing, out, more)
    manifest_path = out / "datasets" / source.name / "manifest.json"
    claimed = inputs.read_text(manifest_path, "replace") if manifest_path.exists() else ""
    if any(file.local.name in claimed for file in missing):
        manifest_path.unlink()                   # it lists a file that is missing
    digests |= download(endpoint, source, revision, missing)
    return {file: digests[file] for file in files}, missing


def describe(source: Source, files: list[File], missing: list[File]) -> str:
    return (f"{source.name}: {len(files)} files verified, {len(missing)} of them downloaded now "
            f"({sum(file.size for file in missing) / 1e6:,.1f} MB)")


def get_tokens(args: argparse.Namespace, source: Source, endpoint: str) -> str:
    """Download token shards and write their manifest; returns the summary."""
    out = args.out
    revision, listing = list_files(endpoint, source.repo)
    files = select(source, listing, args.train_shards, out)
    digests, missing = fetch_missing(source, files, revision, out, endpoint)
    manifest = write_manifest(out / "datasets" / source.name / "manifest.json", source, revision, digests)
    tokens = [sum(file["tokens"] for file in manifest["files"] if file["split"] == split)
              for split in ("train", "val")]
    size = f" ({manifest['val_bytes']:,} bytes)" if manifest["val_bytes"] else ""
    return (f"{describe(source, files, missing)}, {tokens[0]:,} train tokens, "
            f"{tokens[1]:,} val tokens{size}")


def get_parquet(args: argparse.Namespace, source: Source, endpoint: str) -> str:
    """Download text as parquet files and have prepare.py make a dataset of them, which prints its own
    summary; returns the last line."""
    from data import prepare
    out = args.out
    revision, listing = list_files(endpoint, source.repo)
    files = select(source, listing, args.train_shards, out)
    origin = [source.repo, f"{len(files) - 1} train shards"]
    dataset = out / "datasets" / source.name
    if dataset.exists() and not args.force:
        try:
            existing = list(json.loads(inputs.read_text(dataset / "manifest.json"))["source"])
        except (OSError, ValueError, KeyError, TypeError):
            raise Refused(f"{source.name} exists without a readable manifest; --force replaces it") from None
        if existing != origin:
            raise Refused(f"{source.name} exists and is made of {', '.join(map(str, existing))}, not of "
                          f"{origin[1]}; --force replaces it and its tokenizer")
    chosen = {split: [prepare.Input(file.local, "parquet", marks=False) for file in files
                      if file.split == split] for split in ("train", "val")}
    request = prepare.Request(source.name, origin, chosen["train"], source.vocab_size,
                              prepare.PARQUET_VAL_BYTES, chosen["val"], keeps_order=True)
    try:
        places = prepare.layout(request, out)
        if args.force or not dataset.exists():
            prepare.check_places(places)
    except prepare.DataError as error:      # before the download
        raise Refused(str(error)) from None
    more = int(TOKENS_PER_PARQUET * sum(file.size for file in files))
    if dataset.exists() and not args.force:
        more = 0
    digests, missing = fetch_missing(source, files, revision, out, endpoint, more)
    print(describe(source, files, missing), flush=True)
    try:
        prepare.build(request, out, args.force)
    except prepare.DataError as error:
        raise Refused(str(error)) from None
    return f"{source.name} is ready"


def unpack_bundle(archive: Path, folder: Path) -> None:
    """Unpacks eval_bundle/ of the zip, nowhere but into the folder; raises Damaged if the zip is damaged."""
    try:
        with zipfile.ZipFile(archive) as bundle:
            members = [member for member in bundle.infolist() if member.filename.startswith("eval_bundle/")]
            need = sum(member.file_size for member in members) + DISK_MARGIN
            if (free := shutil.disk_usage(folder).free) < need:
                raise Refused(f"the CORE bundle needs {need / 1e9:,.2f} GB of free disk space "
                              f"({DISK_MARGIN / 1e9:g} GB of it as a margin), there are {free / 1e9:,.2f} GB")
            bundle.extractall(folder, members)      # raises BadZipFile where the CRC differs
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Damaged(f"the zip is damaged ({reason})") from None


def is_bundle(folder: Path) -> bool:
    """Has the folder what the trainer looks for? It says which task is damaged."""
    return all((folder / name).exists() for name in ("core.yaml", "eval_meta_data.csv", "eval_data"))


def core_folder(out: Path) -> Path:
    """Where the bundle goes: behind a link, where that leads. Raises Refused where it cannot go there."""
    folder = out / "core_bundle"
    place = inputs.behind_link(folder)
    if not place:
        raise Refused(f"{folder} is a link to a place in a folder that is not there: {os.readlink(folder)}")
    return place


def get_core(args: argparse.Namespace, url: str) -> str:
    """Download the zip at `url` and unpack it to OUT/core_bundle; returns the summary."""
    folder = core_folder(args.out)
    partial = folder.with_name(".core_bundle.partial")
    archive = partial / "eval_bundle.zip"
    if folder.exists() and not (folder / "eval_bundle.zip").is_file():
        raise Refused(f"{folder} exists and was not made by this command: remove or rename it first")
    there = is_bundle(folder)
    if not there:
        check_disk([File("", archive, "", 0, None, None)], args.out)

        def attempt() -> None:
            fetch(url, archive)
            shutil.rmtree(partial / "eval_bundle", ignore_errors=True)
            unpack_bundle(archive, partial)
            if not is_bundle(partial / "eval_bundle"):
                raise Failed("the CORE bundle has no core.yaml, eval_meta_data.csv or eval_data/")

        try:
            retry("the CORE bundle", attempt)
            archive.replace(partial / "eval_bundle" / archive.name)
            shutil.rmtree(folder, ignore_errors=True)
            (partial / "eval_bundle").replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    digest = hashlib.sha256(inputs.read_bytes(folder / "eval_bundle.zip")).hexdigest()
    return f"core_bundle: {'there already' if there else 'downloaded now'}, sha256 of the zip {digest}"


def get_gpt2_vocab(args: argparse.Namespace, url: str) -> str:
    """Download GPT-2's vocabulary to OUT/tokenizers/gpt2_vocab.json; returns the summary."""
    path = args.out / "tokenizers" / "gpt2_vocab.json"
    part = path.with_name(path.name + ".part")

    def is_whole(file: Path) -> bool:
        return file.is_file() and hashlib.sha256(inputs.read_bytes(file)).hexdigest() == GPT2_VOCAB_SHA256

    def attempt() -> None:
        fetch(url, part)
        if not is_whole(part):
            part.unlink()
            raise Damaged("its sha256 is not that of GPT-2's vocabulary")

    there = is_whole(path)
    if not there:
        check_disk([File("", path, "", 0, None, None)], args.out)
        retry("GPT-2's vocabulary", attempt)
        part.replace(path)
    return f"gpt2_vocab.json: {'there already' if there else 'downloaded now'}, sha256 {GPT2_VOCAB_SHA256}"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; raises Refused where it makes no sense."""
    parser = Parser(prog="./run.sh data", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*SOURCES, "gpt2-vocab", "core"]
    parser.add_argument("source", help=f"one of: {', '.join(known)}")
    defaults = ", ".join(f"{name}: {source.default_shards}" for name, source in SOURCES.items())
    parser.add_argument("-n", dest="train_shards", type=int, help=f"train shards, 0 = all ({defaults})")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder (data)")
    parser.add_argument("--force", action="store_true", help="replace a dataset made of other parquet shards")
    args = parser.parse_args(argv)
    if args.source not in known:
        hint = f"; a text of your own: --text {args.source}" if Path(args.source).exists() else ""
        raise Refused(f"unknown source {args.source!r}; known: {', '.join(known)}{hint}")
    if args.train_shards is None:
        args.train_shards = SOURCES[args.source].default_shards if args.source in SOURCES else 0
    if args.train_shards < 0:
        raise Refused("-n is 0 or more")
    return args


def web_address(variable: str, default: str) -> str:
    """The environment variable, or the default; raises Refused if it is no web address."""
    address = os.environ.get(variable) or default
    try:
        if urlsplit(address).scheme in ("http", "https") and urlsplit(address).hostname:
            return address
    except ValueError:
        pass
    raise Refused(f"{variable} must be an http:// or https:// address")


@contextlib.contextmanager
def alone(args: argparse.Namespace, folder: Path) -> Iterator[None]:
    """Raises Refused if another process downloads the same source to the same place: both would append to the
    same incomplete files."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(inputs.locked(folder))
        except inputs.Busy:
            raise Refused(f"another process is downloading {args.source} to {args.out}: the same command "
                          "works when that has ended") from None
        except OSError:
            pass        # what cannot be written there, check_disk() says
        yield


def run(args: argparse.Namespace) -> str:
    """Do what the command line says; returns the summary."""
    try:
        from huggingface_hub.constants import ENDPOINT
        if args.source == "core":
            url = web_address("CORE_BUNDLE_URL", CORE_URL)
            with alone(args, core_folder(args.out).with_name(".core_bundle.partial")):
                return get_core(args, url)
        if args.source == "gpt2-vocab":
            url = web_address("GPT2_VOCAB_URL", GPT2_VOCAB_URL)
            with alone(args, args.out / "tokenizers"):
                return get_gpt2_vocab(args, url)
        import numpy, sentencepiece  # noqa: E401, F401
        source = SOURCES[args.source]
        if source.parquet:
            import pyarrow  # noqa: F401
    except ImportError as error:
        raise Refused(f"package {error.name} is missing: pip install -r requirements.txt") from None
    except ValueError:                           # huggingface_hub parses it when it is imported
        raise Refused("HF_ENDPOINT must be an http:// or https:// address") from None
    endpoint = web_address("HF_ENDPOINT", ENDPOINT).rstrip("/")
    get = get_parquet if source.parquet else get_tokens
    with alone(args, args.out / ("parquet" if source.parquet else "datasets") / source.name):
        return get(args, source, endpoint)


def main(argv: list[str] | None = None) -> int:
    try:
        print(run(parse(argv)))
        return 0
    except Failed as error:
        code = error.code
        sentence = str(error)
    except OSError as error:
        code = 1
        sentence = f"the download stopped: {error.strerror or type(error).__name__}"
    except KeyboardInterrupt:
        code = 1
        sentence = "interrupted; the same command continues where it stopped"
    print(f"error: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    inputs.steady_output()
    sys.exit(main())
