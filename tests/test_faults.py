"""Faults put into toy runs by inject.py: what a run says, how it ends, and that it goes on to the same bits.

Quick ones run by default, the slow ones under `-m faults` only, which writes records/FAULTS.md.
"""

import io
import itertools
import json
import os
import pickle
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import faults
from helpers import ROOT, TOY, run_cli

pytestmark = pytest.mark.faults
INJECT = ROOT / "tests" / "inject.py"
NUMBERS = itertools.count()

PLAIN = TOY | dict(BIGRAM_ROWS="512", SAMPLE_TOKENS="0", VAL_TOKENS="1500", ITERATIONS="12",
                   TRAIN_LOG_EVERY="1", VAL_LOSS_EVERY="5", SAVE_EVERY="3")
# Stages, data in order, and an Adam step every other step, so that checkpoints wait for it
STAGES = PLAIN | dict(ADAM_EVERY="2", SHUFFLE="0", BATCH_SCHEDULE="1,2", WINDOW_SCHEDULE="16,64",
                      WINDOW_PATTERN="SL", ROPE_YARN="1")
DOCUMENTS = PLAIN | dict(MAX_DOC_LEN="48", SAVE_EVERY="2", NORMUON_BETA2="0.95", GRAD_CLIP_NORM="1",
                         WEIGHT_DECAY="0.1", NUM_KV_HEADS="1", TIE_EMBEDDINGS="1", DEVICE_BATCH_SIZE="8")
# 12 sequences a step, for 1, 2 and 3 ranks; the last checkpoint has every loss as it was
SHARED = PLAIN | dict(TRAIN_BATCH_TOKENS="768", SAVE_EVERY="1")
QUICK_WATCH = "silent=4,setup=8,training=5,first=8,evaluation=6,compile=6"
# Ranks tell once a second where they are, and a toy step takes a fiftieth of that
PAUSE = "slow@step:7;"


