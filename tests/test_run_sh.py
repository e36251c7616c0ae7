"""run.sh: what it refuses, and what it hands on. The interpreter is a stub that notes its arguments."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLF = "data/datasets/fineweb10B_sp1024/manifest.json"
EMBEDDED = "data/datasets/embedded/manifest.json"
WATCH = "tools/watch.py stub "        # what shows a run
ASKED = "train_gpt.py --preset=gpt2 --dry-run"      # is this machine up to it?
# golf trains with a script of its recipe alone
MADE = "tools/script.py golf"
GOLF_SCRIPT = "logs/.script/golf/train_gpt.py"
GOLF_PLAN = "train_gpt.py --preset=golf --dry-run"  # the script has none
PLUS = ["tools/script.py golf_plus", "train_gpt.py --preset=golf_plus --dry-run",
        "logs/.script/golf_plus/train_gpt.py --preset=golf_plus"]


@pytest.fixture
def folder(tmp_path):
    """run.sh beside a PATH of its own: `python3`, `nvidia-smi` and `stub` are what a test makes of them."""
    shutil.copy(ROOT / "run.sh", tmp_path)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path, "stub", 'echo "$*" >> calls')
    program(tmp_path, "nvidia-smi", "exit 9")
    return tmp_path


def program(folder, name, body):
    path = folder / "bin" / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run(folder, *args, **env):
    """-> (exit code, stderr, the stub's calls, those of tools/watch.py as what it runs)"""
    (folder / "calls").unlink(missing_ok=True)
    done = subprocess.run(["bash", "run.sh", *args], cwd=folder, capture_output=True, text=True, timeout=60,
                          env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)} | env)
    calls = folder / "calls"
    calls = calls.read_text().splitlines() if calls.exists() else []
    calls = [call.removeprefix(WATCH) for call in calls if not call.endswith("-V")]    # which Python it is
    return done.returncode, done.stderr.strip(), calls


def sees_gpus(folder, count):
    """The stub's torch sees so many."""
    program(folder, "stub", f'case "$*" in *device_count*) echo {count};; *) echo "$*" >> calls;; esac')


