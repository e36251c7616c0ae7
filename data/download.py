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
import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np
    from sentencepiece import SentencePieceProcessor
except ImportError as error:
    sys.exit(f"download: the package {error.name} is missing: ./run.sh setup")

from data import inputs

DISK_MARGIN = 500_000_000                        # bytes that stay free after the download
TRIES = 3                                        # of a file; each reconnects several times
TOKENS_PER_PARQUET = 1.3                         # bytes of token shards per byte of parquet, at most
# What tiktoken reads, too: {characters of a token: its number}
GPT2_VOCAB_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json"
GPT2_VOCAB_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
HUB_URL = "https://huggingface.co"
CORE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
ADVICE = {404: "it is not there", 401: "it does not exist or needs a valid HF_TOKEN",
          403: "it is not there, or not for everyone: HF_TOKEN may be one that may read it"}


class Source(NamedTuple):
    repo: str                                    # dataset repository on the hub
    name: str                                    # our folder under OUT/datasets
    default_shards: int                          # train shards without -n
    train: str                                   # pattern of the paths of train shards in the repository,
    val: str = ""                                # and of val shards; none: text, whose last shard is val
    tokenizer: str = ""                          # path in the repository of the SentencePiece model, if any
    vocab_size: int = 0                          # without one: of the tokenizer that made the shards, or that
    bos_id: int = 0                              # prepare.py makes, and its BOS


SP1024 = "datasets/datasets/fineweb10B_sp1024/fineweb_"
SP8192 = "datasets/datasets/fineweb10B_sp8192/fineweb_"
PARQUET = "shard_?????.parquet"
SOURCES = {
    "sp1024": Source("willdepueoai/parameter-golf", "fineweb10B_sp1024", 10, SP1024 + "train_??????.bin",
                     SP1024 + "val_??????.bin", "datasets/tokenizers/fineweb_1024_bpe.model"),
    "sp8192": Source("kevclark/parameter-golf", "fineweb10B_sp8192", 10, SP8192 + "train_??????.bin",
                     SP8192 + "val_??????.bin", "datasets/tokenizers/fineweb_8192_bpe.model"),
    "gpt2": Source("kjj0/fineweb10B-gpt2", "fineweb10B_gpt2", 9, "fineweb_train_??????.bin",
                   "fineweb_val_??????.bin", vocab_size=50257, bos_id=50256),
    "fineweb-edu": Source("karpathy/fineweb-edu-100b-shuffle", "fineweb_edu", 220, PARQUET, vocab_size=32768),
    "climbmix": Source("karpathy/climbmix-400b-shuffle", "climbmix", 220, PARQUET, vocab_size=32768),
}


class File(NamedTuple):
    remote: str                                  # path in the repository
    local: Path
    split: str                                   # train, val or tokenizer
    size: int | None = None
    sha256: str | None = None                    # the hub states it for LFS files,
    blob_id: str | None = None                   # for other files git's SHA-1

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


def fetch(url: str, file: File, headers: dict[str, str] | None) -> None:
    """Downloads to `file.part`, which goes on where it ends if the size is known. Raises Damaged where it has
    another size in the end."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    have = file.part.stat().st_size if file.part.exists() else 0
    if have > (file.size or 0):
        file.part.unlink()
        have = 0
    try:
        with open(file.part, "ab") as part:
            http_get(url, part, resume_size=have, headers=(headers or {}) | {"Accept-Encoding": "identity"},
                     expected_size=file.size, displayed_filename=file.local.name)
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
    sorted by name."""
    def matching(pattern: str, split: str, folder: Path) -> list[File]:
        items = [item for item in listing if fnmatchcase(item.rfilename, pattern)]
        return [File(item.rfilename, folder / Path(item.rfilename).name, split, item.size,
                     item.lfs.sha256 if item.lfs else None, item.blob_id)
                for item in sorted(items, key=lambda item: item.rfilename)]

    folder = out / ("datasets" if source.val else "parquet") / source.name
    tokenizer = matching(source.tokenizer, "tokenizer", out / "tokenizers")
    train = matching(source.train, "train", folder)
    val = matching(source.val, "val", folder)
    if not source.val:
        val = [file._replace(split="val") for file in train[-1:]]
        train = train[:-1]
    for pattern, files in (source.tokenizer, tokenizer), (source.val, val), (source.train, train):
        if pattern and not files:
            raise Failed(f"the dataset repository {source.repo} lists no {pattern}")
    if train_shards > len(train):
        raise Refused(f"-n {train_shards}: {source.repo} lists only {len(train)} train shards")
    return tokenizer + train[:train_shards or None] + val


