"""Download published token shards from the Hugging Face hub, verify them and describe them in a manifest.

    python data/download.py sp1024            # 10 train shards (1B tokens), all val shards, the tokenizer
    python data/download.py sp1024 -n 80      # more train shards; what is there and whole is kept
    python data/download.py sp1024 -n 0       # all that the repository lists
    python data/download.py gpt2              # the speedrun's: GPT-2 tokens, 9 train shards (900M tokens)

Writes OUT/datasets/<name>/*.bin, OUT/tokenizers/*.model and at last manifest.json beside the shards, which
lists the first N train shards and all val shards, each of them verified in this run. A download that was
interrupted continues where it stopped. HF_ENDPOINT names another hub; HF_TOKEN is sent where it is set.
Exit 0: all is there. 1: it failed, and stderr says which file and why. 2: refused before downloading.
"""
from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

SHARD_MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024
DISK_MARGIN = 500_000_000                        # bytes that stay free after the download
MAX_DELAY = 60.0                                 # seconds, the longest wait between two tries
RETRY_STATUS = {408, 416, 425, 429, 500, 502, 503, 504}
DECODE_TOKENS = 1 << 20                          # tokens per batch, more where a single document has more


class Source(NamedTuple):
    repo: str                                    # dataset repository on the hub
    name: str                                    # our folder under OUT/datasets
    enough: int                                  # train shards where -n does not say
    shards: str                                  # the repository's path of fineweb_{train,val}_%06d.bin
    tokenizer: str = ""                          # that of the SentencePiece model; none:
    vocab_size: int = 0                          # what is known of a tokenizer that is not published there
    bos_id: int = 0


SOURCES = {
    "sp1024": Source("willdepueoai/parameter-golf", "fineweb10B_sp1024", 10,
                     "datasets/datasets/fineweb10B_sp1024/", "datasets/tokenizers/fineweb_1024_bpe.model"),
    "gpt2": Source("kjj0/fineweb10B-gpt2", "fineweb10B_gpt2", 9, "", vocab_size=50257, bos_id=50256),
}


class File(NamedTuple):
    remote: str                                  # path in the repository
    local: Path
    split: str                                   # train, val or tokenizer
    size: int
    sha256: str | None                           # the hub has one for LFS files,
    blob_id: str | None                          # for the others this SHA-1 of git's

    @property
    def part(self) -> Path:
        """Where the bytes collect until they are complete and verified."""
        return self.local.with_name(self.local.name + ".part")


class Failed(Exception):
    """Carries the one sentence that the user reads."""
    code = 1


class Refused(Failed):
    code = 2


class Broken(Exception):
    """Not the right bytes, or not all of them: another try may help."""


def say(line: str, end: str = "\n"):
    """`line` on stderr, in place of a progress line that a terminal still shows."""
    print("\r\033[K" * sys.stderr.isatty() + line, end=end, file=sys.stderr, flush=True)


class Progress:
    """One line on stderr, `total` in millions of `unit`: rewritten on a terminal, else one every 15 s."""

    def __init__(self, label: str, total: int, unit: str = "MB"):
        self.label, self.total, self.unit, self.terminal = label, total, unit, sys.stderr.isatty()
        self.done = self.moved = 0               # moved is what this run did of it
        self.started = self.shown = time.monotonic()

    def add(self, done: int, moved: int = 0):
        self.done, self.moved, now = self.done + done, self.moved + moved, time.monotonic()
        if now - self.shown < (0.2 if self.terminal else 15.0):
            return
        self.shown, rate = now, self.moved / (now - self.started)
        left = int((self.total - self.done) / rate) if rate else 0
        say(f"{self.label} {self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} {self.unit}, {rate / 1e6:,.1f} "
            f"{self.unit}/s, {left // 60}:{left % 60:02d} left", end="" if self.terminal else "\n")


