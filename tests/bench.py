"""Where the time of a training step goes, on this machine.

    ./run.sh bench [NAME=value …] [--steps N] [--repeats N]

Trains a few steps of the preset again and again, and prints medians: tok/s, matmul FLOP/s against the rate of
plain matrix products, and the shares of forward + backward, of the optimizer, and of the rest of the loop
(loading, logging, scheduling). Needs the preset's data; leaves no run folder.

    ./run.sh bench --attention [--repeats N]

Instead: milliseconds of attention, forward and backward, and MiB of its mask over lengths and windows.
"""
import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="NAME=value")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", action="store_true")
    args = parser.parse_args()
    if args.attention:
        team = t.Team(t.Config(), {})
        print(f"machine {t.hardware(team)}, torch {torch.__version__}")
        return attention_table(team, args.repeats)
    env = dict(os.environ) | dict(setting.split("=", 1) for setting in args.settings)
    env |= {"MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": str(args.steps), "EXTENSION_ITERATIONS": "0",
            "MAX_EPOCHS": "0", "TRAIN_LOG_EVERY": "10", "VAL_LOSS_EVERY": "0"}
    quiet = lambda *_, **__: None  # noqa: E731
    try:
        cfg = t.load_config(env)
        team, data = t.Team(cfg, {}), t.open_data(cfg, quiet)
        cfg = t.replace(cfg, vocab_size=data.vocab_size, bos_id=cfg.bos_id or data.bos)
        loader = t.Loader(cfg, data, team, quiet)
    except t.Refused as error:
        sys.exit(f"bench: {error}")
    model, micro = t.GPT(cfg, team.dtype), t.micro_batch(cfg, team)
    t.init_parameters(model, cfg.seed)
    optimizer = t.Optimizer(model.to(team.device), cfg)
    began = time.perf_counter()
    loss_fn = t.rehearse(cfg, team, model, optimizer, micro, print)
    compile_seconds = time.perf_counter() - began
    t.evaluate = lambda *_, **__: t.Score(0.0, None)        # the loop ends with one
    plain_step, plain_update = t.train_step, optimizer.step
    rows = []
    for _ in range(args.repeats):
        t.train_step = Timer(plain_step, team.wait)
        optimizer.step = Timer(plain_update, team.wait)
        loader.position = 0
        report = t.train(cfg, team, data, model, optimizer, loader, loss_fn, micro, quiet)[2]
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