def verify(path: Path, file: File) -> str:
    """The sha256 of `path`; raises Damaged if it differs from what is known of it."""
    if file.size not in (None, path.stat().st_size):
        raise Damaged(f"{path.stat().st_size:,} bytes instead of {file.size:,}")
    with inputs.open_binary(path) as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    good = file.sha256 in (None, sha256)
    if file.blob_id and not file.sha256:
        git = hashlib.sha1(b"blob %d\0" % file.size + inputs.read_bytes(path)).hexdigest()
        good = file.blob_id == git
    if not good:
        raise Damaged("its bytes are not those that were published")
    return sha256


def check_disk(missing: list[File], out: Path, more: int = 0) -> None:
    """Raises Refused if the folders are not writable or their disks, which may be several, have no room for
    `missing`, for `more` bytes of datasets and for the margin."""
    need = Counter({out / "datasets": more} if more else {})
    for file in missing:
        there = file.part.stat().st_size if file.part.exists() else 0
        need[file.local.parent] += max(0, (file.size or 0) - there)
    disks = {}      # {disk: (a folder there, bytes)}
    for folder in sorted(need):
        if reason := inputs.why_not_writable(folder):
            raise Refused(reason)
        folder.mkdir(parents=True, exist_ok=True)
        disk = os.stat(folder).st_dev
        disks[disk] = (folder, disks.get(disk, (folder, DISK_MARGIN))[1] + need[folder])
    for folder, size in disks.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            raise Refused(f"{folder} needs {size / 1e9:,.2f} GB of free disk space ({DISK_MARGIN / 1e9:g} GB "
                          f"of it as a margin) and has {free / 1e9:,.2f} GB")


def get_file(what: str, url: str, file: File, headers: dict[str, str] | None = None) -> str:
    """Fetches and verifies a file, then gives it its name; returns its sha256."""
    def attempt() -> str:
        fetch(url, file, headers)
        try:
            return verify(file.part, file)
        except Damaged:
            file.part.unlink()
            raise

    file.local.unlink(missing_ok=True)
    sha256 = retry(what, attempt)
    file.part.replace(file.local)
    return sha256