class Hub:
    """Listing and files of the hub over plain HTTP, by huggingface_hub's client (proxies, token, redirects).

    hf_hub_download itself keeps no partial file from run to run and may retry without end.
    """

    def __init__(self, endpoint: str, tries: int, delay: float, timeout: float):
        from huggingface_hub import HfApi
        self.api, self.tries, self.delay, self.timeout = HfApi(endpoint=endpoint), tries, delay, timeout

    def persist(self, what: str, action):
        """action(), tried again after growing waits if that may help; raises Failed if it does not."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
        for trial in range(self.tries):
            wait = self.delay * 2 ** trial
            try:
                return action()
            except OfflineModeIsEnabled:
                raise Failed(f"{what} cannot be reached while HF_HUB_OFFLINE is set") from None
            except HfHubHTTPError as error:
                status, after = error.response.status_code, error.response.headers.get("Retry-After", "")
                if status not in RETRY_STATUS:
                    advice = {404: "it is not there", 401: "it does not exist or needs a valid HF_TOKEN",
                              403: "it needs an HF_TOKEN that may read it"}.get(status, "no use in retrying")
                    raise Failed(f"the Hugging Face hub answered {status} for {what}: {advice}") from None
                reason = f"the hub answered {status}"
                wait = max(wait, int(after)) if after.isdecimal() else wait
            except HTTPError as error:           # base class of the client: not connected, cut off, timed out
                kind, text = type(error).__name__, " ".join(str(error).split())
                reason = f"no data for {self.timeout:g} s" if "Timeout" in kind else text or kind
            except Broken as error:
                reason = str(error)
            if trial + 1 < self.tries:
                wait = min(wait, MAX_DELAY)
                say(f"{what}: {reason}; try {trial + 2} of {self.tries} in {wait:g} s")
                time.sleep(wait)
        raise Failed(f"{what}: {self.tries} tries failed with the Hugging Face hub (or the server that "
                     f"HF_ENDPOINT names), the last one: {reason}")

    def list(self, repo: str):
        """(commit, files with rfilename, size, lfs and blob_id) of a dataset repository."""
        what = f"the dataset repository {repo}"
        try:
            info = self.persist(what, lambda: self.api.dataset_info(
                repo, files_metadata=True, timeout=self.timeout))
            return info.sha, [item for item in info.siblings if item.size is not None]
        except Failed:
            raise
        except Exception as error:               # whatever a server that is no hub brings about
            raise Failed(f"{what}: the server that HF_ENDPOINT names does not answer like a Hugging Face hub "
                         f"({type(error).__name__})") from None

    def fetch(self, url: str, part: Path, size: int, progress: Progress):
        """Complete `part` to `size` bytes from where it ends, over one connection; raises Broken if short."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
        have = part.stat().st_size if part.exists() else 0
        if 0 < size <= have:
            return
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={have}-"} if have else {}
        with get_session().stream("GET", url, headers=headers, timeout=self.timeout) as response:
            if response.status_code in (200, 416) and have:        # no resuming here: from the start
                progress.add(-have)
                part.unlink()
            hf_raise_for_status(response)
            with open(part, "ab") as out:
                for chunk in response.iter_raw():
                    out.write(chunk)
                    progress.add(len(chunk), len(chunk))
                    if out.tell() > size:
                        break
                have = out.tell()
        if have < size:
            raise Broken(f"only {have:,} of {size:,} bytes came")


def select(source: Source, listing: list, train_shards: int, out: Path) -> list[File]:
    """The tokenizer, the first `train_shards` train shards (0: all) and all val shards, by name."""
    found = {"tokenizer": [], "train": [], "val": []} if source.tokenizer else {"train": [], "val": []}
    pattern = re.compile(re.escape(source.shards) + r"fineweb_(train|val)_\d{6}\.bin")
    for item in sorted(listing, key=lambda item: item.rfilename):
        shard = pattern.fullmatch(item.rfilename)
        if shard or item.rfilename == source.tokenizer:
            folder = out / "datasets" / source.name if shard else out / "tokenizers"
            split = shard[1] if shard else "tokenizer"
            found[split].append(File(item.rfilename, folder / Path(item.rfilename).name, split, item.size,
                                     item.lfs.sha256 if item.lfs else None, item.blob_id))
    for split, files in found.items():
        if not files:
            name = source.tokenizer if split == "tokenizer" else f"{source.shards}fineweb_{split}_*.bin"
            raise Failed(f"the dataset repository {source.repo} lists no {name}")
    if train_shards > len(found["train"]):
        raise Refused(f"-n {train_shards}: {source.repo} lists only {len(found['train'])} train shards")
    return found.get("tokenizer", []) + found["train"][:train_shards or None] + found["val"]


def verify(path: Path, file: File, progress: Progress | None = None) -> str:
    """The sha256 of `path`; raises Broken if it is not what the hub states, Failed if that is no shard."""
    if path.stat().st_size != file.size:
        raise Broken(f"{path.stat().st_size:,} bytes instead of {file.size:,}")
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % file.size)
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            sha256.update(block)
            if not file.sha256:
                git.update(block)
            if progress:
                progress.add(len(block), len(block))
    actual, stated = (sha256, file.sha256) if file.sha256 else (git, file.blob_id)
    if stated and actual.hexdigest() != stated:
        raise Broken(f"its {actual.name} differs from the one that the hub states")
    if file.split != "tokenizer":
        shard_tokens(path)
    return sha256.hexdigest()