# ---------------------------------------------------------------- runs
class Server:
    """inject.py --serve: one job at a time, of one or more ranks."""

    def __init__(self):
        env = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, str(INJECT), "--serve"], env=env | {"OMP_NUM_THREADS": "1"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,      # Ctrl-C counts, also below nohup
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def answer(self, timeout):
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert ready, f"no answer in {timeout} s"
        return json.loads(self.process.stdout.readline())

    def start(self, cwd, args, ranks):
        job = dict(cwd=str(cwd), args=args, ranks=ranks)
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self.answer(60)

    def finish(self, pids, timeout):
        try:
            return self.answer(timeout)
        except AssertionError:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.answer(60)
            raise


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.process.stdin.close()
    server.process.wait(30)


@pytest.fixture(scope="module")
def root(tiny_data, tmp_path_factory):
    """A folder to run in, with data/."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "data").symlink_to(tiny_data / "data")
    return folder


def look(folder):
    """What a run left behind: log, last line, losses {step: text}, result, files."""
    read = lambda name: (folder / name).read_bytes() if (folder / name).exists() else None  # noqa: E731
    log = (read("train.log") or b"").decode(errors="replace").rpartition("=" * 100 + "\n")[2]
    losses = re.findall(r"^step:(\d+)/\d+ (train_loss:\S+|val_loss\S*)", log, re.M)
    return SimpleNamespace(
        folder=folder, run_id=folder.name, log=log, last=(log.strip().splitlines() or [""])[-1],
        losses={(int(step), text.split(":")[0]): text for step, text in losses},
        result=json.loads(read("result.json") or "null"), weights=read("final_model.pt"),
        artifact=read("final_model.int8.ptz"))


def rank_environments(ranks):
    """Those that torchrun makes, and the store that its agent holds."""
    if ranks == 1:
        return [{}], None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                          timeout=timedelta(seconds=60))
    common = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    return [common | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)], store


@pytest.fixture(scope="module")
def go(server, root):
    """A run by the server -> code (rank 0's), codes, out, err, seconds, since the fault, and what look finds.

    settings: of the trainer; resume: of a run, with nothing else given unless it is in settings; act(pids):
    called when the run has begun.
    """
    def go(settings=None, fault="", ranks=1, limits="", resume="", act=None, cwd=root, timeout=120, **more):
        run_id = resume or f"run{next(NUMBERS)}"
        base = ({} if resume else PLAIN) if settings is None else settings
        env = base | {"RESUME" if resume else "RUN_ID": run_id} | more
        env |= {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        env |= dict(OMP_NUM_THREADS="1", FAULT=fault, LIMITS=limits)
        run_id = env.get("RUN_ID", run_id)      # of more
        places, store = rank_environments(ranks)
        outs = [str(cwd / f"{run_id}.{rank}") for rank in range(ranks)]
        began = time.monotonic()
        pids = server.start(cwd, [], [dict(env=env | place, out=out) for place, out in zip(places, outs)])
        try:
            if act:
                act(pids)
        finally:
            codes = server.finish(pids, timeout)
        seconds = time.monotonic() - began
        text = {end: "".join(Path(out + end).read_text(errors="replace") for out in outs)
                for end in (".out", ".err")}
        met = [float(at) for at in re.findall(r"^inject: .* at (\S+)$", text[".err"], re.M)]
        err = re.sub(r"(?m)^inject: .*\n", "", text[".err"])
        return SimpleNamespace(
            **vars(look(cwd / "logs" / run_id)), code=codes[0], codes=codes, out=text[".out"], err=err,
            met=bool(met), seconds=seconds, since=time.monotonic() - max(met, default=time.monotonic()))

    return go


@pytest.fixture(scope="module")
def whole(go):
    """The same run, uninterrupted and without checkpoints; each once."""
    kept = {}

    def whole(settings, ranks=1):
        key = (ranks, *sorted(settings.items()))
        if key not in kept:
            kept[key] = go(settings | {"SAVE_EVERY": "0"}, ranks=ranks)
            assert kept[key].codes == [0] * ranks, kept[key].err
        return kept[key]

    return whole


def differences(done, want):
    """What differs between the end of a resumed run and that of an uninterrupted one."""
    if done.code or not done.result or not done.result["resumed"]:
        return [f"{done.run_id}: exit {done.code}, {done.last}, {done.err[-300:]}"]
    same = ("val_loss_partial", "trained", "artifact", "steps", "tokens", "min_val_bpb", "bytes_model",
            "stop_reason", "overrides")
    ours, theirs = ({key: dict(result, overrides=None)[key] for key in same}
                    for result in (done.result, want.result))
    return [f"{done.run_id}: {name} differs" for name, a, b in (
        ("final_model.pt", done.weights, want.weights), ("the artifact", done.artifact, want.artifact),
        ("result.json", ours, theirs), ("a logged loss", done.losses, want.losses)) if a != b]


def one_sentence(done, code=1):
    """The exit code, no traceback, and the last line on stderr, which is train.log's too."""
    assert done.code == code and "Traceback" not in done.err, done.err
    said = done.err.strip().splitlines()[-1].removeprefix("train_gpt: ")
    assert done.last == said and done.result is None
    return said


# ---------------------------------------------------------------- killed at any moment
PLACED = [  # (where, settings, where again after the first resume or "")
    ("step:1", PLAIN, ""),                              # before any checkpoint
    ("step:8", PLAIN, "step:2"),
    ("update:6", STAGES, ""),
    ("read:150", DOCUMENTS, "update:1"),
    ("save:2", STAGES, "step:4"),
    ("write:2", PLAIN, ""),                             # of the first checkpoint
    ("write:60", DOCUMENTS, "write:30"),
    ("sync/checkpoint.pt.tmp:2", PLAIN, ""),            # written, not yet on the disk
    ("rename/checkpoint_prev.pt:1", STAGES, ""),
    ("renamed/checkpoint_prev.pt:1", PLAIN, ""),        # only checkpoint_prev.pt is there
    ("renamed/checkpoint_prev.pt:2", DOCUMENTS, "renamed/checkpoint_prev.pt:1"),
    ("rename/checkpoint.pt:1", PLAIN, "evaluate:1"),
    ("renamed/checkpoint.pt:3", STAGES, ""),            # before the folder's fsync
    ("evaluate:2", DOCUMENTS, ""),
    ("artifact:1", PLAIN, ""),
    ("rename/final_model.pt:1", STAGES, "artifact:1"),
    ("sync/final_model.int8.ptz.tmp:1", PLAIN, ""),
    ("rename/result.json:1", DOCUMENTS, "rename/result.json:1"),
]


def after(seconds, number=signal.SIGKILL):
    """-> act of a run: so long after its beginning."""
    def act(pids):
        time.sleep(seconds)
        try:
            os.kill(pids[0], number)
        except ProcessLookupError:
            pass
    return act


def interrupted(go, what, place, settings, ranks=1, limits=""):
    """A run with a fault at a place -> it, and whether it was met."""
    fault = f"{what}@{place}" + (f"@{place.count('e') % ranks}" if ranks > 1 else "")
    done = go(settings, fault, ranks=ranks, limits=limits)
    return done, done.met and any(done.codes)


def through(go, whole, what, placed, ranks=1, limits=""):
    """Injects each, resumes until the end -> [what was not as it is without]."""
    wrong = []
    for place, settings, again in placed:
        done, met = interrupted(go, what, place, settings, ranks, limits)
        wrong += [] if met else [f"{place} was not met"]
        if again:
            done = go(resume=done.run_id, fault=f"{what}@{again}", ranks=ranks, limits=limits)
            wrong += [] if done.met and any(done.codes) else [f"{again} was not met again"]
        done = go(resume=done.run_id, ranks=ranks)
        wrong += [f"{place}: {line}" for line in differences(done, whole(settings, ranks))]
    return wrong


def test_killed_at_three_moments(go, whole, report):
    """... in a step, between the two renames of a checkpoint, before result.json."""
    began = time.monotonic()
    placed = [PLACED[2], PLACED[10], PLACED[17]]
    assert through(go, whole, "kill", placed) == []
    report("kill -9 in a step, between the renames, before result.json; each resumed",
           "3 of 3 bit-identical", time.monotonic() - began)


@pytest.mark.slow
def test_the_launcher_changes_nothing(whole, root):
    """train_gpt.py itself ends with the same bits as the uninterrupted runs here."""
    done = run_cli(root, env=STAGES | {"RUN_ID": "itself"})
    assert done.code == 0, done.err
    itself, want = look(root / "logs/itself"), whole(STAGES)
    assert itself.weights == want.weights and itself.artifact == want.artifact
    assert itself.losses == want.losses


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "term"])
def test_at_twenty_moments(what, go, whole, report):
    """14 places and 6 times by the clock, drawn with a seed that the report has; each resumed to the end."""
    began, seed = time.monotonic(), random.randrange(10**6)
    draw = random.Random(seed)
    placed = draw.sample(PLACED, 14)
    wrong, number = through(go, whole, what, placed), dict(kill=signal.SIGKILL, term=signal.SIGTERM)[what]
    times, tries = 0, 0
    while times < 6:
        settings = draw.choice([PLAIN, STAGES, DOCUMENTS])
        latest = whole(settings).seconds
        done = go(settings, act=after(draw.uniform(0.2, 0.95) * latest, number))
        tries += 1
        assert tries < 60, "no run was hit in time"
        if done.code == 0 or not done.folder.exists():      # it had ended, or not begun
            continue
        times += 1
        if what == "term":
            wrong += [] if done.last in (f"RESUME={done.run_id}", "interrupted") else [done.last]
        again = go(settings, resume=done.run_id)    # its constants too: it may have ended before it had them
        wrong += differences(again, whole(settings))
    assert wrong == []
    name = dict(kill="kill -9", term="SIGTERM")[what]
    report(f"{name} at 20 moments (14 places, 6 by the clock; seed {seed}), each resumed",
           "20 of 20 bit-identical", time.monotonic() - began)


