"""What a run does against its end: checkpoints, going on from them, and a watch over the ranks.

train_gpt.py talks to a Guard, and trains without it where this file is missing; t is the trainer's module.

A checkpoint is zlib (stored, for its checksum) over torch.save of {shape, tensors: as load_model reads them;
state: the optimizer's of all ranks; progress: numbers and lists}. A thread writes it to checkpoint.pt while
training goes on; the one before stays as checkpoint_prev.pt.
"""
import fcntl
import io
import json
import linecache
import math
import os
import re
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

FILES = ("checkpoint.pt", "checkpoint_prev.pt")
# What may be given with RESUME; all else is as the run began
FREE = ("resume", "run_id", "dry_run", "device", "data_path", "tokenizer_path", "core_bundle", "save_every",
        "save_every_seconds", "device_batch_size")
RESULT = ("stop_reason", "steps", "train_time_ms", "val_loss", "val_loss_partial", "val_bpb", "core")
PROGRESS = dict(step=int, position=int, updates=int, now=float, started=str, curves=dict, laps=list,
                random=torch.Tensor)


# ------------------------------------------------------------ checkpoints
class Stored(io.RawIOBase):
    """Writes what it is given to a file as a zlib stream of stored blocks."""

    def __init__(self, file):
        self.file, self.pack = file, zlib.compressobj(0)

    def write(self, content):
        self.file.write(self.pack.compress(content))
        return len(content)

    def close(self):
        if not self.closed:
            self.file.write(self.pack.flush())
        super().close()


def replace_durably(temporary, path):
    """Rename, and make sure that the folder remembers it."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_checkpoint(folder, payload):
    """At any moment a whole one is there under one of the two names."""
    temporary, (path, previous) = folder / "checkpoint.pt.tmp", (folder / name for name in FILES)
    try:
        with open(temporary, "wb") as file:
            with Stored(file) as stored:
                torch.save(payload, stored)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)       # of a full disk: room for the log's last line
        while not isinstance(error, OSError) and error.__context__:
            error = error.__context__           # torch raises its own over the disk's
        raise error
    if path.exists():
        replace_durably(path, previous)
    replace_durably(temporary, path)


def check_progress(progress):
    """Raises KeyError, TypeError, ValueError where it is not of the form that Guard.save gives it."""
    for name, kind in PROGRESS.items():
        if type(progress[name]) is not kind:
            raise TypeError(f"{name} is a {type(progress[name]).__name__}")
    rows = [(2, row) for row in progress["laps"]]
    rows += [(3, row) for split in ("train", "val") for row in progress["curves"][split]]
    numbers = [progress[name] for name in ("step", "position", "updates", "now")]
    for width, row in rows:
        if len(row) != width:
            raise ValueError(f"{len(row)} numbers instead of {width}")
        numbers += row
    if not all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers):
        raise ValueError("a number that is none, is negative or not finite")
    if not all(n for _, n in progress["laps"]):
        raise ValueError("a lap of no tokens")


def read_checkpoint(folder):
    """The newer whole one -> (payload or None, [sentence on each that is damaged])."""
    damaged = []
    for name in FILES:
        try:
            raw = zlib.decompress((folder / name).read_bytes())
            payload = torch.load(io.BytesIO(raw), "cpu", weights_only=True)
            payload["tensors"], payload["state"], check_progress(payload["progress"])
            return payload, damaged
        except FileNotFoundError:
            continue
        except Exception as error:      # whatever a damaged file makes of its reader
            damaged.append(f"{name} is damaged ({type(error).__name__})")
    return None, damaged


def units_of(model, bank):
    """How many units of a bank hold parameters; more only make the ranks' shares equal."""
    size = math.prod(bank.my_data.shape[1:])
    return sum(math.ceil(model.get_parameter(name).numel() / size) for name in bank.names)


def copied(value):
    """Lists, dicts and numbers that later steps do not change."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------ resuming
def logged_config(path, fields):
    """({constant: text} of the last whole block of config lines in a run's train.log, {}: there is none; the
    names that override lines tell of; the source that it begins with; whether a block is not whole only
    because the file ends there). A value of two lines makes no whole block."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    source, _, rest = text.partition("\n" + "=" * 100 + "\n")
    lines, n = [re.fullmatch(r"config (\w+)=(.*)", line) for line in rest.split("\n")], len(fields)
    names = [line and line[1] for line in lines]
    starts = [i for i, name in enumerate(names) if name == "preset"]
    whole = [i for i in starts if names[i:i + n] == fields and i + n < len(names)]
    config = {line[1]: line[2] for i in whole[-1:] for line in lines[i:i + n]}
    cut = all(names[i:-1] == fields[:len(names) - 1 - i] for i in starts)
    return config, set(re.findall(r"^override (\w+) .*->", rest, re.M)), source, cut