def download(endpoint: str, source: Source, revision: str | None, files: list[File]) -> dict[File, str]:
    """Fetches files of a repository; returns their sha256."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers
    digests = {}
    for file in files:
        url = hf_hub_url(source.repo, file.remote, repo_type="dataset", revision=revision, endpoint=endpoint)
        digests[file] = get_file(file.remote, url, file, build_hf_headers())
    return digests


def count_val(sp: SentencePieceProcessor | None, tokens: np.ndarray, vocab_size: int,
              bos_id: int) -> tuple[int | None, int]:
    """(bytes, documents) of the val tokens; bytes is None without sp."""
    from train_gpt import decoded_bytes
    if tokens.max() >= vocab_size:
        raise Failed(f"the val shards hold token {tokens.max()}, but the vocabulary has {vocab_size} tokens")
    documents = int(np.count_nonzero(tokens == bos_id) + (tokens[0] != bos_id))
    if not sp:
        return None, documents
    if unknown := np.count_nonzero(tokens == sp.unk_id()):
        raise Failed(f"{unknown:,} tokens of the val shards stand for text that the tokenizer does not know, "
                     "so its bytes cannot be counted")
    return decoded_bytes(sp, tokens, bos_id), documents


def read_tokenizer(file: File, sha256: str, folder: Path) -> tuple[SentencePieceProcessor, dict[str, Any]]:
    """(the tokenizer, its entry for the manifest in `folder`); raises Failed."""
    try:
        sp = SentencePieceProcessor(model_proto=inputs.read_bytes(file.local))
    except RuntimeError:
        raise Failed(f"{file.remote} is no SentencePiece model") from None
    return sp, {"path": inputs.path_between(folder, file.local), "sha256": sha256,
                "vocab_size": sp.vocab_size(), "bos_id": sp.bos_id(), "lossless": False}


def write_manifest(path: Path, source: Source, revision: str | None,
                   digests: dict[File, str]) -> dict[str, Any]:
    """Write manifest.json in one step; the first of `digests` is the tokenizer, if there is one. Raises
    Failed for what is no token shard."""
    from train_gpt import Refused as Unfit
    from train_gpt import open_shard
    sp = None
    about = {"vocab_size": source.vocab_size, "bos_id": source.bos_id, "lossless": False}
    if source.tokenizer:
        sp, about = read_tokenizer(*next(iter(digests.items())), path.parent)
    shards = [file for file in digests if file.split != "tokenizer"]
    try:        # a map at a time: there may be more shards than a process may open files
        files = [{"path": file.local.name, "split": file.split, "tokens": len(open_shard(file.local)),
                  "sha256": digests[file]} for file in shards]
    except Unfit as error:
        raise Failed(str(error)) from None
    val = np.concatenate([open_shard(file.local) for file in shards if file.split == "val"])
    val_bytes, val_docs = count_val(sp, val, about["vocab_size"], about["bos_id"])
    manifest = {"version": 1, "name": source.name, "source": source.repo, "revision": revision,
                "tokenizer": about, "files": files, "train_bytes": None, "val_bytes": val_bytes,
                "train_docs": None, "val_docs": val_docs, "text_fingerprint": None, "document_hashes": None}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    part.replace(path)
    return manifest


def fetch_missing(source: Source, files: list[File], revision: str | None, out: Path, endpoint: str,
                  more: int = 0) -> dict[File, str]:
    """Verify the files that are there and download the others; the disk must have room for `more` bytes
    besides. Returns the sha256 of each file."""
    digests = {}
    for file in [file for file in files if file.local.is_file()]:
        try:
            digests[file] = verify(file.local, file)
        except Damaged as error:
            print(f"{file.local.name}: {error}; it will be fetched again", file=sys.stderr)
    missing = [file for file in files if file not in digests]
    check_disk(missing, out, more)
    if missing and source.val:                   # until the end it would list other shards than are there
        (out / "datasets" / source.name / "manifest.json").unlink(missing_ok=True)
    digests |= download(endpoint, source, revision, missing)
    print(f"{source.name}: {len(files)} files verified, {len(missing)} of them downloaded now "
          f"({sum(file.size for file in missing) / 1e6:,.1f} MB)", flush=True)
    return {file: digests[file] for file in files}


def get_tokens(args: argparse.Namespace, source: Source, endpoint: str) -> str:
    """Download token shards and write their manifest; returns the summary."""
    out = args.out
    revision, listing = list_files(endpoint, source.repo)
    files = select(source, listing, args.train_shards, out)
    digests = fetch_missing(source, files, revision, out, endpoint)
    manifest = write_manifest(out / "datasets" / source.name / "manifest.json", source, revision, digests)
    tokens = Counter()
    for file in manifest["files"]:
        tokens[file["split"]] += file["tokens"]
    size = f" ({manifest['val_bytes']:,} bytes)" if manifest["val_bytes"] else ""
    return f"{source.name}: {tokens['train']:,} train tokens, {tokens['val']:,} val tokens{size}"


def get_parquet(args: argparse.Namespace, source: Source, endpoint: str) -> str:
    """Download text as parquet files and have prepare.py make a dataset of them, which prints its own
    summary; returns the last line."""
    from data import prepare
    out = args.out
    revision, listing = list_files(endpoint, source.repo)
    files = select(source, listing, args.train_shards, out)
    chosen = [prepare.Input(file.local, "parquet", marks=False) for file in files]
    request = prepare.Request(source.name, [source.repo, f"{len(files) - 1} train shards"], chosen[:-1],
                              source.vocab_size, prepare.PARQUET_VAL_BYTES, chosen[-1:], keeps_order=True)
    more = int(TOKENS_PER_PARQUET * sum(file.size for file in files))
    try:        # what can be refused before the download
        places = prepare.layout(request, out)
        if places.folder.exists() and not args.force:
            prepare.is_complete(places.folder, request)
            more = 0
        else:
            prepare.check_places(places)
        fetch_missing(source, files, revision, out, endpoint, more)
        prepare.build(request, out, args.force)
    except prepare.DataError as error:
        raise Refused(str(error)) from None
    return f"{source.name} is ready"


def unpack_bundle(archive: Path, folder: Path) -> None:
    """Unpacks eval_bundle/ of the zip, nowhere but into the folder; raises Failed if it is not whole."""
    try:
        with zipfile.ZipFile(archive) as bundle:
            members = [name for name in bundle.namelist() if name.startswith("eval_bundle/")]
            bundle.extractall(folder, members)      # raises BadZipFile where the CRC differs
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise Failed(f"the zip of the CORE bundle is damaged ({error})") from None
    if not is_bundle(folder / "eval_bundle"):
        raise Failed("the CORE bundle has no core.yaml, eval_meta_data.csv or eval_data/")


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


def get_core(folder: Path, partial: Path, url: str) -> str:
    """Download the zip at `url` to `partial`, unpack it there and rename it; returns the summary."""
    if is_bundle(folder):
        return "core_bundle is there already"
    if folder.exists():
        raise Refused(f"{folder} exists and is not the whole CORE bundle: remove or rename it first")
    archive = File("", partial / "eval_bundle.zip", "")
    check_disk([archive], folder.parent)
    try:
        sha256 = get_file("the CORE bundle", url, archive)
        shutil.rmtree(partial / "eval_bundle", ignore_errors=True)      # what a killed run left
        unpack_bundle(archive.local, partial)
        (partial / "eval_bundle").replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"core_bundle: downloaded now, sha256 of the zip {sha256}"


def get_gpt2_vocab(file: File, url: str) -> str:
    """Download GPT-2's vocabulary; returns the summary."""
    with contextlib.suppress(OSError, Damaged):
        return f"{file.local.name}: there already, sha256 {verify(file.local, file)}"
    check_disk([file], file.local.parent)
    return f"{file.local.name}: downloaded now, sha256 {get_file(file.remote, url, file)}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./run.sh data", description=__doc__,
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
        parser.error(f"unknown source {args.source!r}; known: {', '.join(known)}{hint}")
    if args.train_shards is None and args.source in SOURCES:
        args.train_shards = SOURCES[args.source].default_shards
    if args.train_shards is not None and args.train_shards < 0:
        parser.error("-n is 0 or more")
    return args


