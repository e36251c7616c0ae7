"""The environment that ./run.sh gives to a trainer: folders, threads, allocators. What is set already stays.

Imports neither torch nor numpy, which read these variables when they are loaded.
"""
import getpass
import os
import platform
import re
import resource
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from data.inputs import usable_cpus

CPU_INFO = Path("/proc/cpuinfo")
CACHE = "TORCHINDUCTOR_CACHE_DIR"


# ------------------------------------------------------------ CPUs
def words_of(path: Path) -> list[str]:
    """The words of a file; none if it cannot be read."""
    try:
        return path.read_text("utf-8").split()
    except OSError:
        return []


def allowed_cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ------------------------------------------------------------ folders that torch's compiler can use
def is_odd(path: str) -> bool:
    """Would torch's compiler cut this path in two, as at a space, or trip over a quote?"""
    return re.search(r"[^\w./+@%:,=~-]", path) is not None


def can_be_made(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
        return True
    except OSError:
        return False


def compiler_folders(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """({variable: text} that leads torch's compiler to folders that it can use, what was to blame)."""
    changes = {}
    odd = []
    temporary = env.get("TMPDIR") or env.get("TEMP") or env.get("TMP") or tempfile.gettempdir()
    if is_odd(os.path.abspath(temporary)):
        temporary = changes["TMPDIR"] = "/tmp"
        odd.append("TMPDIR")
    user = env.get("LOGNAME") or env.get("USER") or ""
    with suppress(KeyError, OSError):  # a user without a name
        user = user or getpass.getuser()
    if is_odd(user):  # it is part of a folder's name
        changes["LOGNAME"] = f"uid_{os.getuid()}"
        odd.append("the user's name")
    if CACHE in env and (is_odd(os.path.abspath(env[CACHE])) or not can_be_made(env[CACHE])):
        changes[CACHE] = f"{temporary}/torchinductor_{os.getuid()}"
        odd.append(CACHE)
    return changes, odd


# ------------------------------------------------------------ libraries
def sorting(env: Mapping[str, str]) -> dict[str, str]:
    """np.sort, which counts n-grams, takes 5 times as long with AVX-512 on AMD's Zen 4 as with AVX2; on Intel
    half."""
    if "NPY_DISABLE_CPU_FEATURES" in env or env.get("NPY_ENABLE_CPU_FEATURES"):
        return {}
    return {"NPY_DISABLE_CPU_FEATURES": "AVX512F"} if "AuthenticAMD" in words_of(CPU_INFO) else {}


def idle_threads(env: Mapping[str, str]) -> dict[str, str]:
    """How many times an idle thread of GNU OpenMP spins before it sleeps. By default it spins for
    milliseconds: alongside one busy process on two cores, a step of tiny takes over 20 times as long
    (docs/log.md)."""
    given = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & {*env}
    return {} if given else {"GOMP_SPINCOUNT": "5000"}


def raise_file_limit() -> None:
    """A trainer keeps every shard open, and some datasets have more of them than the usual 1,024 files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allocator(env: Mapping[str, str]) -> dict[str, str]:
    """Segments of GPU memory that grow: rows of several lengths leave fewer holes in it."""
    given = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*env}
    return {} if given else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def libraries(env: Mapping[str, str]) -> dict[str, str]:
    """What numpy and torch read when they are loaded."""
    return sorting(env) | allocator(env) | idle_threads(env)


def for_trainer(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What to set for a trainer -> ({variable: text}, lines that say why)."""
    changes, odd = compiler_folders(env)
    changes |= libraries(env)
    lines = []
    if odd:
        lines.append(f"compile: a space or quote in {' and '.join(odd)}, or no such folder: others are used")
    # torch heeds the CPUs that it may run on, not the quota of a cgroup
    cpus = usable_cpus()
    if "OMP_NUM_THREADS" not in env and cpus < allowed_cpus():
        changes["OMP_NUM_THREADS"] = str(cpus)
        lines.append(f"cpus: {cpus} of {allowed_cpus()} may be used at once here, so OMP_NUM_THREADS={cpus}")
    return changes, lines


def compiler_missing(env: Mapping[str, str]) -> str:
    """Why the step cannot be compiled for a CPU here, in a line; empty if it can."""
    from shutil import which
    usual = "clang++" if platform.system() == "Darwin" else "g++"
    compiler = env.get("CXX") or usual
    if not which(compiler, path=env.get("PATH")):
        return f"there is no C++ compiler ({compiler})"
    if is_odd(sys.prefix):
        return "the path of this Python has a space or quote in it"
    return ""