def finished(path):
    """The result of a run, which is why it does not go on."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict):
        raise ValueError("not the result of a run")
    return result


def in_use(path):
    """Does another process hold the lock that a run has on its train.log?"""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:     # there is no file, or no locks
        return False
    return False


class Found(NamedTuple):
    """What rank 0 finds of a run: why it cannot go on, or what it ended with, or how it began and its newest
    checkpoint."""
    problem: str = ""
    result: dict | None = None          # of a finished run
    given: dict | None = None           # {constant: text} that it began with, None: unknown
    payload: dict | None = None
    lines: tuple = ()


def find_run(t, cfg, changed):
    """-> Found, of run cfg.resume; changed: {name: [preset's text, text]} of what was given with RESUME."""
    folder = Path("logs", cfg.resume)
    if not re.fullmatch(r"\w[\w.,=+-]*", cfg.resume):
        return Found(f"resume={cfg.resume!r} is no run_id")
    if not os.path.isdir(folder):
        return Found(f"resume={cfg.resume!r}: there is no {folder}")
    if (folder / "result.json").exists():
        try:
            return Found(result=finished(folder / "result.json"))
        except (OSError, ValueError, RecursionError) as error:
            return Found(f"{folder}/result.json is damaged ({type(error).__name__}): move it away to go on")
    if in_use(folder / "train.log"):
        return Found(f"resume={cfg.resume!r}: that run is still going")
    config, names, source, cut = logged_config(folder / "train.log", [*t.FIELDS])
    if not config and cut and not {*changed} - {*FREE} and cfg.preset == t.Config.preset:
        return Found(f"{folder} ended before its constants were written: give them again, or begin anew")
    if not config and cut:
        return Found(lines=(f"resume: {folder} ended before its constants were written",))
    if not config:
        return Found(f"resume={cfg.resume!r}: the constants in {folder}/train.log cannot be read back")
    if source.strip() != t.script_files()["train_gpt.py"].decode().strip():
        return Found(f"train_gpt.py is not what {cfg.resume} began with: put {folder}/train_gpt.py here")
    asked = {name: text for name, (_, text) in changed.items() if name not in FREE}
    if cfg.preset != t.Config.preset:
        asked["preset"] = cfg.preset
    for name, text in asked.items():
        if text != config[name]:
            return Found(f"{name}={text}, but {cfg.resume} began with {config[name]}")
    payload, damaged = read_checkpoint(folder)
    given = {name: config[name] for name in ("preset", *names)
             if name in config and (name not in FREE or name not in changed)}
    return Found(given=given, payload=payload, lines=tuple(f"resume: {line}" for line in damaged))


def resume(t, cfg, changed, team, log):
    """(Config of run cfg.resume, its progress: {} without a checkpoint, with the payload on rank 0, which has
    the files); or (None, None) if it had finished. Raises Refused.
    """
    found = find_run(t, cfg, changed) if team.rank == 0 else Found()
    progress = found.payload and found.payload["progress"]
    problem, result, given, _, lines = team.share(found._replace(payload=None))
    progress = team.share(progress)
    t.demand(not problem, problem)
    run_id = cfg.resume
    if result:
        rows = {name: result.get(name) for name in RESULT if result.get(name) is not None}
        log(f"{run_id} has finished: {t.listed(rows)}")
        return None, None
    if given:
        given = {name: t.parse_value(name, text) for name, text in given.items()}
        given |= {name: getattr(cfg, name) for name in FREE if name in changed}
        cfg = t.preset_config(given["preset"], given)
    cfg = t.replace(cfg, resume="", run_id=run_id)
    log(*lines)
    if not progress:
        log(f"resume: no whole checkpoint in logs/{run_id}: it starts at step 0")
        return cfg, {}
    t.demand(progress["step"] <= t.total_steps(cfg), f"the checkpoint of {run_id} is of step "
             f"{progress['step']}, but the run has {t.total_steps(cfg)}")
    log(f"resume: from step {progress['step']} at train_time:{progress['now'] * 1e3:.0f}ms")
    return cfg, progress | {"payload": found.payload}


def fitting(tensor, shape):
    """tensor, if it is fp32, finite and of that shape. Raises ValueError."""
    if not (isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.shape == shape
            and tensor.isfinite().all()):
        raise ValueError(f"not fp32 numbers of the shape {tuple(shape)}")
    return tensor


@torch.no_grad()
def restore(team, model, optimizer, loader, state):
    """Puts what resume returned into model, optimizer and loader, for any number of ranks."""
    payload, world_size = state.pop("payload"), team.world_size
    if payload:
        for name, p in model.named_parameters():
            p.copy_(fitting(payload["tensors"][name], p.shape))
    for bank in optimizer.banks:
        if world_size > 1:
            dist.broadcast(bank.data, 0)
        for i, mine in enumerate(bank.state):
            whole = mine.new_zeros((world_size * len(mine), *mine.shape[1:]))
            if payload:
                units = units_of(model, bank)
                whole[:units] = fitting(payload["state"][f"{bank.names[0]} {i}"], (units, *mine.shape[1:]))
            if world_size > 1:
                dist.broadcast(whole, 0)
            mine.copy_(whole.view(world_size, *mine.shape)[team.rank])
    optimizer.step_count, loader.position = state["updates"], state["position"]
    torch.set_rng_state(state["random"])


# ------------------------------------------------------------ the watch
# Seconds in which no rank comes further, after which the run is ended; in training at least
LIMITS = dict(setup=900, compile=1800, training=40, evaluation=900, saving=900, interrupted=60)
FIRST_STEPS = 300       # of training, as long as there is no step to compare with
SLOWER = 5              # or so many times the slowest step so far
SILENT = 10             # seconds without a sign of life
IN_WRITING = 20         # seconds that a checkpoint has left when its run fails; torchrun kills after 30


class Watch:
    """Tells the other ranks every second where this one is, and ends the run when one of them failed, fell
    silent or keeps the others waiting. Seconds are counted, not read from a clock, so that a run that was
    stopped and continued as a whole, or a clock that was set, means nothing."""

    def __init__(self, t, team, env, log):
        self.t, self.rank, self.world_size, self.log = t, team.rank, team.world_size, log
        self.main, self.path, self.finished = threading.main_thread().ident, None, False
        self.place, self.count, self.rounds, self.first = ("setup", 0), 0, 0, None
        self.seen, self.posted, self.ending = {}, None, threading.Lock()
        self.store = dist.PrefixStore(f"watch{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", dist.TCPStore(
            env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)))
        for work in (self.tell, self.judge):
            threading.Thread(target=work, daemon=True).start()

    def at(self, phase, step=None):
        """Called by the trainer wherever it comes further."""
        self.place, self.count = (phase, self.place[1] if step is None else step), self.count + 1
        if phase == "training" and self.first is None:
            self.first = step

    def stands(self):
        """(function of train_gpt.py in which the trainer is, whether it waits for others there or the GPU)"""
        frame, waits = sys._current_frames().get(self.main), False
        while frame and frame.f_code.co_filename != self.t.__file__:
            waits |= f"{os.sep}distributed{os.sep}" in frame.f_code.co_filename
            frame = frame.f_back
        if not frame:
            return "its end", False
        line = linecache.getline(self.t.__file__, frame.f_lineno)
        return frame.f_code.co_name, waits or bool(re.search(r"\.(wait|item|tolist|synchronize)\(", line))

    def tell(self):
        """Thread: this rank's place to the store, the others' from it."""
        tick = 0
        while not self.finished:
            tick += 1
            try:
                self.store.set(str(self.rank), json.dumps([tick, *self.place, self.count, *self.stands()]))
                here = [r for r in range(self.world_size) if r in self.seen or self.store.check([str(r)])]
                self.seen = dict(zip(here, map(json.loads, self.store.multi_get(map(str, here)))))
                if self.store.check(["failed"]):
                    self.posted = json.loads(self.store.get("failed"))
                self.rounds += 1
            except Exception:       # the store is gone: rounds stand still
                pass
            time.sleep(1)

    def judge(self):
        """Thread: once a second, is all well?"""
        last, silent, still, rounds, quiet = {}, {}, {}, 0, 0
        tick, slowest, step_began = 0, 0, 0
        while not self.finished:
            time.sleep(1)
            tick += 1
            quiet, rounds = (quiet + 1 if rounds == self.rounds else 0), self.rounds
            seen = {rank: place for rank, place in self.seen.items() if place[1] != "done"}
            for rank, place in seen.items():
                old = last.get(rank, [None] * 6)
                silent[rank] = silent.get(rank, 0) + 1 if place[0] == old[0] else 0
                still[rank] = still.get(rank, 0) + 1 if place[3] == old[3] else 0
                if rank == self.rank and place[1:3] != old[1:3]:
                    if place[1] == old[1] == "training":
                        slowest = max(slowest, tick - step_began)
                    step_began = tick
            last = seen
            if self.posted:
                self.end(*self.posted)
            elif quiet > SILENT + 4:
                self.end("the host of rank 0 does not answer", [0], min(set(range(self.world_size)) - {0}))
            elif quiet == 0 and (dead := [rank for rank in seen if silent[rank] >= SILENT]):
                self.post("stopped answering", dead, seen)
            elif seen and min(still[rank] for rank in seen) >= max(self.limit(place, slowest)
                                                                   for place in seen.values()):
                alone = [rank for rank, place in seen.items() if not place[5] and place[1] != "interrupted"]
                first = min(seen[rank][2] for rank in seen)
                self.post("stands still", alone or [r for r in seen if seen[r][2] == first], seen)

    def limit(self, place, slowest):
        if place[1] != "training":
            return LIMITS[place[1]]
        known = self.first is not None and place[2] > self.first + 2
        return max(LIMITS["training"], SLOWER * slowest) if known else FIRST_STEPS

    def post(self, what, ranks, seen):
        """A finding: the first that is made counts for all."""
        _, phase, step, _, where, _ = seen[ranks[0]]
        names = ", ".join(map(str, ranks[:8]))
        sentence = f"rank {names} {what} about step {step} ({phase}, in {where})"
        healthy = [rank for rank in seen if rank not in ranks] or [self.rank]
        self.offer(sentence, ranks, min(healthy))

    def offer(self, sentence, ranks, writer):
        try:
            self.store.compare_set("failed", "", json.dumps([sentence, ranks, writer]))
            self.posted = json.loads(self.store.get("failed"))
        except Exception:       # without a store each rank says what it knows
            self.posted = [sentence, ranks, writer]

    def end(self, sentence, ranks, writer):
        """The end of this process; one rank that has rank 0's folder writes the log's last line."""
        if not self.log.started:
            time.sleep(3)       # all refuse alike, as a rule
        if self.finished or not self.ending.acquire(blocking=False):
            return      # its main thread says it
        print(f"train_gpt: {sentence}", file=sys.stderr, flush=True)
        if self.rank == writer == 0:
            self.log(sentence, echo=False)
        elif self.rank == writer and self.path and self.path.exists():
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(sentence + "\n")
        if self.rank != writer:
            time.sleep(3)       # or torchrun would end the writer first
        os._exit(1)

    def verdict(self, why, error):
        """What to say of an error in the main thread. If another rank is the cause, the judge finds it and
        ends this process."""
        trace = error.__traceback__
        while trace.tb_next:
            trace = trace.tb_next
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        follows = f"{os.sep}distributed{os.sep}" in file or ".wait()" in linecache.getline(file, line)
        if isinstance(error, KeyboardInterrupt):
            follows = not str(error)
        self.place = ("interrupted", self.place[1])
        for _ in range(SILENT + 12 if follows else 0):
            if self.seen and all(place[1] == "interrupted" for place in self.seen.values()):
                break
            time.sleep(1)
        with self.ending:       # the judge keeps it to its own end
            self.finished = True
            if not isinstance(error, KeyboardInterrupt):
                self.offer(f"rank {self.rank} at step {self.place[1]}: {why}", [self.rank], 0)
        return self.posted[0] if self.posted and self.log.started else why

    def done(self):
        """This rank has finished well."""
        self.finished, self.place = True, ("done", self.place[1])
        try:
            self.store.set(str(self.rank), json.dumps([-1, *self.place, self.count, "main", False]))
        except Exception:
            pass        # the others have finished before


# ------------------------------------------------------------ what the trainer talks to
class Guard:
    """Of a run, on each rank: takes signals, says when a checkpoint is due, makes it, words what failed."""

    def __init__(self, t, team, env, log):
        self.t, self.team, self.log = t, team, log
        self.state, self.job, self.run_id, self.last_saved = None, None, None, ""
        self.stop, self.between = 0, False      # signals that came; whether they wait for the next step's end
        self.watch = Watch(t, team, env, log) if team.world_size > 1 else None
        self.at = team.at = self.watch.at if self.watch else team.at
        self.handlers = []
        if threading.current_thread() is threading.main_thread():
            self.handlers = [(n, signal.signal(n, self.note)) for n in (signal.SIGINT, signal.SIGTERM)
                             if signal.getsignal(n) is not signal.SIG_IGN]      # as a shell has it for `&`

    def note(self, *_):
        if not self.between:
            raise KeyboardInterrupt
        self.stop += 1

    def resume(self, cfg, changed):
        cfg, self.state = resume(self.t, cfg, changed, self.team, self.log)
        return cfg, self.state

    def begin(self, cfg, model, optimizer, loader, folder, started):
        """Before the first step; signals now wait for the end of the step under way."""
        self.cfg, self.model, self.optimizer, self.loader = cfg, model, optimizer, loader
        self.folder, self.started, self.thread = folder, started, ThreadPoolExecutor(1)
        self.run_id = cfg.run_id
        if self.watch:
            self.watch.path = folder / "train.log"
        if self.state:
            try:
                restore(self.team, model, optimizer, loader, self.state)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise self.t.Refused(f"the checkpoint of {cfg.run_id} does not fit it "
                                     f"({self.t.brief(error)})") from None
            self.started = self.state["started"]
        self.saved = (self.state["step"], self.state["now"]) if self.state else (0, 0.0)
        self.wanted, self.between = False, True

    def due(self, step, now, stop, done):
        """Is a checkpoint to be made before this step? stop: of any rank; done: no step follows. While Adam's
        gradients wait for the next step, it waits too."""
        cfg, (saved_step, saved_at) = self.cfg, self.saved
        self.between, self.stopping = not done, bool(stop)
        if stop or step > saved_step and not done and (
                self.t.due(cfg.save_every, step) or 0 < cfg.save_every_seconds <= now - saved_at):
            self.wanted = True
        return self.wanted and step % cfg.adam_every == 0

    def save_last(self, step, now, curves, laps):
        """Of a run that saves: the state after its last step, so that its scores can be computed again."""
        regular = self.cfg.save_every or self.cfg.save_every_seconds
        if regular and step > self.saved[0] and step % self.cfg.adam_every == 0:
            self.save(step, now, curves, laps)

    def save(self, step, now, curves, laps):
        """All ranks at once. The copy is made here, the file by a thread. Raises what went wrong with the one
        before, and KeyboardInterrupt once it is written if it was made for a signal."""
        self.at("saving", step)
        self.wait()
        tensors = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}
        state = {f"{bank.names[0]} {i}": self.whole(mine)[:units_of(self.model, bank)]
                 for bank in self.optimizer.banks for i, mine in enumerate(bank.state)}
        if self.team.rank == 0:
            shape = {name: getattr(self.cfg, name) for name in self.t.SHAPE}
            progress = dict(step=step, now=now, curves=curves, laps=laps[-100:],
                            position=self.loader.position, updates=self.optimizer.step_count,
                            started=self.started, random=torch.get_rng_state())
            self.job = self.thread.submit(self.write, dict(
                shape=shape, tensors=tensors, state=state, progress=copied(progress)))
        self.saved, self.wanted = (step, now), False
        if self.stopping:
            self.wait()
            raise KeyboardInterrupt(f"RESUME={self.run_id}")
        self.at("training", step)

    def whole(self, mine):
        """The ranks' shares of a tensor in one, on the CPU."""
        if self.team.world_size == 1:
            return mine.cpu().clone()
        shares = mine.new_empty((self.team.world_size * len(mine), *mine.shape[1:]))
        self.t.all_gather(shares.view(-1), mine.contiguous().view(-1))
        return shares.cpu()

    def write(self, payload):
        step = payload["progress"]["step"]
        for name, tensor in (payload["tensors"] | payload["state"]).items():
            self.t.demand(tensor.isfinite().all(),
                          f"{name} is not finite at step {step}: lower the learning rates")
        write_checkpoint(self.folder, payload)
        self.last_saved = f"; the last checkpoint is of step {step}"

    def wait(self):
        """Until the last one is on the disk. Raises what went wrong with it."""
        if self.job:
            self.job.result()

    def verdict(self, why, error):
        """The sentence for an error that ends this rank. A checkpoint under way is first brought to the disk,
        and named. The watch may end the process meanwhile."""
        interrupted = isinstance(error, KeyboardInterrupt)
        if self.watch:
            why = self.watch.verdict(why, error)
        self.between = True     # a further signal does not cut the file short
        if self.job:
            wait([self.job], IN_WRITING)
        self.release()
        if interrupted and not str(error) and self.last_saved:
            return f"RESUME={self.run_id}"
        return why if interrupted else why + self.last_saved

    def done(self):
        """The run has ended well."""
        if self.watch:
            self.watch.done()
        self.release()
        self.wait()

    def release(self):
        for handler in self.handlers:
            signal.signal(*handler)
