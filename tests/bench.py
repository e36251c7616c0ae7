"""Where the time of a training step goes, on this machine.

    ./run.sh bench [NAME=value …] [--steps N] [--repeats N]

Trains a few steps of the preset again and again, and prints medians: tok/s, matmul FLOP/s against the rate of
plain matrix products, and the shares of forward + backward, of the optimizer, and of the rest of the loop
(loading, logging, scheduling). Needs the preset's data; leaves no run folder.

    ./run.sh bench --arm "NAME=value …" --arm "…" [--steps N] [NAME=value …]

Instead: what settings cost beside each other, as machines are noisy. The arms make a step each in turn, in
one process; prints the milliseconds of a step, tok/s, and the time per token over the first arm's, step by
step: median and quartiles. TREE=path in an arm takes the trainer of another checkout.

    ./run.sh bench --parts [--steps N] [NAME=value …]
    torchrun --standalone --nproc_per_node=N tests/bench.py --parts …

Instead: for each stage of the schedule a step on random data, its tok/s and mfu (of an H100's bf16 peak), and
its parts, each alone, forward and backward: attention and MLP of all layers, head and loss, optimizer, what
is left; of these what the collectives take alone and how long the host needs to launch a step; what the
loader could deliver. Times are medians, on a GPU by device events. Needs no data.

    ./run.sh bench --loader [--steps N] [--repeats N] [NAME=value …]

Instead: tok/s that the loader's one thread delivers, on random documents; no model.

    ./run.sh bench --attention [--repeats N]

Instead: milliseconds of attention, forward and backward, and MiB of its mask over lengths and windows.

    ./run.sh bench --core DIR [--examples N] [--repeats N] [NAME=value …]

Instead: examples per second of CORE on the bundle at DIR, ours and the tests' slow reference (one option at a
time, all logits), on the same untrained model, and whether their picks are the same.

    ./run.sh bench --decode [--repeats N] [NAME=value …]

Instead: milliseconds per token of generation after contexts of several lengths, with and without the cache of
keys and values.

    ./run.sh bench --codecs final_model.pt [NAME=value …]

Instead: one run's weights in every codec: bits per byte of val and what rounding costs, bytes of the artifact
by zlib and by lzma, with its own contexts and with lc=0, what an ideal coder of each tensor's numbers alone
would need, and seconds to read it back. The settings are the run's: DATA_PATH, ARTIFACT_KEEP.

    ./run.sh bench --saving [NAME=value …] [--steps N] [--repeats N]

Instead: what a checkpoint costs on the clock: the copy that training waits for, and how much slower the steps
are while a thread writes the file; as a part of a minute, too.
"""
import argparse
import importlib
import json
import lzma
import math
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plan  # noqa: E402
import train_gpt as t  # noqa: E402


def gemm_rate(team, dtype, shapes, seconds=0.5):
    """FLOP/s of the fastest of the products (M, K) @ (K, N), on random data."""
    best = 0.0
    for m, k, n in shapes:
        a, b = (torch.randn(shape, device=team.device).to(dtype) for shape in ((m, k), (k, n)))
        for _ in range(3):
            a @ b
        team.wait()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(5):
                a @ b
            team.wait()
            count += 5
        best = max(best, 2 * m * k * n * count / (time.perf_counter() - began))
    return best


