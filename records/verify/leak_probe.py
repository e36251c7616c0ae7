"""The leak probe: does a model's score depend on nothing but the tokens before each target?

judge(...) runs in the process that decides. The folder's own train_gpt.py, a stranger's code, runs in two
worker processes with a time limit; they are asked for log-probabilities only and judged on what they answer:
1. changing the tokens after position t leaves every log-probability up to t as it was;
2. every row is a distribution: finite, and its exponentials sum to 1;
3. neither the other rows of a batch, nor their number, nor earlier calls change a row.
One worker sees the documents as they are, the other only changed ones, in random order and company.
It finds mistakes and lazy tricks. Code that looks out for the probe can hide from it: read the source, too.

Worker: python leak_probe.py SCRIPT ARTIFACT < requests > answers. A request is a line of JSON, rows of
tokens; the answer is a line of JSON, the shape of their log-probabilities, and these as fp32.
An empty ARTIFACT means random weights for the configuration that the environment asks for: a leak is a
property of the code, with any weights.
"""
import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

NOISE = 1e-4            # nats that other batch sizes may change by rounding, at most
LEAST = 2e-6            # nats that count as no change
SUM_TOLERANCE = 1e-4    # of the sum of a row's probabilities
ALIGNMENTS = (8, 16, 32, 64, 128)
WINDOWS = 64            # tokens: the windows of all recipes are multiples
SHORT_ROW = 1024        # tokens: longer rows of an evaluation are probed up to this length
KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")       # of ours, for a stranger's script


class ProbeFailed(Exception):
    """The model leaks, is no distribution, or could not be asked."""


# ------------------------------------------------------------ the worker
class Script:
    """A train_gpt.py and its model, opened for questions: the module offers load_config, load_model,
    log_probs, and in older scripts the class of the model. env: constants of random weights."""
    def __init__(self, module: ModuleType, artifact: Path | str | None, env: Mapping[str, str]) -> None:
        self.module = module
        if artifact:
            self.model, self.cfg = module.load_model(artifact)
        else:
            self.cfg = module.load_config(env)
            self.model = self.new_model()
            random_weights(self.model)

    def new_model(self) -> Any:
        if hasattr(self.module, "GPT"):                     # one class for all presets
            return self.module.GPT(self.cfg)
        if hasattr(self.cfg, "choose_kernels"):
            return self.cfg.make_model()
        return self.cfg.make_model(self.module.Kernels())   # scripts until 5c77bc0

    def about(self) -> dict[str, int]:
        """{"T": tokens of a row, "V": of the vocabulary}"""
        return {"T": self.cfg.train_seq_len, "V": self.cfg.vocab_size}

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """tokens (B, T) int64 -> (B, T, V) fp32."""
        import torch
        if hasattr(self.model, "set_context"):      # rules version 1: must be told length and window of rows
            window = self.cfg.window_schedule[-1]
            if hasattr(self.module, "eval_window"):         # the oldest know only that of the last stage
                window = self.module.eval_window(self.cfg)
            self.model.set_context(tokens.shape[1], window)
        with torch.no_grad():
            found = self.module.log_probs(self.model, torch.from_numpy(tokens.copy()))
        return found.float().contiguous().numpy()


def random_weights(model: Any) -> None:
    """Normal ones: zero-initialised projections would hide what flows through them."""
    import torch
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 1 if p.ndim < 2 else max(p.shape) ** -0.5, generator=generator)


def serve(path: Path, artifact: Path | str | None) -> None:
    """Imports the script, loads the model, says what it is about, answers requests to the last."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)       # what the script prints goes to stderr

    def answer(head: dict[str, Any] | list[Any], raw: bytes = b"") -> None:
        answers.write(json.dumps(head).encode() + b"\n" + raw)
        answers.flush()

    sys.path.insert(0, str(path.resolve().parent))      # companions of old scripts
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script = Script(module, artifact, os.environ)
    answer(script.about())
    for rows in map(json.loads, sys.stdin):
        found = script.log_probs(np.array(rows, np.int64))
        answer(list(found.shape), found.tobytes())


# ------------------------------------------------------------ the judge
def clean_environment() -> dict[str, str]:
    """What a stranger's script sees of our environment."""
    return {key: os.environ[key] for key in KEPT_ENVIRONMENT if key in os.environ}


