"""The leak probe: does a model's score depend on nothing but the tokens before each target?

judge(...) runs in the process that decides. The folder's own train_gpt.py, a stranger's code, runs in two
worker processes with a time limit; they are asked for log-probabilities only and judged on what they answer:
1. changing the tokens after position t leaves every log-probability up to t as it was;
2. every row is a distribution: finite, and its exponentials sum to 1;
3. neither the other rows of a batch, nor their number, nor earlier calls change a row.
One worker sees the documents as they are, the other only changed ones, in random order and company.
The like for the scores by golf.py's protocols, some of which train on what they have scored: changing the
tokens from a position on leaves the nats of all tokens before it as they were, and the probabilities of all
tokens that may follow the same ones, after a step of training, sum to 1.
It finds mistakes and lazy tricks. Code that looks out for the probe can hide from it: read the source, too.

Worker: python leak_probe.py SCRIPT ARTIFACT|- < requests > answers. A request is a line of JSON, the shape
of the tokens (B, T) or, for a stream of n tokens by rows of T and steps of training on m of them,
[n, T, protocol, BOS, m], and int64 tokens.
ARTIFACT - means random weights for the configuration that the environment asks for: a leak is a property of
the code, with any weights.
"""
import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

NOISE, LEAST = 1e-4, 2e-6   # nats: what other batch sizes may change by rounding, at most; what is none
SUM_TOLERANCE = 1e-4    # nats; of the logarithm of a row's sum
ALIGNMENTS = (8, 16, 32, 64, 128)
SUM_ROW = 8             # tokens of a document whose last token takes all values, to add up what they have
SUM_VOCAB = 1 << 13     # pieces up to which this is done: such a stream has 2 * SUM_ROW times as many tokens


class ProbeFailed(Exception):
    """The model leaks, is no distribution, or could not be asked."""


def serve(script, artifact):
    """The worker: loads the model, says {"T", "V", "windows"}, answers (B, T) int64 with (B, T, V) fp32."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)       # what the script prints goes to stderr
    import torch
    sys.path.insert(0, str(Path(script).resolve().parent))      # where its companions are
    spec = importlib.util.spec_from_file_location("train_gpt", script)
    stranger = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    if artifact != "-":
        model, cfg = stranger.load_model(artifact)
    else:
        cfg = stranger.load_config(os.environ)
        model, generator = stranger.GPT(cfg), torch.Generator().manual_seed(0)
        for p in model.parameters():    # zero-initialised projections would hide what flows through them
            p.data.normal_(0, 1 if p.ndim < 2 else max(p.shape) ** -0.5, generator=generator)
    # Evaluation's window; scripts from before it had a constant of its own know only that of the last stage
    window = stranger.eval_window(cfg) if hasattr(stranger, "eval_window") else cfg.window_schedule[-1]
    context = None      # sequences of another length need other positions and masks
    hello = {"T": cfg.train_seq_len, "V": cfg.vocab_size, "windows": [*cfg.window_schedule, window]}
    answers.write(json.dumps(hello).encode() + b"\n")
    answers.flush()
    while head := sys.stdin.buffer.readline():
        shape = json.loads(head)
        if len(shape) == 5:
            size, row, protocol, bos, step = shape
            tokens = np.frombuffer(sys.stdin.buffer.read(8 * size), np.int64).astype(np.uint16)
            import golf
            settings = stranger.load_config(os.environ)     # rates and device; the shape is the model's
            settings = dataclasses.replace(settings, **{name: getattr(cfg, name) for name in stranger.SHAPE})
            settings = shortened(settings, row, step)
            out = golf.target_nats(stranger, model, settings, tokens, bos, protocol,
                                   stranger.Team(settings, {}))
            context = None
            answers.write(json.dumps(list(out.shape)).encode() + b"\n" + out.astype(np.float64).tobytes())
            answers.flush()
            continue
        tokens = np.frombuffer(sys.stdin.buffer.read(8 * shape[0] * shape[1]), np.int64).reshape(shape)
        if shape[1] != context:
            model.set_context(context := shape[1], window)
        with torch.no_grad():
            out = stranger.log_probs(model, torch.from_numpy(tokens.copy())).float().contiguous().numpy()
        answers.write(json.dumps(list(out.shape)).encode() + b"\n" + out.tobytes())
        answers.flush()


def shortened(settings, row, step):
    """A configuration with rows of so many tokens, whose protocols train on so many at a step."""
    on = dict(eval_sliding=row // 4, eval_documents=row // 4, eval_ttt=step)
    return dataclasses.replace(
        settings, train_seq_len=row, train_batch_tokens=row, eval_context=row, eval_stride=0,
        **{name: value for name, value in on.items() if getattr(settings, name)})


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

    def stream_nats(self, tokens, row, protocol, bos, step):
        """tokens (n,) -> (n,) float64, by rows and steps of so many tokens: enough of them, however long the
        run's own are."""
        with contextlib.suppress(BrokenPipeError):
            head = json.dumps([len(tokens), row, protocol, bos, step])
            self.process.stdin.write(head.encode() + b"\n" + tokens.astype(np.int64).tobytes())
            self.process.stdin.flush()
        shape = tuple(self.answer())
        if shape != tokens.shape:
            raise ProbeFailed(f"{protocol}: {len(tokens)} tokens have nats of shape {shape}")
        return np.frombuffer(self.process.stdout.read(8 * len(tokens)), np.float64)

    def close(self):
        self.timer.cancel()
        self.process.kill()
        self.process.communicate()