def check_disk(missing: list[File], out: Path):
    """Raises Refused if the folders are not writable or lack room for `missing` and the margin."""
    for folder in sorted({file.local.parent for file in missing}):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise Refused(f"cannot write to {folder}: {error.strerror}") from None
    there = sum(min(path.stat().st_size, file.size) for file in missing
                for path in (file.part, file.local) if path.exists())
    need = sum(file.size for file in missing) - there + DISK_MARGIN
    if missing and (free := shutil.disk_usage(out).free) < need:
        raise Refused(f"{out} needs {need / 1e9:,.2f} GB of free disk space ({DISK_MARGIN / 1e9:g} GB of it "
                      f"as a margin) and has {free / 1e9:,.2f} GB")


def download(hub: Hub, source: Source, revision: str | None, files: list[File]) -> dict[File, str]:
    """Fetch and verify each file before it gets its name; returns their sha256."""
    from huggingface_hub import hf_hub_url
    digests, progress = {}, Progress("downloading", sum(file.size for file in files))
    for file in files:
        url = hf_hub_url(source.repo, file.remote, repo_type="dataset", revision=revision,
                         endpoint=hub.api.endpoint)

        def attempt():
            hub.fetch(url, file.part, file.size, progress)
            try:
                return verify(file.part, file)
            except Broken:
                progress.add(-file.part.stat().st_size)
                file.part.unlink()
                raise

        progress.add(file.part.stat().st_size if file.part.exists() else 0)
        file.local.unlink(missing_ok=True)
        digests[file] = hub.persist(file.remote, attempt)
        file.part.replace(file.local)
    return digests


def shard_tokens(path: Path) -> int:
    """Token count of a shard; raises Failed when header and file size do not belong together."""
    with open(path, "rb") as stream:
        header = stream.read(HEADER_BYTES)
    magic, version, count = struct.unpack("<3i", header[:12].ljust(12, b"\0"))
    if (magic, version, 2 * count) != (SHARD_MAGIC, SHARD_VERSION, path.stat().st_size - HEADER_BYTES):
        raise Failed(f"{path.name.removesuffix('.part')} is no token shard: magic {magic}, version "
                     f"{version}, {count:,} tokens in {path.stat().st_size:,} bytes")
    return count


def decoded_bytes(sp, tokens, bos_id: int) -> int:
    """UTF-8 bytes of the text of `tokens`, each document decoded by itself; BOS begins one and adds none.

    `tokens` may be a memory map: about DECODE_TOKENS of them are decoded at a time.
    """
    import numpy as np
    edges = np.unique(np.concatenate([[0], np.flatnonzero(tokens == bos_id), [len(tokens)]]))
    first, total = 0, 0
    progress = Progress("decoding", len(tokens), "M tokens")
    while first < len(edges) - 1:
        last = max(first + 1, int(np.searchsorted(edges, edges[first] + DECODE_TOKENS, side="right")) - 1)
        batch = np.asarray(tokens[edges[first]:edges[last]])
        documents = np.split(batch, edges[first + 1:last] - edges[first])
        texts = sp.decode([document[document != bos_id] for document in documents], out_type=bytes,
                          num_threads=min(os.cpu_count() or 1, 16))
        total, first = total + sum(map(len, texts)), last
        progress.add(len(batch), len(batch))
    return total


def count_val(sp, shards: list[Path], vocab_size: int, bos_id: int) -> tuple[int | None, int]:
    """(bytes, documents) of the val shards, which are one stream of tokens; without sp the bytes are None."""
    import numpy as np
    parts = [np.memmap(path, "<u2", "r", HEADER_BYTES) for path in shards if shard_tokens(path)]
    if not parts:
        raise Failed("the val shards hold no tokens")
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if tokens.max() >= vocab_size:
        raise Failed(f"the val shards hold token {tokens.max()}, the tokenizer has {vocab_size} pieces")
    documents = np.count_nonzero(tokens == bos_id) + (tokens[0] != bos_id)
    return decoded_bytes(sp, tokens, bos_id) if sp else None, int(documents)


def read_tokenizer(file: File, digests: dict[File, str], folder: Path):
    """(SentencePieceProcessor, what the manifest in `folder` says of it); raises Failed."""
    import sentencepiece
    try:
        sp = sentencepiece.SentencePieceProcessor(model_proto=file.local.read_bytes())
    except RuntimeError:
        raise Failed(f"{file.remote} is no SentencePiece model") from None
    if sp.bos_id() < 0:
        raise Failed(f"{file.remote} has no BOS token")
    return sp, {"path": Path(os.path.relpath(file.local, folder)).as_posix(), "sha256": digests[file],
                "vocab_size": sp.vocab_size(), "bos_id": sp.bos_id(), "lossless": False}