@pytest.mark.slow
def test_compiled(go, root, report):
    """Killed and resumed to the bits of the uninterrupted run, both compiled."""
    settings = PLAIN | dict(COMPILE="1", NUM_LAYERS="1", ITERATIONS="8", EVAL_CONTEXT="64")
    want = go(settings | {"SAVE_EVERY": "0"}, timeout=400)
    assert want.code == 0 and want.result["compiled"], want.err
    first = go(settings, fault="slow@step:5;kill@step:6", timeout=400)
    done = go(resume=first.run_id, timeout=400)
    assert first.met and done.result["compiled"] and "resume: from step 3" in done.out
    assert differences(done, want) == []
    report("kill -9 in a step of a compiled run, resumed", "bit-identical", first.seconds + done.seconds)


# ---------------------------------------------------------------- signals
@pytest.mark.parametrize("name", ["term", "int"])
def test_a_signal_in_a_step(name, go, whole, report):
    """The step is finished, a checkpoint of it is made, and the last line says how to go on."""
    done = go(fault=f"{name}@step:8", settings=PLAIN | {"SAVE_EVERY": "0"})
    assert done.met and one_sentence(done) == f"RESUME={done.run_id}"
    payload, damaged = faults.read_checkpoint(done.folder)
    assert payload["progress"]["step"] == 8 and not damaged
    again = go(resume=done.run_id)
    assert "resume: from step 8 at" in again.out
    assert differences(again, whole(PLAIN)) == []
    report(f"SIG{name.upper()} in a step", f"exit 1, last line {done.last}; resumed bit-identical",
           done.since)


@pytest.mark.parametrize("name", ["term", "int"])
def test_a_signal_in_setup(name, go, report):
    """Before there is a folder: one word, and nothing is left."""
    done = go(fault=f"{name}@setup:1")
    assert done.met and done.code == 1 and not done.folder.exists()
    assert done.err == "train_gpt: interrupted\n"
    report(f"SIG{name.upper()} in setup", f"exit 1, {done.err.strip()}, no folder", done.since)


@pytest.mark.parametrize("name, where", [("term", "evaluate:4"), ("int", "evaluate:5"),
                                         ("term", "artifact:1")])
def test_a_signal_in_the_final_evaluation(name, where, go, whole, report):
    """... of the weights, of the artifact, or between them: the checkpoint that is made before it serves."""
    done = go(fault=f"{name}@{where}")
    assert done.met and one_sentence(done) == f"RESUME={done.run_id}"
    again = go(resume=done.run_id)
    assert "resume: from step 12 at" in again.out
    assert differences(again, whole(PLAIN)) == []
    report(f"SIG{name.upper()} after training, at {where}",
           f"exit 1, last line {done.last}; resumed bit-identical", done.since)


def test_a_signal_from_outside(go, whole, root):
    """... at whatever moment of training it comes."""
    settings = PLAIN | {"SAVE_EVERY": "0", "ITERATIONS": "60"}

    def act(pids):
        path = folder / "train.log"
        while not path.exists() or "step:5/60" not in path.read_text(errors="replace"):
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGTERM)

    folder = root / "logs" / f"run{next(NUMBERS)}"
    done = go(settings, act=act, RUN_ID=folder.name)
    assert one_sentence(done) == f"RESUME={folder.name}"
    assert differences(go(resume=folder.name), whole(settings)) == []