def attention_table(team, repeats, heads=4, head_dim=64):
    """Prints, for lengths x windows, the median ms of one sequence of documents, and its mask's MiB."""
    device, windows, lengths = team.device, (256, 512, 0), (1024, 2048, 4096, 8192)
    print("tokens  " + "".join(f"{'window ' + str(w or '*'):>22}" for w in windows) + "    (* all)")
    for T in lengths:
        documents = (torch.arange(T, device=device) // 700)[None]
        q, k, v = (torch.randn(1, heads, T, head_dim, device=device, requires_grad=True) for _ in range(3))
        cells, times = [], {w: [] for w in windows}
        for i in range(repeats + 1):        # the first one warms up; windows in turn
            for w in windows:
                began = time.perf_counter()
                mask = t.window_mask(w or T, T, documents, device)
                t.attention(q, k, v, mask).sum().backward()
                team.wait()
                times[w] += [time.perf_counter() - began] * (i > 0)
        for w in windows:
            mask = t.window_mask(w or T, T, documents, device)
            cells.append(f"{1e3 * statistics.median(times[w]):>11.1f} ms {mask.numel() / 2 ** 20:>4.0f} MiB")
        print(f"{T:>6}  " + "".join(cells))


def untrained(settings):
    """(model, cfg, data, team) of the constants; its head is not zero, so that scores differ."""
    cfg = t.load_config(dict(os.environ) | settings)
    team, data = t.Team(cfg, {}), t.open_data(cfg, lambda *_, **__: None)
    cfg = t.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or data.bos)
    model = t.GPT(cfg, team.dtype)
    t.init_parameters(model, cfg.seed)
    torch.nn.init.normal_(model.head, 0, 0.3)
    print(f"machine {t.hardware(team)}, torch {torch.__version__}; {sum(t.parameter_counts(cfg).values()):,} "
          f"parameters, {cfg.num_layers} layers of {cfg.model_dim}, vocabulary {cfg.vocab_size}")
    return model.to(team.device), cfg, data, team


def core_table(settings, folder, examples, repeats):
    """Prints, per task, the examples per second of ours and of the reference."""
    import core
    from core_reference import read_bundle, reference_picks
    model, cfg, data, team = untrained(settings)
    tasks, problem = core.read_tasks(folder, examples)
    t.demand(not problem, problem)
    scorer = core.Scorer(
        model, lambda rows: t.scored(model, cfg, rows, team), t.log_probs, t.eval_window(cfg),
        data.tokenizer.encode, data.bos, 10 * cfg.train_seq_len, team, None, print)
    sums = [0.0, 0.0, 0]
    for task, plain in zip(tasks, read_bundle(folder)):
        seconds = [[], []]
        for _ in range(repeats):    # in turn
            began = time.perf_counter()
            picks, _ = core.pick_options(task, scorer)
            half = time.perf_counter()
            want, _ = reference_picks(model, cfg, data.tokenizer, data.bos, plain, examples)
            seconds[0].append(half - began)
            seconds[1].append(time.perf_counter() - half)
        ours, slow = (statistics.median(side) for side in seconds)
        n, same = len(task.items), sum(pick == other for pick, other in zip(picks.values(), want))
        sums = [sums[0] + ours, sums[1] + slow, sums[2] + n]
        print(f"{task.label:<34} {n / ours:9.1f} examples/s, reference {n / slow:7.1f}: {slow / ours:5.1f} "
              f"times; same picks {same} of {n}")
    ours, slow, n = sums
    print(f"{'together':<34} {n / ours:9.1f} examples/s, reference {n / slow:7.1f}: {slow / ours:5.1f} times")


@torch.no_grad()
def decode_table(settings, repeats, tokens=8):
    """Prints, per length of the context, the median ms of one more token."""
    model, cfg, data, _ = untrained(settings)
    for length in (256, 512, 1024):
        prompt, times = data.val[:length].tolist(), [[], []]
        window = t.eval_window(cfg) or cfg.train_seq_len
        for _ in range(repeats):
            model.set_context(length + tokens, window, cache={})
            model.logits(torch.tensor([prompt]))
            for side in (0, 1):     # with the cache, without
                for n in range(tokens):
                    ids = [*prompt, *data.val[length:length + n + 1].tolist()]
                    if side:
                        model.set_context(len(ids), window)
                    began = time.perf_counter()
                    model.logits(torch.tensor([ids]))[0, -1].argmax().item()
                    times[side].append(time.perf_counter() - began)
        cached, full = (1e3 * statistics.median(side) for side in times)
        print(f"context {length:5}: {cached:7.2f} ms per token with the cache, {full:8.2f} without: "
              f"{full / cached:5.1f} times")


class Timer:
    """Adds up the seconds inside a function; the device is idle at both ends."""
    def __init__(self, fn, synchronize):
        self.fn, self.synchronize, self.seconds = fn, synchronize, 0.0

    def __call__(self, *args, **kwargs):
        self.synchronize()
        began = time.perf_counter()
        result = self.fn(*args, **kwargs)
        self.synchronize()
        self.seconds += time.perf_counter() - began
        return result


