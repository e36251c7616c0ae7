"""Starts Python programs as forks of one process that has imported torch already, for tests.

An import of torch and of what the trainer needs besides takes seconds, and the tests start some two hundred
programs; pytest's own processes are forks, too, where there are several. start() makes a server and returns
the path of a stand-in for `python`: it hands its arguments, environment, folder, stdin, stdout and stderr to
the server, which forks; the fork runs the program as `python` would. The stand-in passes signals on, and ends
with the program's exit code or by its signal. What is no `SCRIPT …`, `-m MODULE …` or `-c CODE …` goes to the
real interpreter.

The fork has the imported modules of the server, and its number of threads (one). A test about imports, the
interpreter's options or torch's environment variables takes sys.executable instead.
"""

import atexit
import gc
import importlib
import importlib.util
import io
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
PRELOAD = ["inject", "sentencepiece", "matplotlib.figure", "matplotlib.backends.backend_agg", "xml.etree",
           "torch.distributed.run", "torch._inductor.compile_fx", "torch._meta_registrations", "tqdm",
           "scipy.stats"]
SHARED = "TRAIN_GPT_FORKS"      # in the environment: the stand-in of a server that another process has made
OURS = ("inject", "train_gpt", "fork_server", "helpers", "toy_text")    # a copy of the project has its own

STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys

words = sys.argv[1:]
if words[:1] == ["-u"]:
    words.pop(0)
    os.environ["PYTHONUNBUFFERED"] = "1"
if not words or words[0].startswith("-") and words[0] not in ("-m", "-c"):
    os.execv({python!r}, [{python!r}, *words])
received = []
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    number = getattr(signal, name)
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: received.append(number))
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps(dict(words=words, python=sys.argv[0], folder=os.getcwd(), environment=dict(os.environ)))
socket.send_fds(server, [len(request.encode()).to_bytes(8, "little")], [0, 1, 2])
server.sendall(request.encode())
answers = server.makefile("r")
child = int(answers.readline())
wake, woken = os.pipe()
os.set_blocking(woken, False)
signal.set_wakeup_fd(woken)
import select
while True:
    for number in received:
        os.kill(child, number)
    received.clear()
    if server in select.select([server, wake], [], [])[0]:
        break
    os.read(wake, 100)
code = int(answers.readline())
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def start():
    """The path of the stand-in for `python`; the server ends with this process. Where there is a GPU, whose
    driver forbids forks of a process that has looked for it: the real one."""
    if Path("/dev/nvidiactl").exists():
        return sys.executable
    if SHARED in os.environ:
        return os.environ[SHARED]
    folder = tempfile.mkdtemp(prefix="forks")
    address = f"{folder}/server"
    stand_in = Path(folder, "python")
    stand_in.write_text(STAND_IN.format(python=sys.executable, address=address))
    stand_in.chmod(0o755)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, __file__, address], env=environment, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"ready\n"

    def stop():
        server.kill()
        server.wait()
        shutil.rmtree(folder)

    atexit.register(stop)
    return str(stand_in)


def popen(words, cwd, env, stdout, stderr):
    """A Python program of those words, forked where there is a server. Without stdin."""
    return subprocess.Popen([start(), *map(str, words)], cwd=cwd, env=env, stdin=subprocess.DEVNULL,
                            stdout=stdout, stderr=stderr)


# ---------------------------------------------------------------- the server
def read_exactly(connection, size):
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        if not more:
            raise EOFError
        content += more
    return content


def request_of(connection):
    """(what the stand-in asks for, its stdin, stdout and stderr)"""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    request = json.loads(read_exactly(connection, int.from_bytes(size, "little")))
    return request, files