# ---------------------------------------------------------------- ranks
def losses_of(folder):
    """{step: train loss} as the last checkpoint has them, unrounded."""
    payload, _ = faults.read_checkpoint(folder)
    return {step: loss for step, _, loss in payload["progress"]["curves"]["train"]}


def test_a_rank_is_killed(go, whole, report):
    """The other one says which and where, and ends; two ranks go on to the same bits."""
    done = go(PLAIN, f"{PAUSE}kill@step:8@1", ranks=2, limits=QUICK_WATCH)
    assert done.met and done.codes == [1, -9] and done.since < 20
    line = r"rank 1 stopped answering about step [67] \(training, in \w+\)"
    assert re.fullmatch(line, done.last), done.last
    again = go(resume=done.run_id, ranks=2)
    assert differences(again, whole(PLAIN, 2)) == []
    report("kill -9 of rank 1 of 2 in a step (shortened limits)",
           f"{done.last}; resumed with 2 ranks bit-identical", done.since)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_raises(rank, go, report):
    """Its sentence is the last line, with its rank and step."""
    done = go(PLAIN, f"raise@step:8@{rank}", ranks=2, limits=QUICK_WATCH)
    assert done.met and done.codes == [1, 1] and done.since < 20
    assert done.last.startswith(f"rank {rank} at step 7: RuntimeError: an injected mistake"), done.last
    report(f"rank {rank} of 2 raises in a step", done.last, done.since)


@pytest.mark.slow
@pytest.mark.parametrize("fault, sentence", [
    ("nan@step:8", r"rank [01] at step [78]: train_loss is not finite at step 8 \(before: .*"),
    ("oom@step:8@1", "rank 1 at step 7: out of memory: lower DEVICE_BATCH_SIZE.*"),
    ("full@write:60@0", "rank 0 at step [6-9]: .*No space left on device.*")])
def test_two_ranks_that_fail(fault, sentence, go, whole, report):
    """... say why, once, and go on to the same bits."""
    done = go(PLAIN, fault, ranks=2, limits=QUICK_WATCH)
    assert done.met and done.codes == [1, 1] and done.since < 20
    assert re.fullmatch(sentence, done.last) and "Traceback" not in done.err, (done.last, done.err)
    assert done.log.count(done.last[:60]) == 1
    assert differences(go(resume=done.run_id, ranks=2), whole(PLAIN, 2)) == []
    report(f"{fault}, 2 ranks", done.last, done.since)