def places(T, windows, rng, most):
    """Last unchanged positions to try: all if they are at most so many, else some odd ones, a random multiple
    of each alignment and the place before it, and the edges of the windows; most 0: two odd ones."""
    if T - 1 <= most:
        return list(range(T - 1))
    if not most:
        return [int(t) | 1 for t in rng.integers(0, T - 2, 2)]
    found = {1, T // 2, T - 2, *(int(t) | 1 for t in rng.integers(0, T - 2, 4))}
    for a in ALIGNMENTS:
        if a < T - 1:
            place = a * int(rng.integers(1, (T - 2) // a + 1))
            found |= {place, place - 1}
    for w in windows:
        found |= {edge + shift for edge in (w, w // 2) for shift in (-1, 0, 1)}
    return sorted(t for t in found if 0 <= t < T - 1)


def documents(T, V, val_files, rng):
    """[(kind, tokens (T,))]: random tokens, and a piece of the val split where it is at hand."""
    found = [("random tokens", rng.integers(0, V, T))]
    for path in val_files[:1]:
        val = np.memmap(path, "<u2", "r", 1024)
        if len(val) > T and int(val[:T * 4].max()) < V:
            start = int(rng.integers(0, len(val) - T))
            found.append(("validation text", val[start:start + T].astype(np.int64)))
    return found


def check_rows(rows, what):
    """Every (V,) of rows (…, V) is a distribution."""
    if np.isnan(rows).any() or (rows == np.inf).any():
        raise ProbeFailed(f"log_probs are not finite ({what})")
    for part in np.array_split(rows.reshape(-1, rows.shape[-1]), max(1, rows.size >> 24)):
        sums = np.exp(part.astype(np.float64)).sum(-1)
        worst = float(sums[np.abs(sums - 1).argmax()])
        if abs(worst - 1) > SUM_TOLERANCE:
            raise ProbeFailed(f"log_probs are no distribution ({what}): the probabilities of a position sum "
                              f"to {worst:.6g}")


def gap(row, base):
    """The largest difference; that of -inf and -inf is none."""
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(row - base), nan=0.0, posinf=np.inf).max(initial=0.0))


def probe(fresh, seen, T, V, windows, val_files, rng, most):
    """Asks the worker `seen` for documents of T tokens, the worker `fresh` for changed ones. Returns (changes
    tried, the largest effect, kinds of documents)."""
    tried, worst, kinds, largest = 0, 0.0, [], max(1, min(24, (1 << 24) // (T * V)))
    for kind, document in documents(T, V, val_files, rng):
        base, noise = seen.log_probs(document[None])[0].copy(), 0.0
        check_rows(base, kind)
        kinds.append(kind)
        for size in (2, 3, largest) if most else ():
            company = rng.integers(0, V, (size, T))
            company[place := int(rng.integers(size))] = document
            noise = max(noise, gap(seen.log_probs(company)[place], base))
        if noise > NOISE:
            raise ProbeFailed(f"a leak: other rows or calls change log-probabilities by {noise:.3g} "
                              f"nats ({kind})")
        left = [int(t) for t in rng.permutation(places(T, windows, rng, most))]
        while left:
            batch = [left.pop() for _ in range(min(len(left), int(rng.integers(1, largest + 1))))]
            rows = np.tile(document, (len(batch), 1))
            for row, t in zip(rows, batch):
                row[t + 1:] = (document[t + 1:] + rng.integers(1, V, T - t - 1)) % V
            out = fresh.log_probs(rows)
            check_rows(out, f"{kind}, changed")
            for t, row in zip(batch, out):
                worst = max(worst, effect := gap(row[:t + 1], base[:t + 1]))
                if effect > (max(LEAST, 10 * noise) if most else NOISE):
                    raise ProbeFailed(f"a leak: tokens after position {t}, or other rows or calls, change "
                                      f"log-probabilities up to it by {effect:.3g} nats ({kind})")
            tried += len(batch)
    return tried, worst, kinds


def judge(script, artifact, env, val_files=(), seconds=120, context=0, seed=None, protocols=(), bos=1):
    """Raises ProbeFailed. Returns what was tried, in one line. context: tokens of an evaluation row; of long
    ones most changes are tried on 1,024 tokens and a few on all. protocols: of golf.py, tried after it."""
    rng = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        seen, fresh = (stack.enter_context(contextlib.closing(Model(script, artifact, env, seconds)))
                       for _ in range(2))
        about, full = seen.about, context or seen.about["T"]
        T, V, windows = min(full, 1024), about["V"], about["windows"]
        tried, worst, kinds = probe(fresh, seen, T, V, windows, val_files, rng, 512 if T * V < 1 << 21 else 1)
        lengths = f"{T}"
        if full > T:
            more, effect, _ = probe(fresh, seen, full, V, [], val_files[:0], rng, 0)
            tried, worst, lengths = tried + more, max(worst, effect), f"{T} and {full}"
        streams = [probe_stream(fresh.stream_nats, seen.stream_nats, seen.log_probs, protocol, bos,
                                min(T, 256), V, val_files, rng) for protocol in protocols]
    weights = "the artifact" if artifact else "random weights"
    told = (f"{tried} changes of later tokens in {' and '.join(kinds)} of {lengths}, {weights}: the largest "
            f"effect on an earlier log-probability is {worst:.1g}, every row sums to 1")
    return "; ".join([told, *streams])


def probe_stream(fresh, seen, log_probs, protocol, bos, T, V, val_files, rng, changes=10):
    """Asks the function `seen` for the nats of a stream, `fresh` for those of changed ones. The stream has
    seven rows of T, so that protocols that train make some steps, and documents of about two; the changes lie
    all over it, every other one begins a document. The first row, which nothing precedes, must have the nats
    that log_probs gives it, and later ones those of a distribution. Raises ProbeFailed. Returns what was
    tried."""
    size, worst = 7 * T + 5, 0.0
    kind, stream = documents(size, V, val_files, rng)[-1]
    stream = np.where(rng.random(size) < 0.5 / T, bos, stream) if kind == "random tokens" else stream
    stream[1:T + 1] = np.where(stream[1:T + 1] == bos, (bos + 1) % V, stream[1:T + 1])
    base = seen(stream, T, protocol, bos, 2 * T).copy()
    if not (np.isfinite(base).all() and base[0] == 0 and (base[1:] > 0).all()):
        raise ProbeFailed(f"{protocol}: not every token but the first has nats above 0")
    for part in range(changes):
        place = int(rng.integers(1 + part * size // changes, (part + 1) * size // changes))
        changed = stream.copy()
        changed[place:] = (stream[place:] + rng.integers(1, V, size - place)) % V
        if part % 2:
            changed[place] = bos if stream[place] != bos else (bos + 1) % V
        worst = max(worst, effect := gap(fresh(changed, T, protocol, bos, 2 * T)[:place], base[:place]))
        if effect > NOISE:
            raise ProbeFailed(f"a leak: {protocol}: tokens from {place} on change the nats of earlier ones "
                              f"by {effect:.3g} ({kind})")
    row = log_probs(stream[None, :T])[0]
    if (off := gap(-row[np.arange(T), stream[1:T + 1]], base[1:T + 1])) > NOISE:
        raise ProbeFailed(f"{protocol}: the nats of the first row are not those of log_probs, by {off:.3g}")
    return (f"{protocol}: {changes} changes of later tokens in {kind} of {size}: the largest effect on an "
            f"earlier token's nats is {worst:.1g}, {check_sum(fresh, protocol, bos, V, rng)}")


def check_sum(nats, protocol, bos, V, rng):
    """A stream of V short documents that differ in nothing but their last token, each of the V pieces once:
    as all are scored by the same weights, the probabilities of these tokens sum to 1. Before them, as many
    random documents, on all of which a protocol that trains makes its only step."""
    if V > SUM_VOCAB:
        return f"the probabilities of {V} pieces were not added up"
    before, asked = rng.integers(0, V, (2, V, SUM_ROW))
    before[:, 0] = asked[:, 0] = bos
    asked[:, 1:-1] = asked[0, 1:-1]
    asked[:, -1] = rng.permutation(V)
    found = nats(np.concatenate([before, asked]).ravel(), SUM_ROW, protocol, bos, before.size)
    total = float(np.exp(-found[before.size + SUM_ROW - 1::SUM_ROW]).sum())
    if not abs(total - 1) <= NOISE + SUM_TOLERANCE:
        raise ProbeFailed(f"{protocol}: the probabilities of all tokens that may follow the same ones sum to "
                          f"{total:.6g}")
    return f"all probabilities after the same tokens sum to {total:.6f}"


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