def have(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("{}")


def refused(folder, words, *args, **env):
    code, err, calls = run(folder, *args, **env)
    assert code == 2 and calls == [] and len(err.splitlines()) == 1 and err.startswith("run.sh: ")
    assert all(word in err for word in words), err


def test_static_tests_run_with_a_cuda_build(folder):
    program(folder, "python3", 'case "$*" in *"-m venv"*) mkdir -p $3/bin; '
                               'cp bin/stub $3/bin/python;; esac')
    program(folder, "stub", 'echo "$0 $*" >> calls; case "$*" in "-m venv .venv-static") '
                            'mkdir -p .venv-static/bin; cp bin/stub .venv-static/bin/python;; esac')
    called = run(folder, "test", "-m", "static")[2][-1]
    assert called.endswith(".venv-static/bin/python -m pytest -q -m static")
    assert run(folder, "test", "-k", "x")[2][-1].endswith(".venv/bin/python -m pytest -q -k x")


def test_a_run_sorts_without_avx512_on_amd_unless_told_otherwise(folder):
    """The trainer reads it when it imports numpy; an empty one leaves numpy as it is."""
    have(folder, EMBEDDED)
    program(folder, "stub", 'echo "[$NPY_DISABLE_CPU_FEATURES] $*" >> calls')
    for vendor, given, found in (("AuthenticAMD", {}, "[AVX512F]"), ("GenuineIntel", {}, "[]"),
                                 ("AuthenticAMD", {"NPY_DISABLE_CPU_FEATURES": ""}, "[]"),
                                 ("AuthenticAMD", {"NPY_ENABLE_CPU_FEATURES": "AVX512F"}, "[]"),
                                 ("AuthenticAMD", {"NPY_DISABLE_CPU_FEATURES": "AVX2"}, "[AVX2]")):
        program(folder, "grep", f'[ "$2" = {vendor} ]')
        for words in ([], ["bench"]):
            code, err, calls = run(folder, *words, PYTHON="stub", **given)
            assert code == 0 and calls[-1].split()[0] == found, (err, calls)


@pytest.mark.parametrize("given, found", [
    ({}, "expandable_segments:True"), (dict(PYTORCH_ALLOC_CONF=""), ""),
    (dict(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), "")])
def test_memory_of_the_gpu_report_grows_in_segments_unless_told_otherwise(given, found, folder):
    program(folder, "stub", 'echo "[$PYTORCH_ALLOC_CONF] $*" >> calls')
    code, err, calls = run(folder, "gpu-report", "--toy", PYTHON="stub", **given)
    assert code == 0 and calls[-1] == f"[{found}] tools/gpu_report.py --toy", (err, calls)


def test_a_proxy_takes_one_gpu_and_the_embedded_text(folder):
    """It is trained by train_gpt.py itself; a text of one's own is left alone."""
    program(folder, "nvidia-smi", "exit 0")
    sees_gpus(folder, 8)
    calls = run(folder, "golf", "--proxy=128", PYTHON="stub")[2]
    assert calls == ["data/prepare.py", "tools/proxy.py --preset=golf --proxy=128"]
    calls = run(folder, "golf", "--proxy", "DATA_PATH=mine", PYTHON="stub")[2]
    assert calls == ["tools/proxy.py --preset=golf --proxy --data-path=mine"]


def test_no_such_interpreter(folder):
    refused(folder, ["PYTHON=nowhere"], "setup", PYTHON="nowhere")


def test_an_old_interpreter_of_ones_own(folder):
    for version in ("2.7.18", "3.8.18", "3.10.13"):
        program(folder, "old", f'[ "$1" = -V ] && echo Python {version} || echo "$*" >> calls')
        refused(folder, ["3.11", f"PYTHON=old is Python {version}"], "setup", PYTHON="old")
    program(folder, "new", '[ "$1" = -V ] && echo Python 3.14.0 || echo "$*" >> calls')
    assert run(folder, "depths", PYTHON="new") == (0, "", ["tools/depths.py"])


def test_a_home_that_cannot_be_written(folder):
    """Caches then stand beside .venv, unless told otherwise, and pip keeps none."""
    program(folder, "stub", 'echo "$MPLCONFIGDIR $UV_CACHE_DIR $PIP_NO_CACHE_DIR" >> calls')
    cache = folder / ".venv-cache"
    there = f"{cache}/matplotlib {cache}/uv 1"
    assert run(folder, "depths", PYTHON="stub", HOME="/proc/nowhere")[2][-1] == there
    told = dict(MPLCONFIGDIR="a", UV_CACHE_DIR="b")
    assert run(folder, "depths", PYTHON="stub", HOME="/proc/nowhere", **told)[2][-1] == "a b 1"
    assert run(folder, "depths", PYTHON="stub")[2][-1].strip() == ""


def test_unsupported_python(folder):
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        program(folder, name, '[ "$1" = -V ] && echo Python 3.9.2; exit 1')
    refused(folder, ["3.11", "Python 3.9.2"], "setup")


def test_no_venv_module(folder):
    program(folder, "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    refused(folder, ["python3-venv"], "setup")


def test_no_network_for_the_install(folder):
    program(folder, "python3", 'case "$*" in "-m venv .venv") mkdir -p .venv/bin; '
                               'printf "#!/bin/bash\\necho no route >&2; exit 1" > .venv/bin/python; '
                               'chmod +x .venv/bin/python;; esac')
    refused(folder, ["network", ".venv/install.log"], "setup")
    assert "no route" in (folder / ".venv/install.log").read_text()
    assert not (folder / ".venv/installed.txt").exists()


def test_an_installation_is_made_once(folder):
    program(folder, "python3", 'case "$*" in "-m venv .venv") mkdir -p .venv/bin; '
                               'cp bin/stub .venv/bin/python;; esac')
    pip, ready, imports = (f"tools/install.py {words}requirements.txt"
                           for words in (".venv/", "--ready ", "--imports "))
    assert run(folder, "setup") == (0, "", [pip, imports])
    assert run(folder, "setup") == (0, "", [ready])
    (folder / "requirements.txt").write_text("torch==2.13.0\nnumpy\n")
    assert run(folder, "setup")[2][-2:] == [pip, imports]
    # `static` has one of its own, with a CUDA build
    program(folder, "stub", 'echo "$*" >> calls; case "$*" in "-m venv .venv-static") '
                            'mkdir -p .venv-static/bin; cp bin/stub .venv-static/bin/python;; esac')
    shutil.copy(folder / "bin/stub", folder / ".venv/bin/python")
    calls = run(folder, "static", "golf")[2]
    assert calls[-3:] == [pip.replace(".venv", ".venv-static"), imports, "tools/static_gpu.py golf"]
    assert (folder / ".venv-static/requirements.txt").read_text() == "torch===2.13.0\nnumpy\n"
    assert run(folder, "static")[2] == [ready, ready, "tools/static_gpu.py"]


INSTALLS = 'case "$*" in "-m venv .venv") mkdir -p .venv/bin; cp bin/stub .venv/bin/python;; esac'
DRIVER = 'case "$*" in *driver_version*) echo {};; *) echo "GPU 0: NVIDIA H100";; esac'


@pytest.mark.parametrize("driver, words", [
    ("575.57.08", ["driver 575.57.08", "580", "torch==2.13.0", "/whl/cu126", "PYTHON=mine/bin/python"]),
    ("470.256.02", ["driver 470.256.02", "580", "update"]), ("580.65.06", None), ("1000.1", None),
    ("[N/A]", None)])
def test_the_driver_is_compared_before_anything_is_installed(driver, words, folder):
    (folder / "requirements.txt").write_text("torch==2.13.0\n")
    program(folder, "python3", INSTALLS)
    program(folder, "nvidia-smi", DRIVER.format(driver))
    program(folder, "stub", 'echo "$*" >> calls; case "$*" in "-m venv .venv-static") '
                            'mkdir -p .venv-static/bin; cp bin/stub .venv-static/bin/python;; esac')
    if words:
        refused(folder, words, "setup")
        assert not (folder / ".venv").exists()
        assert run(folder, "static")[0] == 0                        # needs no GPU
    else:
        assert run(folder, "setup")[0] == 0
    assert run(folder, "setup")[0] == 0                         # what is installed is not asked about again


def test_an_old_driver_does_not_matter_to_an_interpreter_of_ones_own(folder):
    program(folder, "nvidia-smi", DRIVER.format("535.1"))
    assert run(folder, "depths", PYTHON="stub")[0] == 0


def test_amd_s_gpus_are_counted_by_torch(folder):
    """Where its driver is, whatever nvidia-smi says."""
    have(folder, GOLF)
    sees_gpus(folder, 2)
    assert "torch.distributed" not in run(folder, "golf", PYTHON="stub", KFD="/nowhere")[2][-1]
    calls = run(folder, "golf", PYTHON="stub", KFD="/dev/null")[2]
    assert "torch.distributed.run --standalone --nproc_per_node=2" in calls[-1]


@pytest.mark.parametrize("checkout", ["my own code", "it's", 'say "a"', "(a)&b"])
def test_a_path_with_spaces_or_quotes(checkout, folder):
    """torch's compiler is called with paths that have none; nobody else's link is used."""
    home = folder / checkout
    links = folder / f"train_gpt_{os.getuid()}"
    home.mkdir()
    for name in ("run.sh", "requirements.txt", "bin"):
        shutil.move(folder / name, home)
    program(home, "python3", 'case "$*" in "-m venv .venv") mkdir -p .venv/bin; '
                             'cp bin/stub .venv/bin/python;; esac')
    program(home, "stub", 'echo "$*" >> calls; echo "$0" >> ran')
    have(home, EMBEDDED)
    (folder / "code").symlink_to(home)

    def ran(place, temporary):
        assert run(place, TMPDIR=str(temporary))[0] == 0
        return Path((home / "ran").read_text().splitlines()[-1])

    for place in (home, home, folder / "code"):
        program_path = ran(place, folder)
        assert program_path.parents[2] == links and checkout not in str(program_path)
        assert program_path.samefile(home / ".venv/bin/python") and links.stat().st_mode & 0o777 == 0o700
        assert len(list(links.iterdir())) == 1
    elsewhere = ran(home, home).parents[1]      # TMPDIR with a space
    assert elsewhere.parent == Path("/tmp", links.name)
    elsewhere.unlink()
    shutil.rmtree(links)
    links.symlink_to(home / "bin")
    assert ran(home, folder) == home / ".venv/bin/python"


def test_missing_data_is_made_then_trained_on(folder):
    """The trainer runs once: it prints the plan itself, where it is the whole file."""
    assert run(folder, PYTHON="stub") == (0, "", ["data/prepare.py", "train_gpt.py"])
    for words, env in ((["golf"], {}), (["--preset=golf"], {}), ([], {"PRESET": "golf"})):
        calls = run(folder, *words, PYTHON="stub", **env)[2]
        assert calls[0] == MADE and calls[1].startswith(GOLF_SCRIPT) and calls[1].endswith("--dry-run")
        assert calls[2] == "data/download.py sp1024 -n 80"
    assert run(folder, "golf_plus", PYTHON="stub")[2][:3] == [
        PLUS[0], PLUS[2] + " --dry-run", "data/download.py sp8192 -n 128"]
    for preset, source in (("gpt2", "fineweb-edu"), ("gpt2_plus", "climbmix")):
        fetched = [f"data/download.py {source}", "data/download.py core"]
        assert run(folder, preset, PYTHON="stub")[2][1:3] == fetched
    have(folder, EMBEDDED, GOLF, "data/datasets/climbmix/manifest.json", "data/core_bundle/core.yaml")
    have(folder, "data/datasets/fineweb_edu/manifest.json", "data/datasets/fineweb10B_sp8192/manifest.json")
    for args in ((), ("golf",), ("golf_plus",), ("gpt2",), ("gpt2_plus",)):
        calls = run(folder, *args, PYTHON="stub", DEVICE="cpu")[2]
        if args == ("golf",):
            assert calls == [MADE, GOLF_PLAN, f"{GOLF_SCRIPT} --preset=golf"]
        elif args == ("golf_plus",):
            assert calls == PLUS
        else:
            assert len(calls) == 1 and calls[0].startswith("train_gpt.py")


def test_a_word_that_is_no_preset_is_refused_once(folder):
    program(folder, "stub", 'echo "$*" >> calls; echo "train_gpt: no preset" >&2; exit 2')
    code, err, calls = run(folder, "bord", PYTHON="stub")
    assert (code, err, len(calls)) == (2, "train_gpt: no preset\nrun.sh: ./run.sh help lists its commands", 1)


def test_a_game_for_gpus_is_refused_before_its_data_are_fetched(folder):
    program(folder, "stub", 'echo "$*" >> calls; case "$*" in *--dry-run) echo "machine: takes a GPU";; esac')
    code, err, calls = run(folder, "gpt2", PYTHON="stub")
    assert (code, err, calls) == (2, "run.sh: takes a GPU", [ASKED])
    assert run(folder, "gpt2", "DEVICE=cpu", PYTHON="stub")[2][0] == "data/download.py fineweb-edu"
    program(folder, "nvidia-smi", "echo 'GPU 0: x'")
    program(folder, "stub", 'case "$*" in *device_count*) echo 1;; *) echo "$*" >> calls;; esac')
    assert run(folder, "gpt2", PYTHON="stub")[2][0] == "data/download.py fineweb-edu"


def test_own_data_is_not_prepared(folder):
    mine = "train_gpt.py --data-path=data/datasets/mine"
    assert run(folder, "DATA_PATH=data/datasets/mine", PYTHON="stub")[2] == [mine]
    assert run(folder, PYTHON="stub", DATA_PATH="data/datasets/mine")[2] == ["train_gpt.py"]


@pytest.mark.parametrize("flag", ["--dry-run", "DRY_RUN=1", "--dry-run=True", "--help"])
def test_a_plan_needs_no_data(folder, flag):
    code, _, calls = run(folder, "gpt2", flag, PYTHON="stub")
    assert code == 0 and len(calls) == 1 and calls[0].startswith("train_gpt.py --preset=gpt2 --")


def test_a_plan_by_the_environment(folder):
    assert run(folder, "gpt2", PYTHON="stub", DRY_RUN="1")[2] == ["train_gpt.py --preset=gpt2"]
    fetches = "data/download.py fineweb-edu"
    assert run(folder, "gpt2", "--device=cpu", PYTHON="stub", DRY_RUN="0")[2][0] == fetches
    assert run(folder, "gpt2", "--device=cpu", "--dry-run=0", PYTHON="stub")[2][0] == fetches


def test_a_resumed_run_keeps_its_preset(folder):
    """Its script and its GPUs, whatever the command says; no data are fetched. A proxy stays on one GPU."""
    have(folder, "logs/old/train.log")
    program(folder, "nvidia-smi", "echo 'GPU 0: x'; echo 'GPU 1: x'")
    sees_gpus(folder, 2)
    log = folder / "logs/old/train.log"
    log.write_text("a script\nconfig preset=golf\nconfig seed=1\nconfig preset=tiny\n")
    launched = f"-m torch.distributed.run --standalone --nproc_per_node=2 {GOLF_SCRIPT}"
    assert run(folder, PYTHON="stub", RESUME="old")[2] == [MADE, f"{GOLF_SCRIPT} --dry-run", launched]
    assert run(folder, "--resume=old", PYTHON="stub")[2][-1] == f"{launched} --resume=old"
    (folder / "train_gpt.py").write_text("whole")
    (folder / "logs/old/train_gpt.py").write_text("whole")
    calls = run(folder, PYTHON="stub", RESUME="old")[2]
    assert calls == ["train_gpt.py --dry-run", launched.replace(GOLF_SCRIPT, "train_gpt.py")]
    log.write_text("config preset=speedrun\nconfig device=cpu\n")
    assert run(folder, PYTHON="stub", RESUME="old")[2] == ["train_gpt.py"]
    log.write_text("proxy model_dim=32: the width\nconfig preset=golf\n")
    assert run(folder, PYTHON="stub", RESUME="old")[2] == ["train_gpt.py"]
    assert run(folder, PYTHON="stub", RESUME="none")[2] == ["train_gpt.py"]


def test_a_preset_trains_by_a_script_of_its_recipe_where_that_is_asked_for(folder):
    """A resumed run goes on with what it began with; plans are those of the whole file, as proxies are."""
    have(folder, EMBEDDED, "logs/old/train_gpt.py")
    made = "tools/script.py tiny"
    plan = "train_gpt.py --dry-run"
    own = "logs/.script/tiny/train_gpt.py"
    assert run(folder, "--script", PYTHON="stub") == (0, "", [made, plan, own])
    calls = run(folder, "tiny", "--script", "MATRIX_LR=0.02", PYTHON="stub")[2]
    flags = "--preset=tiny --matrix-lr=0.02"
    assert calls == [made, f"train_gpt.py {flags} --dry-run", f"{own} {flags}"]
    assert run(folder, "--script", "--dry-run", PYTHON="stub")[2] == ["train_gpt.py --dry-run"]
    refused(folder, ["--script", "proxies"], "speedrun", "--script", "--proxy=64", PYTHON="stub")
    for first, calls in (("the recipe tiny alone, made by `./run.sh script tiny`.", [made, own]),
                         ("train a GPT", ["train_gpt.py"])):
        (folder / "logs/old/train_gpt.py").write_text(f'"""train_gpt: {first}\n')
        assert run(folder, PYTHON="stub", RESUME="old")[2] == calls


def test_data_that_cannot_be_made_end_it(folder):
    program(folder, "stub", 'echo "$*" >> calls; exit 4')
    assert run(folder, PYTHON="stub") == (4, "", ["data/prepare.py"])


def test_settings_become_flags(folder):
    have(folder, EMBEDDED)
    calls = run(folder, "tiny", "MATRIX_LR=0.02", "SAMPLE=a b=c", "--compile", PYTHON="stub")[2]
    assert calls[-1] == "train_gpt.py --preset=tiny --matrix-lr=0.02 --sample=a b=c --compile"


def test_every_gpu_is_used(folder):
    """But one for tiny, whose step is one row."""
    have(folder, EMBEDDED, GOLF)
    program(folder, "nvidia-smi", "echo 'GPU 0: x'; echo 'GPU 1: x'; echo 'GPU 2: x'")
    launched = "-m torch.distributed.run --standalone --nproc_per_node={} " + GOLF_SCRIPT + " --preset=golf"
    for seen, visible in ((3, {}), (2, dict(CUDA_VISIBLE_DEVICES="GPU-5ab1,GPU-77c0")), (1, {}), (0, {})):
        sees_gpus(folder, seen)
        assert run(folder, "golf", PYTHON="stub", **visible)[2][-1] == (
            launched.format(seen) if seen > 1 else f"{GOLF_SCRIPT} --preset=golf")
        assert run(folder, PYTHON="stub", **visible)[2][-1] == "train_gpt.py"
    sees_gpus(folder, 3)
    calls = run(folder, "golf", "--device=cpu", PYTHON="stub")[2]
    assert calls[0] == MADE and calls[2:] == [f"{GOLF_SCRIPT} --preset=golf --device=cpu"]


def test_what_cannot_be_fetched(folder):
    """Without data there is no run; without CORE's tasks there is one."""
    program(folder, "stub", 'echo "$*" >> calls; case "$*" in *fineweb-edu) exit 3;; *core) exit 1;; esac')
    assert run(folder, "gpt2", PYTHON="stub") == (3, "", [ASKED, "data/download.py fineweb-edu"])
    have(folder, "data/datasets/fineweb_edu/manifest.json")
    code, _, calls = run(folder, "gpt2", PYTHON="stub")
    assert code == 0 and calls[1] == "data/download.py core" and calls[-1] == "train_gpt.py --preset=gpt2"


def test_a_run_is_watched_a_plan_is_not(folder):
    have(folder, EMBEDDED)
    program(folder, "stub", 'echo "$LOGGER|$*" >> calls')
    calls = run(folder, "LOGGER=wandb", "--seed=1", PYTHON="stub")[2]
    assert calls == [f"wandb|{WATCH}train_gpt.py --seed=1"]
    assert run(folder, "--dry-run", PYTHON="stub")[2] == ["|train_gpt.py --dry-run"]


def test_uv_installs_where_there_is_one(folder):
    program(folder, "python3", "exit 0")
    program(folder, "uv", 'echo "uv $*" >> calls; [ "$1" != venv ] || { mkdir -p .venv/bin; '
                          'cp bin/stub .venv/bin/python; }')
    assert run(folder, "setup") == (0, "", [
        "uv venv -q --clear --python python3 .venv",
        "uv pip install --python .venv/bin/python -r .venv/requirements.txt",
        "tools/install.py --imports requirements.txt"])


# Python's own venv, without pip; what is called in it is noted
VENV = f"""case "$*" in "-m venv"*) shift 2; exec {sys.executable} -m venv --without-pip "$@";;
*) exec {sys.executable} "$@";; esac"""
NOTED = """import sys
with open("calls", "a") as file:
    print(*sys.argv, file=file)
sys.exit("--ready" in sys.argv and open("torch").read() == "gone")
"""


def interpreter_gone(folder):
    for path in folder.glob(".venv/bin/python*"):
        path.unlink()
        path.symlink_to("/nonexistent/python3.11")


def interpreter_of_no_kind(folder):
    path = folder / ".venv/bin/python"
    path.unlink()       # a link to the machine's own
    path.write_text("no program")
    path.chmod(0o755)


def folder_is_a_dangling_link(folder):
    shutil.rmtree(folder / ".venv")
    (folder / ".venv").symlink_to(folder / "elsewhere")


BROKEN = {
    "its interpreter is gone": interpreter_gone,
    "no interpreter": lambda folder: shutil.rmtree(folder / ".venv/bin"),
    "an interpreter that does not run": interpreter_of_no_kind,
    "a link to nowhere": folder_is_a_dangling_link,
    "a package is gone": lambda folder: (folder / "torch").write_text("gone")}


@pytest.mark.parametrize("case", BROKEN)
def test_an_environment_that_broke_is_made_again(case, folder):
    program(folder, "python3", VENV)
    (folder / "tools").mkdir()
    (folder / "tools/install.py").write_text(NOTED)
    (folder / "torch").write_text("there")
    words = [".venv/", "--imports ", "--ready "]
    install, imports, ready = (f"tools/install.py {word}requirements.txt" for word in words)
    assert run(folder, "setup") == (0, "", [install, imports])
    assert run(folder, "setup") == (0, "", [ready])
    BROKEN[case](folder)
    asked = [ready] if case == "a package is gone" else []
    assert run(folder, "setup") == (0, "", [*asked, install, imports])
    assert subprocess.run([folder / ".venv/bin/python", "-c", ""]).returncode == 0
    (folder / "torch").write_text("there")
    assert run(folder, "setup") == (0, "", [ready])


def test_a_file_in_the_environments_place(folder):
    program(folder, "python3", VENV)
    (folder / ".venv").write_text("mine")
    refused(folder, [".venv is a file"], "setup")
    assert (folder / ".venv").read_text() == "mine"


def test_an_installation_without_its_packages_is_no_success(folder):
    """Whatever pip said."""
    program(folder, "python3", INSTALLS)
    program(folder, "stub", 'case "$*" in *--imports*) echo "torch is missing"; exit 1;; esac')
    for _ in range(2):
        refused(folder, ["pip has ended, but in .venv torch is missing", ".venv/install.log"], "setup")
        assert not (folder / ".venv/installed.txt").exists()


def links_to(folder):
    """Ways to call run.sh from a folder beside the checkout: words, and the environment."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/train").symlink_to("../run.sh")
    (folder / "elsewhere/again").symlink_to("train")
    (folder / "elsewhere/to folder").symlink_to(folder)
    (folder / "decoy" / folder.name).mkdir(parents=True)
    return [(["bash", "train"], {}), (["bash", "./again"], {}), (["./train"], {}),
            (["bash", "to folder/run.sh"], {}), (["bash", f"../../{folder.name}/run.sh"], {}),
            (["bash", f"{folder.name}/run.sh"], dict(CDPATH=str(folder / "decoy")))]


def test_set_up_is_in_the_checkout_however_it_is_called(folder):
    """By links, from elsewhere, with a CDPATH that leads to a folder of the same name."""
    program(folder, "python3", INSTALLS)
    (folder / "run.sh").chmod(0o755)
    for words, env in links_to(folder):
        shutil.rmtree(folder / ".venv", ignore_errors=True)
        place = folder.parent if "CDPATH" in env else folder / "elsewhere"
        env |= {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
        done = subprocess.run([*words, "setup"], cwd=place, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert (folder / ".venv/installed.txt").read_text() == "torch\n", words
        assert not [path for path in folder.glob("[de]*/**/.venv") if "to folder" not in str(path)]


def test_a_copy_outside_of_the_checkout_is_refused(folder):
    (folder / "requirements.txt").unlink()
    program(folder, "python3", INSTALLS)
    refused(folder, ["requirements.txt", "checkout"], "setup")
    assert not (folder / ".venv").exists()


@pytest.mark.skipif(not shutil.which("git"), reason="takes git")
@pytest.mark.parametrize("setting", ["core.autocrlf=true", "core.eol=crlf", "core.autocrlf=input"])
def test_a_clone_has_the_same_bytes(setting, tmp_path):
    """... of what runs and of what digests are made of, however git is set up."""
    source = tmp_path / "source"
    clone = tmp_path / "clone"
    files = ["run.sh", ".gitattributes", "requirements.txt", "docs/loss.png", "tests/golden/golf.npz",
             ".ci/run", "records/track_tiny/2026-11-21_Baseline/final_model.int8.ptz", "tools/watch.py"]
    for file in files:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    subprocess.run(["git", "clone", "-q", "-c", setting, str(source), str(clone)], check=True)
    assert [file for file in files if (clone / file).read_bytes() != (ROOT / file).read_bytes()] == []
    assert subprocess.run(["./run.sh", "help"], cwd=clone, capture_output=True).returncode == 0


# ---------------------------------------------------------------- tools/install.py
PIP = """
import json, os, sys
if sys.argv[1:] == ["config", "list"]:
    print(open("pip.conf").read())
else:
    settings = {name: text for name, text in os.environ.items() if name.upper().startswith("PIP_")}
    json.dump([sys.argv[1:], settings], open("pip.json", "w"))
"""


@pytest.fixture
def pip(tmp_path):
    """pip(configuration, variables): the words and settings that install.py calls pip with."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(PIP)

    def called(configuration="", **variables):
        (tmp_path / "pip.conf").write_text(configuration)
        env = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
        subprocess.run([sys.executable, ROOT / "tools/install.py", "r.txt"], cwd=tmp_path, check=True,
                       env=env | variables | dict(PYTHONPATH=str(tmp_path)))
        return json.loads((tmp_path / "pip.json").read_text())
    return called


NOT_HEEDED = dict(
    PIP_TARGET="x", PIP_PREFIX="x", PIP_ROOT="x", PIP_USER="1", PIP_REQUIRE_VIRTUALENV="1", PIP_NO_DEPS="1",
    PIP_ONLY_BINARY=":none:", PIP_NO_BINARY=":all:", PIP_DRY_RUN="1", PIP_CONSTRAINT="none.txt",
    PIP_REQUIRE_HASHES="1", PIP_HELP="1", PIP_PYTHON="python2", PIP_QUIET="3", pip_target="x", PIP_target="x")


def test_settings_of_pip_that_lead_elsewhere_are_dropped(pip):
    words, settings = pip(**NOT_HEEDED)
    assert words == ["install", "--disable-pip-version-check", "-r", "r.txt"]
    assert settings == dict(PIP_CONFIG_FILE=os.devnull)
    files = "global.require-virtualenv='true'\ninstall.target='x'\ninstall.user='true'\nglobal.no-deps='1'"
    assert pip(files)[1] == dict(PIP_CONFIG_FILE=os.devnull)


def test_settings_of_pip_that_reach_packages_are_heeded(pip):
    """A proxy, a mirror, certificates: by variables before files, by `install` before global ones."""
    variables = dict(PIP_INDEX_URL="https://a/simple", PIP_CERT="/a b.pem", PIP_FIND_LINKS="wheels",
                     PIP_NO_INDEX="1", PIP_PROXY="http://p:1", HTTPS_PROXY="http://p:1",
                     PIP_EXTRA_INDEX_URL="https://b https://c")
    heeded = {name: text for name, text in variables.items() if name.startswith("PIP_")}
    assert pip(**variables, PIP_USER="1")[1] == heeded | dict(PIP_CONFIG_FILE=os.devnull)
    files = ("global.extra-index-url='https://b\\nhttps://c'\nglobal.index-url='https://g'\n"
             "global.timeout='60'\ninstall.index-url='https://i'\nwheel.proxy='http://no'\nnonsense")
    found = dict(PIP_EXTRA_INDEX_URL="https://b https://c", PIP_TIMEOUT="60", PIP_CONFIG_FILE=os.devnull)
    assert pip(files)[1] == found | dict(PIP_INDEX_URL="https://i")
    assert pip(files, PIP_INDEX_URL="https://e")[1] == found | dict(PIP_INDEX_URL="https://e")


@pytest.mark.parametrize("wanted, ready, imports", [
    ("numpy==2.3.5\n# a comment\npytest-xdist==3\nPyYAML===1\n", "", ""),
    ("numpy\nno-such-package==1\n", "no_such_package is missing", "no_such_package is missing"),
    ("emptied==1", "emptied is missing", "emptied is missing"),
    ("damaged==1", "", "damaged cannot be imported (OSError: libcudart.so is cut and more)")])
def test_ready_is_what_can_be_imported(wanted, ready, imports, tmp_path):
    (tmp_path / "emptied").mkdir()
    (tmp_path / "damaged.py").write_text("raise OSError('libcudart.so is cut\\nand more')")
    (tmp_path / "r.txt").write_text(wanted)
    for word, said in (("--ready", ready), ("--imports", imports)):
        command = [sys.executable, ROOT / "tools/install.py", word, tmp_path / "r.txt"]
        done = subprocess.run(command, text=True, capture_output=True,
                              env=os.environ | dict(PYTHONPATH=str(tmp_path)))
        assert (done.returncode, done.stdout.strip()) == (1 if said else 0, said)


def test_no_room_for_the_install(folder):
    program(folder, "python3", "exit 0")
    program(folder, "uv", '[ "$1" = venv ] && mkdir -p .venv/bin || { echo No space left on it; exit 1; }')
    refused(folder, ["disk is full"], "setup")
    program(folder, "uv", "exit 1")
    refused(folder, ["could not create .venv"], "setup")


def test_help_names_the_data(folder):
    done = subprocess.run(["bash", "run.sh", "--help"], cwd=folder, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    words = "sp1024", "climbmix", "core", "depths", "gpu-report", "PYTHON="
    assert len(lines) == 11 and all(word in done.stdout for word in words)


@pytest.mark.parametrize("code", [1, 2])
def test_the_exit_code_is_the_trainers(folder, code):
    have(folder, EMBEDDED)
    program(folder, "stub", f'echo "$*" >> calls; exit {code}')
    assert run(folder, PYTHON="stub") == (code, "", ["train_gpt.py"])


def test_a_refusal_comes_before_torchrun(folder):
    """Torchrun would make another exit code of it. On the way the plan is printed only if the run itself has
    none."""
    have(folder, GOLF, EMBEDDED)
    program(folder, "nvidia-smi", "echo 'GPU 0: x'; echo 'GPU 1: x'")
    two = 'case "$*" in *device_count*) echo 2; exit;; esac; '
    program(folder, "stub", two + 'echo "$*" >> calls; echo a plan; case "$*" in *--dry-run) exit 2;; esac')
    assert run(folder, "golf", PYTHON="stub") == (2, "", [MADE, GOLF_PLAN])
    refused = ["train_gpt.py --preset=speedrun --data-path=x --dry-run"]
    assert run(folder, "speedrun", "--data-path=x", PYTHON="stub") == (2, "", refused)
    program(folder, "stub", two + 'case "$*" in *script.py*) ;; *--dry-run) echo a plan ;; *) echo a run ;; '
                                  'esac')
    for words, printed in ((["golf"], "a plan\na run\n"), (["speedrun", "--data-path=x"], "a run\n")):
        done = subprocess.run(["bash", "run.sh", *words], cwd=folder, capture_output=True, text=True,
                              timeout=60, env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHON": "stub"})
        assert (done.returncode, done.stdout) == (0, printed)


def test_a_script_is_all_that_is_printed(folder):
    """Whatever the set-up says goes to stderr. One that cannot be made is no run."""
    program(folder, "stub", 'echo "the script of $2"')
    done = subprocess.run(["bash", "run.sh", "script", "golf"], cwd=folder, capture_output=True, text=True,
                          env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHON": "stub"})
    assert (done.returncode, done.stdout) == (0, "the script of golf\n")
    program(folder, "stub", 'echo "$*" >> calls; case "$*" in *script.py*) exit 1;; esac')
    code, err, calls = run(folder, "golf", PYTHON="stub")
    assert code == 2 and "the script of golf could not be made" in err and calls == [MADE]


def test_the_other_commands(folder):
    assert run(folder, "data", "--text", "x", PYTHON="stub")[2] == ["data/prepare.py --text x"]
    assert run(folder, "data", "sp1024", PYTHON="stub")[2] == ["data/download.py sp1024"]
    assert run(folder, "test", "-k", "x", PYTHON="stub")[2] == ["-m pytest -q -k x"]
    asked = "-c import xdist"
    called = "-m pytest -q -n 2 --dist worksteal"
    assert run(folder, "test", PYTHON="stub")[2] == [asked, called]
    assert run(folder, "test", "quick", PYTHON="stub")[2] == [asked, f"{called} -m quick and not slow"]
    program(folder, "stub", 'echo "$*" >> calls; [ "$1" != -c ]')     # a user's own, without it
    assert run(folder, "test", PYTHON="stub")[2] == [asked, "-m pytest -q"]
    assert run(folder, "bench", PYTHON="stub")[2] == ["tools/bench.py"]
    assert run(folder, "static", "golf", PYTHON="stub")[2] == ["tools/static_gpu.py golf"]
    assert run(folder, "record", "check", "x", PYTHON="stub")[2] == ["records/record.py check x"]
    assert run(folder, "board", "--html", "x", PYTHON="stub")[2] == ["records/record.py board --html x"]
    assert os.access(ROOT / "run.sh", os.X_OK)