def serve(address):
    """Forks for each connection, tells the number of the child, then how it ended. A child whose stand-in is
    gone is killed. Returns in the child only: what is to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    children = {}       # process: connection
    print("ready", flush=True)
    while True:
        ready = select.select([listener, wake, 0, *children.values()], [], [])[0]
        if 0 in ready:      # who started the server has ended
            for child in children:
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        if wake in ready:
            os.read(wake, 1000)
            tell_ended(children)
        for child, connection in [*children.items()]:
            if connection in ready:
                os.kill(child, signal.SIGKILL)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        try:
            request, files = request_of(connection)
        except EOFError:
            connection.close()
            continue
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for opened in (listener, connection, *children.values()):
                opened.close()
            os.close(wake)
            os.close(woken)
            return request, files
        for file in files:
            os.close(file)
        children[child] = connection
        connection.sendall(f"{child}\n".encode())


def tell_ended(children):
    for child in [*children]:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            with children.pop(child) as connection, suppress(BrokenPipeError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def warm_up():
    """A picture, so that matplotlib has its fonts and has parsed what stands at logarithmic axes."""
    figure = sys.modules["matplotlib.figure"].Figure(layout="constrained")
    figure.subplots().plot([1, 20], [2, 9])
    figure.axes[0].set(xlabel="x", ylabel="y", title="a", yscale="log")
    figure.savefig(io.BytesIO(), format="png")


def own_modules():
    """Drops those modules of ours that this program would import from elsewhere."""
    loaded = {name: sys.modules.pop(name) for name in OURS if name in sys.modules}
    for name, module in loaded.items():
        found = importlib.util.find_spec(name)
        if found and found.origin and Path(found.origin).samefile(module.__file__):
            sys.modules[name] = module


def become(request, files):
    """The program as `python` would find itself: files, folder, environment, arguments, import path."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    unbuffered = bool(request["environment"].get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", 1 if unbuffered or os.isatty(1) else -1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = request["python"]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    kind, *words = request["words"]
    sys.argv = ["-m", *words[1:]] if kind == "-m" else ["-c", *words[1:]] if kind == "-c" else [kind, *words]
    first = "" if kind == "-c" else os.getcwd() if kind == "-m" else str(Path(kind).resolve().parent)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *(path for path in given if path), *BASE_PATH]
    importlib.invalidate_caches()
    random.seed()
    own_modules()


def without_pictures():
    """PICTURE=0: one pixel for each picture that matplotlib is to write."""
    pixel = io.BytesIO()
    figure = sys.modules["matplotlib.figure"].Figure(figsize=(1, 1), dpi=1)
    figure.savefig(pixel, format="png")
    type(figure).savefig = lambda self, path, **_: Path(path).write_bytes(pixel.getvalue())


def program(request):
    """Runs what was asked for -> exit code."""
    kind, *words = request["words"]
    if os.environ.get("PICTURE") == "0":
        without_pictures()
    try:
        if kind == "-m":
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            run_as_main(compile(words[0], "<string>", "exec", dont_inherit=True), {})
        else:
            run_as_main(code_of(kind), {"__file__": kind})
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exception(error)
        return 1
    return 0


def code_of(path):
    """Compiled; train_gpt.py, which most programs are, was compiled once, also for a copy of it."""
    source = Path(path).read_bytes()
    return TRAINER[1] if source == TRAINER[0] else compile(source, path, "exec", dont_inherit=True)


def run_as_main(code, names):
    main = types.ModuleType("__main__")
    main.__dict__.update(names)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def end(code):
    """As the interpreter ends."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xff)


if __name__ == "__main__":
    BASE_PATH = sys.path[1:]
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    for name in PRELOAD:
        importlib.import_module(name)
    warm_up()
    trainer = HERE.parent / "train_gpt.py"
    TRAINER = trainer.read_bytes(), compile(trainer.read_bytes(), trainer, "exec", dont_inherit=True)
    gc.collect()
    gc.freeze()     # else the first collection in a fork writes to every object, so that all pages are copied
    asked, opened = serve(sys.argv[1])
    become(asked, opened)
    end(program(asked))