class Model:
    """The worker seen from the judge: a function from tokens to log-probabilities."""
    def __init__(self, script: Path | str, artifact: Path | str | None, env: dict[str, str],
                 seconds: float) -> None:
        command = [sys.executable, __file__, str(script), str(artifact or "")]
        # The folder stays as it is, and threads of a waiting worker sleep
        own = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, env=clean_environment() | own | env)
        self.timer = threading.Timer(seconds, self.process.kill)
        self.timer.daemon = True
        self.timer.start()
        self.about = self.answer()

    def answer(self) -> Any:
        """The next line of JSON. Raises ProbeFailed."""
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").split("\n")
        why = next((line.strip() for line in reversed(said) if line.strip()), "it ended without a word")
        if not self.timer.is_alive():       # it has killed the worker
            why = "it took too long"
        raise ProbeFailed(f"the script does not answer: {why[:200]}")

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """tokens (B, T) -> (B, T, V) fp32."""
        with contextlib.suppress(BrokenPipeError):      # answer() says why it ended
            self.process.stdin.write(json.dumps(tokens.tolist()).encode() + b"\n")
            self.process.stdin.flush()
        shape = self.answer()
        wanted = [*tokens.shape, self.about["V"]]
        if shape != wanted:
            raise ProbeFailed(f"log_probs of tokens {tokens.shape} has shape {shape}, not {wanted}")
        raw = self.process.stdout.read(4 * math.prod(shape))
        if len(raw) != 4 * math.prod(shape):
            self.answer()       # raises: the worker has ended
        return np.frombuffer(raw, np.float32).reshape(shape)

    def close(self) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.communicate()
        self.errors.close()


