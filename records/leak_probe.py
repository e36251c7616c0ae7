"""The leak probe: does a model's score depend on nothing but the tokens before each target?

judge(...) runs in the process that decides. The folder's own train_gpt.py, a stranger's code, runs in a
worker process with a time limit; it is asked for log-probabilities only and judged on what it answers:
1. changing the tokens after position t leaves every log-probability up to t as it was;
2. every row is a distribution: finite, and its exponentials sum to 1;
3. neither the other rows of a batch nor earlier calls change a row.

Worker: python leak_probe.py SCRIPT ARTIFACT|- < requests > answers. ARTIFACT - means random weights for the
configuration that the environment asks for: a leak is a property of the code, with any weights.
"""
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

TOLERANCE = 1e-5        # nats; the same shape gives the same bits on a CPU
SUM_TOLERANCE = 1e-4    # nats; of the logarithm of a row's sum
ALIGNMENTS = (8, 16, 32, 64, 128)


class ProbeFailed(Exception):
    """The model leaks, is no distribution, or could not be asked."""


def serve(script, artifact):
    """The worker: loads the model, says {"T", "V", "windows"}, answers (B, T) int64 with (B, T, V) fp32."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)       # what the script prints goes to stderr
    import torch
    spec = importlib.util.spec_from_file_location("stranger", script)
    stranger = sys.modules["stranger"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    if artifact != "-":
        model, cfg = stranger.load_model(artifact)
    else:
        cfg = stranger.load_config(os.environ)
        model, generator = stranger.GPT(cfg), torch.Generator().manual_seed(0)
        for p in model.parameters():    # zero-initialised projections would hide what flows through them
            p.data.normal_(0, 1 if p.ndim < 2 else max(p.shape) ** -0.5, generator=generator)
        model.set_context(cfg.train_seq_len, cfg.window_schedule[-1])
    hello = {"T": cfg.train_seq_len, "V": cfg.vocab_size, "windows": list(cfg.window_schedule)}
    answers.write(json.dumps(hello).encode() + b"\n")
    answers.flush()
    while head := sys.stdin.buffer.readline():
        shape = json.loads(head)
        tokens = np.frombuffer(sys.stdin.buffer.read(8 * shape[0] * shape[1]), np.int64).reshape(shape)
        with torch.no_grad():
            out = stranger.log_probs(model, torch.from_numpy(tokens.copy())).float().contiguous().numpy()
        answers.write(json.dumps(list(out.shape)).encode() + b"\n" + out.tobytes())
        answers.flush()


class Model:
    """The worker seen from the judge: a function from tokens to log-probabilities."""
    def __init__(self, script, artifact, env, seconds):
        command = [sys.executable, __file__, str(script), str(artifact or "-")]
        clean = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
        clean["PYTHONDONTWRITEBYTECODE"] = "1"      # the folder stays as it is
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, env=clean | env)
        self.said, self.late = [], False
        self.timer = threading.Timer(seconds, self.stop)
        self.timer.daemon = True
        self.timer.start()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()
        self.seconds = seconds
        self.about = self.answer()

    def listen(self):
        for line in self.process.stderr:
            self.said = [*self.said[-20:], line.decode(errors="replace").strip()]

    def stop(self):
        self.late = True
        self.process.kill()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.listener.join(5)
            why = f"no answer within {self.seconds:.0f} s" if self.late else (self.said or ["it ended"])[-1]
            raise ProbeFailed(f"train_gpt.py could not be asked for log_probs: {why[:200]}")
        return json.loads(line)

    def log_probs(self, tokens):
        """tokens (B, T) -> (B, T, V) fp32."""
        with contextlib.suppress(BrokenPipeError):      # answer() says why it ended
            self.process.stdin.write(json.dumps(tokens.shape).encode() + b"\n" + tokens.tobytes())
            self.process.stdin.flush()
        shape = tuple(self.answer())
        if shape != (*tokens.shape, self.about["V"]):
            raise ProbeFailed(f"log_probs of tokens {tokens.shape} has shape {shape}, "
                              f"not {(*tokens.shape, self.about['V'])}")
        raw = self.process.stdout.read(4 * int(np.prod(shape)))
        if len(raw) != 4 * int(np.prod(shape)):
            self.answer()
        return np.frombuffer(raw, np.float32).reshape(shape)

    def close(self):
        self.timer.cancel()
        self.process.kill()
        self.process.communicate()


def places(T, windows, rng):
    """Last unchanged positions to try: odd ones, each alignment and the place before it, window edges."""
    found = {1, T // 2, T - 2, *(int(t) | 1 for t in rng.integers(0, T - 2, 2))}
    for a in ALIGNMENTS:
        if a < T - 1:
            place = a * int(rng.integers(1, (T - 2) // a + 1))
            found |= {place, place - 1}
    for w in windows:
        found |= {edge + shift for edge in (w, w // 2) for shift in (-1, 0, 1)}
    return sorted(t for t in found if 0 <= t < T - 1)


def documents(about, val_files, rng):
    """[(kind, tokens (T,))]: random tokens, and a piece of the val split where it is at hand."""
    T, V = about["T"], about["V"]
    found = [("random tokens", rng.integers(0, V, T))]
    for path in val_files[:1]:
        val = np.memmap(path, "<u2", "r", 1024)
        if len(val) > T and int(val[:T * 4].max()) < V:
            start = int(rng.integers(0, len(val) - T))
            found.append(("validation text", val[start:start + T].astype(np.int64)))
    return found


def check_rows(rows, what):
    """Every (V,) of rows (T, V) is a distribution."""
    if not np.isfinite(rows).all() and not (rows[~np.isfinite(rows)] == -np.inf).all():
        raise ProbeFailed(f"log_probs are not finite ({what})")
    for part in np.array_split(rows, max(1, rows.size >> 24)):
        sums = np.log(np.exp(part.astype(np.float64)).sum(-1))
        if float(np.abs(sums).max()) > SUM_TOLERANCE:
            total = float(np.exp(sums[np.abs(sums).argmax()]))
            raise ProbeFailed(f"log_probs are no distribution ({what}): the probabilities of a position sum "
                              f"to {total:.6g}")


def judge(script, artifact, env, val_files=(), seconds=120, seed=None):
    """Raises ProbeFailed. Returns what was tried, in one line."""
    rng = np.random.default_rng(seed)
    model = Model(script, artifact, env, seconds)
    try:
        T, V = model.about["T"], model.about["V"]
        tried, worst, kinds = 0, 0.0, []
        for kind, document in documents(model.about, val_files, rng):
            kinds.append(kind)
            base = None
            for t in places(T, model.about["windows"], rng):
                changed = document.copy()
                changed[t + 1:] = (document[t + 1:] + rng.integers(1, V, T - t - 1)) % V
                first, second = model.log_probs(np.stack([document, changed]))
                if base is None:
                    base = first.copy()
                check_rows(second, f"{kind}, changed after {t}")
                for name, row, upto in (("other rows or calls", first, T), ("later tokens", second, t + 1)):
                    with np.errstate(invalid="ignore"):      # -inf minus -inf is no change
                        gap = float(np.nan_to_num(np.abs(row[:upto] - base[:upto]), nan=0.0).max())
                    worst = max(worst, gap)
                    if gap > TOLERANCE:
                        raise ProbeFailed(f"a leak: {name} change log-probabilities up to position {t} by "
                                          f"{gap:.3g} nats ({kind})")
                tried += 1
            check_rows(base, kind)
        weights = "the artifact" if artifact else "random weights"
        return (f"{tried} changes of later tokens in {T} of {' and '.join(kinds)}, {weights}: the largest "
                f"effect on an earlier log-probability is {worst:.1g}, every row sums to 1")
    finally:
        model.close()


def score(script, artifact, env, val, seconds):
    """Mean nats over every target of val (N,), rows of T tokens, added up here from log_probs alone."""
    model = Model(script, artifact, env, seconds)
    try:
        T, n, nats = model.about["T"], len(val) - 1, 0.0
        rows = max(1, (1 << 24) // (T * model.about["V"]))
        for start in range(0, n, T * rows):
            piece = val[start:start + T * rows + 1].astype(np.int64)
            count = len(piece) - 1
            inputs, targets = (np.zeros(-(-count // T) * T, np.int64) for _ in range(2))
            inputs[:count], targets[:count] = piece[:-1], piece[1:]
            out = model.log_probs(inputs.reshape(-1, T)).reshape(-1, model.about["V"])
            nats -= float(out[np.arange(count), targets[:count]].astype(np.float64).sum())
        return nats / n
    finally:
        model.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