def ready(settings, steps, team=None, **more):
    """(cfg, team, data, model, optimizer, loader, loss_fn, micro, log), rehearsed, for t.train to run so many
    steps; and the seconds that the rehearsal took. team: who runs it, alone if not given."""
    env = dict(os.environ) | settings | {
        "MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(steps), "EXTENSION_ITERATIONS": "0",
        "MAX_EPOCHS": "0", "TRAIN_LOG_EVERY": "10", "VAL_LOSS_EVERY": "0"} | more
    log = t.Log(lead=False)
    try:
        cfg = t.load_config(env)
        team, data = team or t.Team(cfg, {}), t.open_data(cfg, log)
        cfg = t.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or data.bos)
        loader = t.Loader(cfg, data, team, log)
    except t.Refused as error:
        sys.exit(f"bench: {error}")
    fast = getattr(t, "fast_kernels", lambda *_: ())(cfg, team, log)    # older checkouts lack it
    fast = (fast,) if hasattr(t, "Fast") else fast
    model, micro = t.GPT(cfg, team.dtype, *fast), t.micro_batch(cfg, team)
    t.init_parameters(model, cfg.seed)
    optimizer = t.Optimizer(model.to(team.device), cfg, team.rank, team.world_size)
    began = time.perf_counter()
    loss_fn = t.rehearse(cfg, team, model, optimizer, micro, print)
    took = time.perf_counter() - began
    t.evaluate = lambda *_, **__: t.Score(1.0, None, None)  # the loop ends with one
    return (cfg, team, data, model, optimizer, loader, loss_fn, micro, log), took