def write_manifest(path: Path, source: Source, revision: str | None, digests: dict[File, str]) -> dict:
    """Write manifest.json in one step; `digests` names the tokenizer first, if there is one."""
    shards = [file for file in digests if file.split != "tokenizer"]
    files = [{"path": file.local.name, "split": file.split, "tokens": shard_tokens(file.local),
              "sha256": digests[file]} for file in shards]
    sp, about = None, {"vocab_size": source.vocab_size, "bos_id": source.bos_id, "lossless": False}
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


def get(source: Source, train_shards: int, out: Path, hub: Hub) -> str:
    """From the hub's listing to our manifest; returns the summary."""
    started = time.monotonic()
    revision, listing = hub.list(source.repo)
    files = select(source, listing, train_shards, out)
    digests, present = {}, [file for file in files if file.local.is_file()]
    progress = Progress("verifying", sum(file.size for file in present))
    for file in present:
        try:
            digests[file] = verify(file.local, file, progress)
        except Broken as error:
            say(f"{file.local.name}: {error}; it will be fetched again")
    missing = [file for file in files if file not in digests]
    check_disk(missing, out)
    manifest_path = out / "datasets" / source.name / "manifest.json"
    claimed = manifest_path.read_text(errors="replace") if manifest_path.exists() else ""
    if any(file.local.name in claimed for file in missing):
        manifest_path.unlink()                   # it claims more than there is
    digests |= download(hub, source, revision, missing)
    manifest = write_manifest(manifest_path, source, revision, {file: digests[file] for file in files})
    tokens = [sum(file["tokens"] for file in manifest["files"] if file["split"] == split)
              for split in ("train", "val")]
    size = f" ({manifest['val_bytes']:,} bytes)" if manifest["val_bytes"] else ""
    return (f"{source.name}: {len(files)} files verified, {len(missing)} of them downloaded now "
            f"({sum(file.size for file in missing) / 1e6:,.1f} MB), {tokens[0]:,} train tokens, "
            f"{tokens[1]:,} val tokens{size}, {time.monotonic() - started:.0f} s")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def parse(argv) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help=f"one of: {', '.join(SOURCES)}")
    parser.add_argument("-n", dest="train_shards", type=int, help="train shards, 0 = all ("
                        + ", ".join(f"{name}: {source.enough}" for name, source in SOURCES.items()) + ")")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder (data)")
    parser.add_argument("--tries", type=int, default=5, help="per file (5)")
    parser.add_argument("--retry-delay", type=float, default=1.0, help="seconds, doubled each time (1)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds without data that fail (30)")
    args = parser.parse_args(argv)
    if args.source not in SOURCES:
        near = difflib.get_close_matches(args.source, SOURCES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SOURCES)}"
        raise Refused(f"unknown source {args.source!r}; {hint}")
    if args.train_shards is None:
        args.train_shards = SOURCES[args.source].enough
    if (args.train_shards < 0 or args.tries < 1 or not 0 <= args.retry_delay < 1e6
            or not 0 < args.timeout < 1e6):
        raise Refused("-n and --retry-delay are 0 or more, --tries 1 or more, --timeout more than 0")
    return args


def connect(args: argparse.Namespace) -> Hub:
    """The hub that HF_ENDPOINT names; raises Refused where address or packages do not allow it."""
    try:
        from huggingface_hub.constants import ENDPOINT
        endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
            raise ValueError
        import numpy, sentencepiece  # noqa: E401, F401
        return Hub(endpoint, args.tries, args.retry_delay, args.timeout)
    except ImportError as error:
        raise Refused(f"package {error.name} is missing: pip install -r requirements.txt") from None
    except ValueError:
        raise Refused("HF_ENDPOINT must be an http:// or https:// address") from None


def main(argv=None) -> int:
    try:
        args = parse(argv)
        hub = connect(args)
        summary = get(SOURCES[args.source], args.train_shards, args.out, hub)
        say("", end="")
        print(summary)
        return 0
    except Failed as error:
        code, sentence = error.code, error
    except OSError as error:
        code, sentence = 1, f"the download stopped: {error.strerror or type(error).__name__}"
    except KeyboardInterrupt:
        code, sentence = 1, "interrupted; the same command continues where it stopped"
    say(f"error: {sentence}")
    return code


if __name__ == "__main__":
    sys.exit(main())