# ------------------------------------------------------------ what is tried
def some_places(T: int, rng: np.random.Generator) -> list[int]:
    """Last unchanged positions that are worth a try: some odd ones, a random multiple of each alignment, all
    where a window may end, and the place before each of these."""
    found = {1, T // 2, T - 2} | {int(t) | 1 for t in rng.integers(0, T - 2, 4)}
    aligned = [*range(WINDOWS, T, WINDOWS)]
    aligned += [step * int(rng.integers(1, (T - 2) // step + 1)) for step in ALIGNMENTS if step < T - 1]
    found |= {place - before for place in aligned for before in (0, 1)}
    return sorted(t for t in found if t < T - 1)


def documents(T: int, V: int, val_files: Sequence[Path],
              rng: np.random.Generator) -> list[tuple[str, np.ndarray]]:
    """[(kind, tokens (T,))]: random tokens, and a piece of the val split where it is at hand."""
    found = [("random tokens", rng.integers(0, V, T))]
    for path in val_files[:1]:
        val = np.memmap(path, "<u2", "r", 1024)
        if len(val) > T and int(val[:T * 4].max()) < V:
            start = int(rng.integers(0, len(val) - T))
            found.append(("validation text", val[start:start + T].astype(np.int64)))
    return found


def check_rows(rows: np.ndarray, kind: str) -> None:
    """Every (V,) of rows (…, V) is a distribution. Raises ProbeFailed."""
    sums = np.exp(rows).sum(-1, dtype=np.float64)
    worst = sums.flat[np.abs(sums - 1).argmax()]       # of NaN the place
    if not abs(worst - 1) <= SUM_TOLERANCE:
        raise ProbeFailed(f"log_probs are no distribution ({kind}): the probabilities of a position sum to "
                          f"{worst:.6g}")


def largest_change(now: np.ndarray, before: np.ndarray) -> float:
    """The largest difference; that of -inf and -inf is none."""
    with np.errstate(invalid="ignore"):
        change = np.abs(now - before)
    return float(np.nan_to_num(change, nan=0.0, posinf=np.inf).max(initial=0.0))


def most_rows(T: int, V: int) -> int:
    """Rows of a batch: at most 24, and no more log-probabilities than fit."""
    return max(1, min(24, (1 << 24) // (T * V)))


def try_company(seen: Model | Script, kind: str, document: np.ndarray, base: np.ndarray, V: int,
                rng: np.random.Generator) -> float:
    """Do other rows or earlier calls change what the worker `seen` says of a document? Returns the largest
    change in nats. Raises ProbeFailed."""
    worst = 0.0
    T = len(document)
    for size in (2, 3, most_rows(T, V)):
        batch = rng.integers(0, V, (size, T))
        place = int(rng.integers(size))
        batch[place] = document
        worst = max(worst, largest_change(seen.log_probs(batch)[place], base))
    if worst > NOISE:
        raise ProbeFailed(f"a leak: other rows or calls change log-probabilities by {worst:.3g} nats "
                          f"({kind})")
    return worst


def try_places(fresh: Model | Script, kind: str, document: np.ndarray, base: np.ndarray, V: int,
               places: Iterable[int], limit: float, rng: np.random.Generator) -> float:
    """Asks the worker `fresh` for the document with other tokens after each of the places, in random order
    and batches. Returns the largest effect in nats on what comes before. Raises ProbeFailed above limit."""
    worst = 0.0
    T = len(document)
    left = [int(t) for t in rng.permutation(places)]
    while left:
        size = min(len(left), int(rng.integers(1, most_rows(T, V) + 1)))
        batch = left[:size]
        left = left[size:]
        rows = np.tile(document, (size, 1))
        for row, t in zip(rows, batch):
            row[t + 1:] = (document[t + 1:] + rng.integers(1, V, T - t - 1)) % V
        for t, row in zip(batch, fresh.log_probs(rows)):
            check_rows(row, f"{kind}, changed")
            effect = largest_change(row[:t + 1], base[:t + 1])
            worst = max(worst, effect)
            if effect > limit:
                raise ProbeFailed(f"a leak: tokens after position {t}, or other rows or calls, change "
                                  f"log-probabilities up to it by {effect:.3g} nats ({kind})")
    return worst


def probe(fresh: Model | Script, seen: Model | Script, T: int, V: int, val_files: Sequence[Path],
          rng: np.random.Generator) -> tuple[int, float, list[str]]:
    """Asks the worker `seen` for documents of T tokens, the worker `fresh` for changed ones. Returns (changes
    tried, the largest effect, kinds of documents). Raises ProbeFailed."""
    tried = 0
    worst = 0.0
    kinds = []
    for kind, document in documents(T, V, val_files, rng):
        base = seen.log_probs(document[None])[0].copy()
        check_rows(base, kind)
        every = not kinds and T <= 513 and T * V < 1 << 21      # small enough to try all places, once
        places = [*range(T - 1)] if every else some_places(T, rng)
        limit = max(LEAST, 10 * try_company(seen, kind, document, base, V, rng))
        worst = max(worst, try_places(fresh, kind, document, base, V, places, limit, rng))
        tried += len(places)
        kinds.append(kind)
    return tried, worst, kinds


def judge(script: Path | str, artifact: Path | None, env: dict[str, str], val_files: Sequence[Path] = (),
          seconds: float = 120, context: int = 0, seed: int | None = None) -> str:
    """Raises ProbeFailed. Returns what was tried, in one line. context: tokens of an evaluation row."""
    rng = np.random.default_rng(seed)
    with (contextlib.closing(Model(script, artifact, env, seconds)) as seen,
          contextlib.closing(Model(script, artifact, env, seconds)) as fresh):
        T = min(context or seen.about["T"], SHORT_ROW)
        tried, worst, kinds = probe(fresh, seen, T, seen.about["V"], val_files, rng)
    weights = "the artifact" if artifact else "random weights"
    return (f"{tried} changes of later tokens in {' and '.join(kinds)} of {T}, {weights}: the largest effect "
            f"on an earlier log-probability is {worst:.1g}, every row sums to 1")


def score(script: Path | str, artifact: Path | None, env: dict[str, str], val: np.ndarray,
          seconds: float) -> float:
    """Mean nats over every target of val (N,), rows of T tokens, added up here from log_probs alone."""
    n = len(val) - 1
    nats = 0.0
    with contextlib.closing(Model(script, artifact, env, seconds)) as model:
        T = model.about["T"]
        rows = max(1, (1 << 22) // (T * model.about["V"]))      # more is no faster
        for start in range(0, n, T * rows):
            piece = val[start:start + T * rows + 1].astype(np.int64)
            count = len(piece) - 1
            whole_rows = np.pad(piece[:-1], (0, -count % T)).reshape(-1, T)
            found = model.log_probs(whole_rows).reshape(-1, model.about["V"])[:count]
            check_rows(found, "validation text")
            nats -= float(found[np.arange(count), piece[1:]].astype(np.float64).sum())
    return nats / n


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