def random_data(folder, cfg, tokens=1 << 24):
    """Settings that make a run read random documents of random lengths, 1 to 1,400 tokens."""
    rng, vocab_size, bos = np.random.default_rng(0), cfg.vocab_size or 1024, 1
    context = cfg.eval_context or cfg.train_seq_len
    files = [("train", tokens), ("val", context + 1)]
    for split, count in files:
        stream = rng.integers(2, vocab_size, count).astype("<u2")
        begins = rng.integers(1, 1400, 2 + count // 700).cumsum()
        stream[[0, *begins[begins < count]]] = bos
        head = np.zeros(256, "<i4")
        head[:3] = 20240520, 1, count
        (folder / f"random_{split}_000000.bin").write_bytes(head.tobytes() + stream.tobytes())
    manifest = dict(tokenizer=dict(vocab_size=vocab_size, bos_id=bos), files=[
        dict(path=f"random_{split}_000000.bin", split=split, tokens=count) for split, count in files])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return dict(DATA_PATH=str(folder), TOKENIZER_PATH="", DATA_FINGERPRINT="", VAL_TOKENS="0", CORE="0")


def loader_rate(loader, rows, steps):
    """tok/s of fetching so many rows so many times, one after another."""
    began = time.perf_counter()
    for i in range(steps):
        loader.fetch(range(i * rows, (i + 1) * rows))
    return steps * rows * loader.T / (time.perf_counter() - began)


def loader_table(settings, steps, repeats):
    """Prints the median rate of a preset's loader; each repeat opens the shards anew."""
    with tempfile.TemporaryDirectory() as folder:
        given = t.load_config(dict(os.environ) | settings)
        more = random_data(Path(folder), given) | {
            "DEVICE": "cpu", "MAX_EPOCHS": "0", "VOCAB_SIZE": str(given.vocab_size or 1024)}
        cfg = t.load_config(dict(os.environ) | settings | more)
        team, data, rates = t.Team(cfg, {}), t.open_data(cfg, lambda *_, **__: None), []
        rows = max(1, 65_536 // cfg.train_seq_len)
        for _ in range(repeats):
            loader = t.Loader(cfg, data, team, lambda *_, **__: None)
            loader.read(0, 1)       # checks the shard
            rates.append(loader_rate(loader, rows, steps))
    print(f"machine {t.hardware(team)}, torch {torch.__version__}; {cfg.preset}: {rows} rows of "
          f"{cfg.train_seq_len} at a time, {statistics.median(rates):,.0f} tok/s ({min(rates):,.0f} to "
          f"{max(rates):,.0f})")


def seconds_of(team, fn, repeats):
    """Median seconds of the device in fn(), after three calls that do not count, and of the host."""
    on_gpu, device, host = team.on_gpu, [], []
    for i in range(repeats + 3):
        if on_gpu:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        began = time.perf_counter()
        fn()
        host.append(time.perf_counter() - began)
        if on_gpu:
            events[1].record()
            device.append(events)
    team.wait()
    if on_gpu:
        device = [first.elapsed_time(last) / 1e3 for first, last in device]
    return statistics.median((device or host)[3:]), statistics.median(host[3:])


def parts_of(cfg, team, model, sequences, T):
    """{part: [(how often per micro-step, forward and backward of it)]} on random activations, compiled."""
    def random(*shape):
        return torch.randn(shape, device=team.device, dtype=team.dtype)

    def both(fn, *inputs, used=()):
        compiled = torch.compile(fn, dynamic=False) if cfg.compile else fn
        inputs = [x.detach().requires_grad_() for x in inputs]
        grad = torch.ones_like(fn(*inputs))

        def call():
            torch.autograd.grad(compiled(*inputs), [*inputs, *used], grad)
        return call

    h, fast = random(sequences, T, cfg.model_dim), model.fast
    tokens = torch.randint(2, cfg.vocab_size, (sequences, T), device=team.device)
    tokens[torch.rand(tokens.shape, device=team.device) < 1 / 700] = cfg.bos_id
    found = {"attention": [], "MLP": [], "head and loss": []}
    for kind, count in Counter(model.kinds).items():
        block = model.blocks[model.kinds.index(kind)]
        if block.query is not None:
            def attend(h, block=block, kind=kind):
                documents = (tokens == cfg.bos_id).cumsum(1) if cfg.max_doc_len else None
                mask = fast.window_mask(model.reach[kind], T, documents, team.device)
                follows = torch.ones(T, dtype=torch.bool, device=team.device)
                return block.attend(t.rms_norm(h), 0, mask, model.rope, model.scale, follows, None)
            weights = block.query, block.key, block.value, block.attn_proj
            found["attention"].append((count, both(attend, h, used=weights)))
        if block.fc is not None and not found["MLP"]:
            layers = sum(block.fc is not None for block in model.blocks)
            mlp = both(lambda x, fc, proj: t.mlp(t.rms_norm(x), fc, proj, fast.linear), h, block.fc,
                       block.mlp_proj)
            found["MLP"].append((layers, mlp))
    found["head and loss"].append((1, both(
        lambda x, head: fast.loss(t.rms_norm(x), head, tokens, cfg.logit_softcap, fast.head_linear), h,
        model.head)))
    return found


def parts_table(settings, steps):
    """Prints a table per stage."""
    with tempfile.TemporaryDirectory() as folder:
        given = t.load_config(dict(os.environ) | settings)
        team = t.Team(given, os.environ)
        run, compile_seconds = ready(settings | random_data(Path(folder), given), 10**6, team)
        cfg, _, _, model, optimizer, loader, loss_fn, micro, _ = run
        T, ranks = cfg.train_seq_len, team.world_size
        torch._dynamo.config.recompile_limit = 64   # kinds of layers times stages; beyond it runs uncompiled

        def say(*words):
            if team.rank == 0:
                print(*words, flush=True)

        say(f"machine {t.hardware(team)}, torch {torch.__version__}; {cfg.preset}, activations "
            f"{str(team.dtype)[6:]}, random data, medians of {steps}, rehearsal {compile_seconds:.1f} s")
        loads = loader_rate(loader, micro, 20)
        for stage in dict.fromkeys((s.batch_multiple, s.window) for s in t.stage_table(cfg)):
            tokens = cfg.train_batch_tokens * stage[0]
            model.set_context(T, stage[1])
            batch = loader.next(tokens)
            steps += steps % 2      # Adam may take every other one

            def step():
                t.train_step(loss_fn, optimizer, batch, micro, 1.0, cfg.muon_momentum)
            whole, _ = seconds_of(team, step, steps)
            hosts = []
            for _ in range(steps):
                team.wait()     # or a full queue of launches would make it wait in between
                began = time.perf_counter()
                step()
                hosts.append(time.perf_counter() - began)
            host = statistics.median(hosts)
            micro_steps = tokens // T // ranks // micro
            rows = {name: micro_steps * sum(n * seconds_of(team, fn, steps)[0] for n, fn in some)
                    for name, some in parts_of(cfg, team, model, micro, T).items()}
            rows["optimizer"] = seconds_of(team, lambda: optimizer.step(0.0, cfg.muon_momentum), steps)[0]
            rows["the rest"] = whole - sum(rows.values())
            exchange = 0.0
            for muon in (False, True) if ranks > 1 else ():
                def communicate(banks=[b for b in optimizer.banks if (b.group == "matrix") == muon]):
                    for bank in banks:
                        t.reduce_scatter(bank.my_grad.flatten(), bank.grad)
                        t.all_gather(bank.data, bank.my_data.flatten())
                exchange += seconds_of(team, communicate, steps)[0] / (1 if muon else cfg.adam_every)
            of_peak = t.flops_per_token(t.replace(cfg, window_schedule=(stage[1],))) * tokens / whole / ranks
            say(f"\n{tokens:,} tokens, window {stage[1] or T}: {1e3 * whole:.2f} ms a step, "
                f"{tokens / whole:,.0f} tok/s, {tokens / whole / ranks:,.0f} per rank, "
                f"{of_peak / 1e9:,.0f} GFLOP/s, mfu {of_peak / plan.H100_FLOPS:.2%} of an H100")
            for name, seconds in rows.items():
                say(f"  {name:16} {1e3 * seconds:10.3f} ms {seconds / whole:7.1%}")
            for name, seconds in (("communication", exchange), ("host", host)):
                say(f"  {name:16} {1e3 * seconds:10.3f} ms {seconds / whole:7.1%} (part of the above)")
            say(f"  the loader delivers {loads:,.0f} tok/s, {loads * whole * ranks / tokens:,.1f} times what "
                "its rank consumes")
    if t.dist.is_initialized():
        t.dist.destroy_process_group()


def trainer_at(tree):
    """The module train_gpt of another checkout, which finds its own companions while it is made ready."""
    for name in ("train_gpt", "kernels", "dial"):
        sys.modules.pop(name, None)
    sys.path.insert(0, str(Path(tree).resolve()))
    return importlib.import_module("train_gpt")


def arms_table(settings, arms, steps, skipped=5):
    """Prints a row per arm; the first steps of each are not counted."""
    global t
    torch._dynamo.config.recompile_limit = 8 * len(arms)    # of the same code; beyond it runs uncompiled
    runs, seconds, here = [], [[] for _ in arms], t
    for arm in arms:
        mine = dict(setting.split("=", 1) for setting in arm.split())
        tree = mine.pop("TREE", None)
        if tree:
            t = trainer_at(tree)
        (cfg, team, _, model, optimizer, loader, loss_fn, micro, _), took = ready(settings | mine, steps)
        model.set_context(cfg.train_seq_len, cfg.window_schedule[-1])
        runs.append((t, cfg, team, optimizer, loader, loss_fn, micro, took))
        if tree:
            sys.path.pop(0)
            t = here
    for _ in range(steps + skipped):
        for (trainer, cfg, team, optimizer, loader, loss_fn, micro, _), mine in zip(runs, seconds):
            batch = loader.next(cfg.train_batch_tokens)
            team.wait()
            began = time.perf_counter()
            trainer.train_step(loss_fn, optimizer, batch, micro, 1.0, cfg.muon_momentum)
            team.wait()
            mine.append((time.perf_counter() - began) / cfg.train_batch_tokens)
    rate = gemm_rate(team, torch.float32, [(2048, 2048, 2048), (4096, 128, 384)])
    print(f"machine {t.hardware(team)}, torch {torch.__version__}; {steps} steps of each arm in turn; plain "
          f"products in float32 {rate / 1e9:,.0f} GFLOP/s")
    for arm, (trainer, cfg, *_, took), mine in zip(arms, runs, seconds):
        ratios = [a / b for a, b in zip(mine[skipped:], seconds[0][skipped:])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        token = statistics.median(mine[skipped:])
        flops = trainer.flops_per_token(cfg) / token
        step = 1e3 * token * cfg.train_batch_tokens
        print(f"{step:8.2f} ms a step {1 / token:8,.0f} tok/s, time per token {middle:.3f} ({low:.3f} to "
              f"{high:.3f}) of the first, {flops / rate:6.1%} of plain products, rehearsal {took:4.1f} s: "
              f"{arm or '(as it is)'}")


def saving_table(settings, steps, repeats):
    """Prints medians over checkpoints that steps follow; the one after the last step is left out."""
    import faults
    every = 10
    run, _ = ready(settings, steps, SAVE_EVERY=str(every))
    cfg, team, _, model, optimizer, loader, _, _, log = run
    log.guard = guard = faults.Guard(t, team, {}, log)
    guard.save_last = lambda *_: None
    plain_step, plain_save, plain_write = t.train_step, guard.save, guard.write
    saves, writes, times = [], [], []       # seconds of copies, of files, of steps with whether under a write

    def timed(fn, seconds):
        def call(*args, **kwargs):
            began = time.perf_counter()
            fn(*args, **kwargs)
            seconds.append(time.perf_counter() - began)
        return call

    def step(*args):
        began, writing = time.perf_counter(), guard.job is not None and not guard.job.done()
        loss = plain_step(*args)
        team.wait()
        times.append((time.perf_counter() - began, writing))
        return loss
    t.train_step, guard.save, guard.write = step, timed(plain_save, saves), timed(plain_write, writes)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            loader.position = 0
            guard.begin(cfg, model, optimizer, loader, Path(folder), "")
            t.train(*run)
            guard.wait()
        size = Path(folder, faults.FILES[0]).stat().st_size
    guard.release()
    alone = statistics.median(seconds for seconds, writing in times if not writing)
    slower = sum(seconds - alone for seconds, writing in times if writing) / len(saves)
    copy = statistics.median(saves)
    print(f"machine           {t.hardware(team)}, torch {torch.__version__}")
    print(f"run               {cfg.preset}, {steps} steps x {repeats} repeats, a checkpoint every {every}, "
          f"{len(saves)} in all, of {size / 2 ** 20:.1f} MiB")
    print(f"copy              {1e3 * copy:.1f} ms (longest {1e3 * max(saves):.1f}), training waits")
    print(f"file              {1e3 * statistics.median(writes):.1f} ms (longest {1e3 * max(writes):.1f})")
    print(f"step              {1e3 * alone:.2f} ms; those under a write {1e3 * slower:.1f} ms longer in all")
    print(f"of a minute       {(copy + slower) / 60:.2%}")


def by_largest(bits):
    """quantize_rows of so many bits: the largest of a row is the largest number."""
    def quantize(w, step):
        scale = (w.abs().amax(1) / (2 ** (bits - 1) - 1)).clamp_min(2 ** -24).half()
        return (w / scale.float()[:, None]).round().to(torch.int8), scale
    return quantize


ROUNDINGS = [("int8, clipped rows", 0, {})] + [
    (f"int{bits} by the largest", 0, dict(quantize_rows=by_largest(bits))) for bits in (7, 6, 5, 4)] + [
    (f"step {step:g}, {kind}", step, changes)
    for kind, changes in (("alike", dict(STEPS=dict.fromkeys(t.STEPS, 1))), ("by group", {}))
    for step in (0.1, 0.2, 0.25, 0.3, 0.4)]


def entropy_bytes(tensors):
    """What an ideal coder needs that knows the frequencies of each tensor's int8; the rest as it is."""
    total = 0.0
    for tensor in tensors.values():
        if tensor.dtype == torch.int8:
            p = np.unique(tensor.numpy(), return_counts=True)[1] / tensor.numel()
            total += tensor.numel() * -(p * np.log2(p)).sum() / 8
        else:
            total += tensor.numel() * tensor.element_size()
    return round(total)


def codec_table(settings, path):
    cfg = t.load_config(settings | {"DEVICE": "cpu"})
    data, team = t.open_data(cfg, lambda line: None), t.Team(cfg, {})
    model, cfg = t.load_model(path, "cpu", cfg)
    base, to_bytes, seen = t.evaluate(model, cfg, data, team), t.to_bytes, []

    def spied(cfg, tensors):
        seen[:] = tensors, to_bytes(cfg, tensors)
        return seen[1]

    weights = sum(map(torch.numel, model.parameters()))
    print(f"machine {t.hardware(team)}, torch {torch.__version__}; {weights} weights, "
          f"val_bpb {base.val_bpb:.5f}")
    print(f"{'rounding':20} {'val_bpb':>8} {'lost':>8} {'zlib 9':>10} {'lzma':>10} {'lzma lc=0':>10} "
          f"{'entropy':>10} {'read back':>10}")
    for label, step, changes in ROUNDINGS:
        model.cfg = t.replace(cfg, artifact_step=step)
        with mock.patch.multiple(t, to_bytes=spied, **changes), tempfile.TemporaryDirectory() as folder:
            packed = t.pack_artifact(model)
            file = Path(folder, f"model.{t.codec(model.cfg)[:4]}.ptz")
            file.write_bytes(packed)
            tensors, raw = seen
            start = time.perf_counter()
            again, _ = t.load_model(file)
            seconds = time.perf_counter() - start
        bpb = t.evaluate(again, cfg, data, team).val_bpb
        sizes = (len(zlib.compress(raw, 9)), len(lzma.compress(raw, preset=9)),
                 len(lzma.compress(raw, filters=t.LZMA)), entropy_bytes(tensors))
        assert len(packed) == sizes[2 if step else 0] and math.isfinite(bpb)
        print(f"{label:20} {bpb:8.5f} {bpb - base.val_bpb:+8.5f}", *(f"{size:10,}" for size in sizes),
              f"{seconds:8.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", action="append", metavar="SETTINGS")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--core", metavar="DIR")
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--codecs", metavar="PATH")
    parser.add_argument("--saving", action="store_true")
    args = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in args.settings)
    if args.core:
        return core_table(settings, args.core, args.examples, args.repeats)
    if args.codecs:
        return codec_table(settings, args.codecs)
    if args.decode:
        return decode_table(settings, args.repeats)
    if args.attention:
        team = t.Team(t.Config(), {})
        print(f"machine {t.hardware(team)}, torch {torch.__version__}")
        return attention_table(team, args.repeats)
    if args.arm:
        return arms_table(settings, args.arm, args.steps)
    if args.loader:
        return loader_table(settings, args.steps, args.repeats)
    if args.parts:
        return parts_table(settings, args.steps)
    if args.saving:
        return saving_table(settings, args.steps, args.repeats)
    run, compile_seconds = ready(settings, args.steps)
    cfg, team, _, _, optimizer, loader, _, micro, _ = run
    plain_step, plain_update = t.train_step, optimizer.step
    rows = []
    for _ in range(args.repeats):
        t.train_step = Timer(plain_step, team.wait)
        optimizer.step = Timer(plain_update, team.wait)
        loader.position = 0
        report = t.train(*run)[2]
        total = report["train_time_ms"] / 1e3
        update, inside = optimizer.step.seconds, t.train_step.seconds
        rows.append((total / args.steps, (inside - update) / total, update / total, (total - inside) / total))
    step, forward_backward, update, rest = (statistics.median(column) for column in zip(*rows))
    tokens, wide = report["tokens"] / args.steps, cfg.mlp_mult * cfg.model_dim     # the mean of all stages
    shapes = [(2048, 2048, 2048), (micro * cfg.train_seq_len, cfg.model_dim, wide)]
    flops = t.flops_per_token(cfg) * tokens / step
    rates = {dtype: gemm_rate(team, getattr(torch, dtype), shapes) for dtype in ("float32", "bfloat16")}
    own = rates[str(team.dtype)[6:]]
    print(f"machine           {t.hardware(team)}, torch {torch.__version__}")
    print(f"run               {cfg.preset}, {args.steps} steps x {args.repeats} repeats, activations "
          f"{str(team.dtype)[6:]}, micro_batch {micro}x{cfg.train_seq_len}, compile {compile_seconds:.1f} s")
    low, high = (1e3 * pick(rows)[0] for pick in (min, max))
    print(f"step              {1e3 * step:.2f} ms ({low:.2f} to {high:.2f}), {tokens / step:,.0f} tok/s")
    print(f"forward+backward  {forward_backward:.1%} of the step")
    print(f"optimizer         {update:.1%}")
    print(f"loop, the rest    {rest:.1%}")
    speeds = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items())
    print(f"matrix products   {speeds}")
    print(f"matmul in step    {flops / 1e9:,.0f} GFLOP/s, {flops / own:.1%} of that in {str(team.dtype)[6:]}")


if __name__ == "__main__":
    main()