@pytest.mark.slow
def test_two_ranks_with_one_killed_at_twenty_moments(go, whole, report):
    """Rank 0 at each of the places, rank 1 at those that it comes to. At the last one rank 1 has finished."""
    began, wrong, both = time.monotonic(), [], ("step", "update", "read", "save", "evaluate")
    moments = [(0, *row[:2]) for row in PLACED] + [(1, *row[:2]) for row in PLACED
                                                   if row[0].split(":")[0] in both]
    for rank, place, settings in moments:
        done = go(settings, f"kill@{place}@{rank}", ranks=2, limits=QUICK_WATCH)
        alone = "result.json" in place
        if not done.met or done.codes[rank] != -9 or done.codes[1 - rank] != (0 if alone else 1):
            wrong.append(f"{place}@{rank}: exit codes {done.codes}")
        if f"rank {rank} stopped answering" not in done.last and not alone:
            wrong.append(f"{place}@{rank}: {done.last}")
        wrong += [f"{place}@{rank}: {line}"
                  for line in differences(go(resume=done.run_id, ranks=2), whole(settings, 2))]
    assert wrong == [] and len(moments) >= 20
    report(f"kill -9 of one of 2 ranks at {len(moments)} moments, each resumed (shortened limits)",
           f"{len(moments)} of {len(moments)} bit-identical; a rank that is left names the other",
           time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.parametrize("before, later", [(2, 1), (1, 2), (1, 3), (3, 2)])
def test_another_number_of_ranks(before, later, go, report):
    """The first loss after the resume to 1e-5, the others to 1e-4."""
    want = losses_of(go(SHARED, ranks=before).folder)
    done = go(SHARED, "kill@step:8@0", ranks=before, limits=QUICK_WATCH)
    assert done.met
    again = go(resume=done.run_id, ranks=later)
    assert again.codes == [0] * later, again.err
    first = int(re.search(r"resume: from step (\d+)", again.out)[1]) + 1
    got = losses_of(again.folder)
    assert sorted(got) == sorted(want) and first in (6, 7, 8)
    off = {step: abs(got[step] - want[step]) for step in want}
    assert off[first] <= 1e-5 and max(off.values()) <= 1e-4
    report(f"killed with {before} rank(s), resumed with {later}",
           f"first loss off by {off[first]:.1e}, later at most {max(off.values()):.1e}", again.seconds)


HANGS = {   # fault: the last line
    "stop@step:8@1": r"rank 1 stopped answering about step [67] \(training, in \w+\)",
    "spin@read:80@1": r"rank 1 stands still about step [1-9] \(training, in \w+\)",
    "hang@step:8@0": r"rank 0 stands still about step 7 \(training, in \w+\)",
    "hang@evaluate:2@1": r"rank 1 stands still about step \d+ \(evaluation, in \w+\)",
    "hang@rehearse:1@0": r"rank 0 stands still about step 0 \(compile, in \w+\)",
    "hang@setup:1@1": r"rank 1 stands still about step 0 \(setup, in \w+\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", HANGS)
def test_a_rank_hangs(fault, go, report):
    """... in each phase, with shortened limits: the other one tells its name, step and phase, and ends. In
    setup there is no log yet, only stderr."""
    done = go(PLAIN, PAUSE + fault, ranks=2, limits=QUICK_WATCH)
    assert done.met and 0 not in done.codes and done.seconds < 60, (done.codes, done.err)
    last = done.last or done.err.strip().splitlines()[-1].removeprefix("train_gpt: ")
    assert re.fullmatch(HANGS[fault], last), last
    report(f"{fault}, 2 ranks (shortened limits)", last, done.since)


def under_torchrun(root, fault, timeout=200, **settings):
    """Two ranks by torchrun, nothing shortened -> what look finds, seconds from the fault to the end."""
    run_id = f"run{next(NUMBERS)}"
    done = run_cli(root, ranks=2, env=PLAIN | settings | {"RUN_ID": run_id, "FAULT": fault}, timeout=timeout,
                   script=INJECT)
    ended = time.monotonic()
    met = re.findall(r"^inject: .* at (\S+)$", done.err, re.M)
    assert met and done.code, done.err
    return look(root / "logs" / run_id), ended - max(map(float, met))


# The watch compares with steps that it saw: it looks once a second, and wants three
SEEN = "".join(f"slow@step:{step};" for step in range(2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("fault, line", [
    ("kill@step:8@0", r"rank 0 stopped answering about step [67] \(training, in \w+\)"),
    ("kill@step:8@1", r"rank 1 stopped answering about step [67] \(training, in \w+\)"),
    ("stop@step:8@1", r"rank 1 stopped answering about step [67] \(training, in \w+\)"),
    ("spin@step:8@1", r"rank 1 stands still about step [67] \(training, in \w+\)"),
    ("raise@step:8@1", r"rank 1 at step 7: RuntimeError: an injected mistake.*")],
    ids=["kill 0", "kill 1", "stop", "spin", "raise"])
def test_under_torchrun_all_end_in_a_minute(fault, line, root, go, whole, report):
    """With the limits as they are; the last line names rank and step; resumed bit-identical."""
    done, seconds = under_torchrun(root, SEEN + fault)
    assert re.fullmatch(line, done.last), done.last
    assert seconds < 60
    assert differences(go(resume=done.run_id, ranks=2), whole(PLAIN, 2)) == []
    report(f"{fault} under torchrun, limits as they are", f"{done.last}; resumed bit-identical", seconds)


# ---------------------------------------------------------------- checkpoints that are damaged
@pytest.fixture(scope="module")
def killed(go):
    """A run that was killed in step 11, with checkpoints of steps 6 and 9."""
    done = go(fault="slow@step:10;kill@step:11")    # until the last one is on the disk
    assert done.met and faults.read_checkpoint(done.folder)[0]["progress"]["step"] == 9
    return done.folder


@pytest.fixture
def copy(killed):
    """That run under another name."""
    folder = killed.parent / f"run{next(NUMBERS)}"
    shutil.copytree(killed, folder)
    return folder


class Evil:
    """What weights_only refuses to load."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def evil(raw):
    torch.save(Evil(), buffer := io.BytesIO())
    return zlib.compress(buffer.getvalue())


def flipped(raw):
    return raw[:len(raw) // 3] + bytes([raw[len(raw) // 3] ^ 1]) + raw[len(raw) // 3 + 1:]


DAMAGE = {
    "truncated": lambda raw: raw[:len(raw) // 2],
    "truncated by one byte": lambda raw: raw[:-1],
    "a byte flipped": flipped,
    "empty": lambda raw: b"",
    "random bytes": lambda raw: random.Random(0).randbytes(len(raw)),
    "zeros": lambda raw: bytes(len(raw)),
    "a pickle": lambda raw: zlib.compress(pickle.dumps(Evil(), 2)),
    "a pickle in a torch file": evil,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_found(kind, copy, monkeypatch):
    """The one before is read instead, with a sentence; nothing in the file is executed."""
    monkeypatch.chdir(copy)
    path = copy / "checkpoint.pt"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    payload, damaged = faults.read_checkpoint(copy)
    assert payload["progress"]["step"] == 6 and not (copy / "evil").exists()
    assert len(damaged) == 1 and re.fullmatch(r"checkpoint\.pt is damaged \(\w+\)", damaged[0])


def test_every_flipped_byte_is_found(copy):
    """At 60 places, the ends among them."""
    raw, draw = (copy / "checkpoint.pt").read_bytes(), random.Random(0)
    for place in [0, 1, 2, 3, 4, 5, len(raw) - 1, len(raw) - 4, *draw.sample(range(len(raw)), 52)]:
        bad = bytearray(raw)
        bad[place] ^= 1 << draw.randrange(8)
        (copy / "checkpoint.pt").write_bytes(bad)
        payload, damaged = faults.read_checkpoint(copy)
        same = not damaged and zlib.decompress(bad) == zlib.decompress(raw)     # bits that mean nothing
        assert payload["progress"]["step"] == 6 and damaged or same, place


@pytest.mark.parametrize("kind", ["truncated", "a byte flipped", "a pickle in a torch file"])
def test_a_run_goes_on_from_the_one_before(kind, copy, go, whole, report):
    path = copy / "checkpoint.pt"
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    done = go(resume=copy.name)
    line = re.search(r"^resume: checkpoint\.pt is damaged.*\nresume: from step 6 at.*$", done.log, re.M)
    assert line and differences(done, whole(PLAIN)) == []
    report(f"checkpoint.pt {kind}", line[0].replace("\n", "; ") + "; bit-identical", done.seconds)


def test_both_are_damaged(copy, go, whole, report):
    for name in faults.FILES:
        (copy / name).write_bytes((copy / name).read_bytes()[:-100])
    done = go(resume=copy.name)
    found = re.findall(r"^resume: .*$", done.log, re.M)
    assert [line.split(" ")[1] for line in found] == [*faults.FILES, "no"]
    assert "it starts at step 0" in found[2]
    assert differences(done, whole(PLAIN)) == []
    report("both checkpoints truncated", f"{found[2]}; bit-identical", done.seconds)


# ---------------------------------------------------------------- what is refused
def refused(done, *words):
    """Exit 2 with one sentence that has the words."""
    (line,) = done.err.strip().splitlines()
    assert done.codes == [2] and all(word in line for word in words), line
    return line.removeprefix("train_gpt: ")


def test_resume_of_no_run(go, report):
    done = go(resume="nowhere")
    report("RESUME of a run that is not there", "exit 2, " + refused(done, "nowhere"), done.seconds)


def test_resume_with_other_constants(copy, go, report):
    done = go(resume=copy.name, MATRIX_LR="0.5")
    line = refused(done, "matrix_lr=0.5", "0.03")
    assert done.log == look(copy).log
    report("RESUME with another constant", "exit 2, " + line, done.seconds)
    refused(go(resume=copy.name, SHUFFLE="0"), "shuffle=0")
    refused(go(resume=copy.name, PRESET="golf"), "preset=golf")


def test_resume_with_the_same_constants(copy, go, whole):
    """... and others that change no number."""
    again = PLAIN | {"SAVE_EVERY": "4", "SAVE_EVERY_SECONDS": "100", "DEVICE_BATCH_SIZE": "16"}
    assert differences(go(again, resume=copy.name), whole(PLAIN)) == []


def test_resume_after_train_gpt_changed(copy, go, report):
    path = copy / "train.log"
    path.write_text(path.read_text().replace("beta2=(0.95", "beta2=(0.96", 1))
    done = go(resume=copy.name)
    report("RESUME after train_gpt.py changed", "exit 2, " + refused(done, "train_gpt.py"), done.seconds)


def test_a_run_that_is_still_going(go, root, report):
    """Neither a resume nor a second run with its id touches it."""
    seen = {}

    def act(pids):
        path = folder / "train.log"
        while not path.exists() or "train_loss" not in path.read_text(errors="replace"):
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
            for name in ("RESUME", "RUN_ID"):
                began = time.monotonic()
                seen[name] = run_cli(root, env=(PLAIN if name == "RUN_ID" else {}) | {name: folder.name})
                seen[name].seconds = time.monotonic() - began
            assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
        finally:
            os.kill(pids[0], signal.SIGCONT)

    folder = root / "logs" / f"run{next(NUMBERS)}"
    done = go(PLAIN | {"SAVE_EVERY": "0", "ITERATIONS": "60"}, act=act, RUN_ID=folder.name)
    assert done.code == 0, done.err
    injected = dict(RESUME="RESUME of a run that is going", RUN_ID="a second run with the same id")
    for name, fault in injected.items():
        assert seen[name].code == 2 and seen[name].err.count("\n") == 1, seen[name].err
        said = seen[name].err.strip().removeprefix("train_gpt: ")
        report(fault, f"exit 2, {said}", seen[name].seconds)
    assert "still going" in seen["RESUME"].err and folder.name in seen["RUN_ID"].err


def test_resume_of_a_finished_run(go, whole, report):
    """Its result, exit 0, and no byte changed."""
    want = whole(PLAIN)
    before = {path.name: path.read_bytes() for path in want.folder.iterdir()}
    done = go(resume=want.run_id)
    assert done.code == 0 and before == {path.name: path.read_bytes() for path in want.folder.iterdir()}
    line = done.out.strip().splitlines()[-1]
    assert f"{want.run_id} has finished" in line and str(want.result["val_loss_partial"]) in line
    report("RESUME of a finished run", f"exit 0, {line}", done.seconds)


# ---------------------------------------------------------------- the clock
def test_a_capped_run_goes_on_from_its_clock(go, root, report):
    """Killed half-way, with a checkpoint every few steps of time: both parts together keep to the cap."""
    settings = PLAIN | dict(MAX_WALLCLOCK_SECONDS="4", ITERATIONS="100000", SAVE_EVERY="0",
                            VAL_LOSS_EVERY="0", SAVE_EVERY_SECONDS="0.2", TRAIN_LOG_EVERY="5")
    began, run_id = time.monotonic(), f"run{next(NUMBERS)}"
    path = root / "logs" / run_id / "train.log"

    def act(pids):
        while not path.exists() or not re.search(r"train_time:2\d\d\dms", path.read_text(errors="replace")):
            time.sleep(0.02)
        os.kill(pids[0], signal.SIGKILL)

    first = go(settings, act=act, RUN_ID=run_id)
    assert first.code == -9
    saved = faults.read_checkpoint(first.folder)[0]["progress"]
    assert 1 < saved["now"] < 3
    done = go(resume=run_id)
    assert done.code == 0 and done.result["stop_reason"] == "wallclock_cap", done.err
    assert f"from step {saved['step']} at train_time:{saved['now'] * 1e3:.0f}ms" in done.out
    times = [int(ms) for ms in re.findall(r"train_loss:\S+ train_time:(\d+)ms", done.out)]
    assert saved["now"] * 1e3 < times[0] < saved["now"] * 1e3 + 1500
    assert 3000 < done.result["train_time_ms"] <= 4000
    report("kill -9 of a capped run half-way, resumed", f"saved at {saved['now']:.2f} s, ended at "
           f"{done.result['train_time_ms'] / 1e3:.2f} s of 4 s", time.monotonic() - began)


def test_a_clock_that_jumps(go, whole, report):
    """The wall clock is set forward by a day: neither the training time nor a bit follows."""
    done = go(PLAIN | {"SAVE_EVERY_SECONDS": "3000", "SAVE_EVERY": "0"}, fault="jump@step:6")
    assert done.met and done.code == 0, done.err
    assert done.result["train_time_ms"] < 20_000 and done.result["process_ms"] < 60_000
    assert done.result["finished"][:10] > done.result["started"][:10], "else nothing jumped"
    want = whole(PLAIN)
    assert (done.weights, done.artifact, done.losses) == (want.weights, want.artifact, want.losses)
    report("the wall clock jumps by a day", f"train_time {done.result['train_time_ms'] / 1e3:.1f} s, "
           "bit-identical", done.seconds)


# ---------------------------------------------------------------- numbers that are not finite, memory
@pytest.mark.parametrize("what", ["nan", "spoil"])
def test_not_finite(what, go, report):
    """The last line has the step, the losses before and the last checkpoint, which is still good."""
    done = go(fault=f"{what}@step:8", settings=PLAIN)
    said = one_sentence(done)
    step = 8 if what == "nan" else 9    # spoilt weights show in the next loss
    before = ", ".join(f"{loss.split(':')[1]} at step {s}" for (s, kind), loss in sorted(done.losses.items())
                       if kind == "train_loss" and step - 3 <= s < step)
    assert f"train_loss is not finite at step {step} (before: {before})" in said
    assert said.endswith("; the last checkpoint is of step 6"), said
    payload, damaged = faults.read_checkpoint(done.folder)
    assert payload["progress"]["step"] == 6 and not damaged
    assert all(t.isfinite().all() for t in (payload["tensors"] | payload["state"]).values())
    report(f"a {'loss' if what == 'nan' else 'weight'} that is NaN", said, done.since)


def test_weights_that_are_not_finite_are_not_saved(go, report):
    """... although no loss has told yet: the checkpoint before stays."""
    done = go(fault="spoil@step:6", settings=PLAIN | {"TRAIN_LOG_EVERY": "50", "ITERATIONS": "30"})
    said = one_sentence(done)
    assert "not finite at step 6" in said or "not finite at step 7" in said
    payload, damaged = faults.read_checkpoint(done.folder)
    assert payload["progress"]["step"] == 3 and not damaged
    report("weights that are NaN when a checkpoint is due", said, done.since)


def goes_on(go, whole, done):
    """Nothing that was written is lost: without the fault it ends as it would have."""
    assert differences(go(resume=done.run_id), whole(PLAIN)) == []


def test_out_of_memory(go, whole, report):
    """... while the last checkpoint is still being written: it is finished, and is the one that is named."""
    done = go(fault="slow@sync/checkpoint.pt.tmp:2;oom@step:8")
    said = one_sentence(done)
    assert done.met and said.startswith("out of memory: lower DEVICE_BATCH_SIZE"), said
    assert said.endswith("; the last checkpoint is of step 6"), said
    goes_on(go, whole, done)
    report("out of memory in a step", said, done.since)


# ---------------------------------------------------------------- files
@pytest.mark.parametrize("place", [
    "write:40", "sync/checkpoint.pt.tmp:2", "atomically/final_model.pt:1", "sync/final_model.int8.ptz.tmp:1",
    "atomically/result.json:1", "log:110", "log:140"])
def test_a_full_disk(place, go, whole, report):
    """... on a checkpoint, on a file of the end, on train.log: a sentence, exit 1, and it can be resumed."""
    done = go(fault=f"full@{place}")
    assert done.met and done.code == 1 and "Traceback" not in done.err, done.err
    said = done.err.strip().splitlines()[-1].removeprefix("train_gpt: ")
    assert "No space left on device" in said and done.result is None
    assert done.last == said
    goes_on(go, whole, done)
    report(f"a full disk at {place}", said, done.since)


def test_a_folder_that_turns_read_only(go, whole, report):
    done = go(fault="readonly@write:40")
    said = one_sentence(done)
    assert done.met and "Read-only file system" in said
    goes_on(go, whole, done)
    report("the file system turns read-only before a checkpoint", said, done.since)


def test_a_folder_that_is_removed(go, report):
    done = go(fault="remove@step:5")
    assert done.met and done.code == 1 and "Traceback" not in done.err
    (said,) = done.err.strip().splitlines()
    assert "No such file" in said
    report("the run folder is removed in a run", said.removeprefix("train_gpt: "), done.since)


def test_an_end_before_the_constants_were_written(go, whole):
    """RESUME with the constants begins the run; killed just after its folder was made."""
    done = go(fault="kill@log:1")
    assert done.met and "config " not in done.log
    again = go(PLAIN, resume=done.run_id)
    assert "ended before its constants were written" in again.out
    assert differences(again, whole(PLAIN)) == []


@pytest.mark.parametrize("size", ["850k", pytest.param("2000k", marks=pytest.mark.slow)])
def test_a_disk_that_is_full(size, go, tmp_path, tiny_data, report):
    """A small file system: room for the log but for no checkpoint, or for some. What it holds is whole, the
    reason is the log's last line, and with more room the run goes on."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "data").symlink_to(tiny_data / "data")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(logs)],
                           capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.strip()}")
    try:
        began = time.monotonic()
        done = run_cli(tmp_path, env=PLAIN | {"RUN_ID": "full"})
        seconds, left = time.monotonic() - began, look(logs / "full")
        said = done.err.strip().removeprefix("train_gpt: ")
        assert done.code == 1 and "No space left on device" in said and "\n" not in said, done.err
        assert left.last == said and left.result is None
        for path in left.folder.glob("checkpoint*.pt"):
            zlib.decompress(path.read_bytes())
        report(f"a file system of {size} fills up", said, seconds)
        subprocess.run(["mount", "-o", "remount,size=50m", str(logs)], check=True)
        again = go(resume="full", cwd=tmp_path)
        assert again.code == 0 and again.result["resumed"], again.err
    finally:
        subprocess.run(["umount", "-l", str(logs)])


def test_logs_cannot_be_written(go, tmp_path, tiny_data, report):
    """logs is a file, so that root fails as well."""
    (tmp_path / "data").symlink_to(tiny_data / "data")
    (tmp_path / "logs").write_text("")
    done = go(PLAIN, cwd=tmp_path)
    report("logs/ that cannot be written", "exit 2, " + refused(done, "cannot be written"), done.seconds)


@pytest.fixture
def own_data(tiny_data, tmp_path):
    """A folder to run in with data of its own; in order, so that the first shard is read."""
    shutil.copytree(tiny_data / "data", tmp_path / "data")
    return tmp_path


ORDERED = PLAIN | {"SHUFFLE": "0"}


@pytest.mark.parametrize("what", ["shrink", "eio"])
def test_a_shard_that_turns_unreadable(what, go, own_data, report):
    """One sentence with its name; with the shard back the run goes on."""
    kept = shutil.copytree(own_data / "data", own_data / "kept")
    done = go(ORDERED, f"{what}@{'step:8' if what == 'shrink' else 'read:140'}", cwd=own_data)
    said = one_sentence(done)
    assert done.met and ("toy_train_000000.bin" in said if what == "shrink" else "Input/output error" in said)
    shutil.rmtree(own_data / "data")
    kept.rename(own_data / "data")
    again = go(resume=done.run_id, cwd=own_data)
    assert again.code == 0 and again.result["resumed"], again.err
    report(f"a shard {'is truncated' if what == 'shrink' else 'cannot be read'} in a run", said, done.since)


def test_a_shard_that_is_deleted(go, own_data, whole, report):
    """It is held open: the run goes on to the same bits."""
    done, want = go(ORDERED, "delete@step:6", cwd=own_data), whole(ORDERED)
    assert done.met and done.code == 0 and not [*own_data.glob("data/datasets/toy/*_train_*")], done.err
    assert (done.weights, done.losses) == (want.weights, want.losses)
    report("the train shards are deleted in a run", "it goes on, bit-identical", done.seconds)


# ---------------------------------------------------------------- scores
def test_a_checkpoint_can_be_scored(go, whole):
    """EVAL_FROM=checkpoint.pt gives the loss that the run had with those weights, to the last digit."""
    run, want = go(PLAIN | {"SAVE_EVERY": "5"}, fault="term@artifact:1"), whole(PLAIN)
    assert want.result["trained"]["val_loss"] != want.result["artifact"]["val_loss"]
    done = go(PLAIN, EVAL_FROM=f"logs/{run.run_id}/checkpoint.pt")
    assert done.code == 0 and done.result["trained"] == want.result["trained"], done.err
    done = go(PLAIN, EVAL_FROM=f"logs/{run.run_id}/checkpoint_prev.pt")
    assert run.losses[10, "val_loss_partial"] == f"val_loss_partial:{done.result['val_loss_partial']:.4f}"