def web_address(variable: str, default: str) -> str:
    """The environment variable, or the default; raises Refused if it is no web address."""
    address = os.environ.get(variable) or default
    if not re.match(r"https?://(\[[\da-f:.]+\]|[^/\[])", address):
        raise Refused(f"{variable} must be an http:// or https:// address")
    return address


@contextlib.contextmanager
def alone(args: argparse.Namespace, folder: Path) -> Iterator[None]:
    """Raises Refused if another process downloads the same source to the same place, where both would append
    to the same incomplete files, or if nothing can be written there."""
    if reason := inputs.why_not_writable(folder):
        raise Refused(reason)
    try:
        with inputs.locked(folder):
            yield
    except inputs.Busy:
        raise Refused(f"another process is downloading {args.source} to {args.out}: the same command works "
                      "when that has ended") from None


def run(args: argparse.Namespace) -> str:
    """Do what the command line says; returns the summary."""
    endpoint = web_address("HF_ENDPOINT", HUB_URL).rstrip("/")     # huggingface_hub wants a good one anyway
    if args.source == "core":
        url = web_address("CORE_BUNDLE_URL", CORE_URL)
        folder = core_folder(args.out)
        partial = folder.with_name(".core_bundle.partial")
        with alone(args, partial):
            return get_core(folder, partial, url)
    if args.source == "gpt2-vocab":
        url = web_address("GPT2_VOCAB_URL", GPT2_VOCAB_URL)
        place = args.out / "tokenizers/gpt2_vocab.json"
        vocab = File("GPT-2's vocabulary", place, "", sha256=GPT2_VOCAB_SHA256)
        with alone(args, place.parent):
            return get_gpt2_vocab(vocab, url)
    source = SOURCES[args.source]
    get = get_tokens if source.val else get_parquet
    with alone(args, args.out / ("datasets" if source.val else "parquet") / source.name):
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
