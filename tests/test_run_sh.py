"""run.sh: the environment that it sets up, and the program that each of its words starts. The interpreter is
a stub that notes its arguments."""
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import wait_until

ROOT = Path(__file__).resolve().parent.parent
# python3, which makes a .venv; the stub, which is its Python and makes .venv-static
INSTALLS = 'case "$*" in "-m venv .venv") mkdir -p .venv/bin; cp bin/stub .venv/bin/python;; esac'
MAKES_STATIC = ('case "$*" in "-m venv .venv-static") mkdir -p .venv-static/bin; '
                'cp bin/stub .venv-static/bin/python;; esac')


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
    """-> (exit code, stderr, the stub's calls)"""
    (folder / "calls").unlink(missing_ok=True)
    done = subprocess.run(["bash", "run.sh", *args], cwd=folder, capture_output=True, text=True, timeout=60,
                          env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)} | env)
    calls = folder / "calls"
    calls = calls.read_text().splitlines() if calls.exists() else []
    calls = [call for call in calls if not call.endswith("-V")]    # which Python it is
    return done.returncode, done.stderr.strip(), calls


def refused(folder, words, *args, **env):
    code, err, calls = run(folder, *args, **env)
    assert code == 2 and calls == [] and len(err.splitlines()) == 1 and err.startswith("run.sh: ")
    assert all(word in err for word in words), err


def test_static_tests_run_with_a_cuda_build(folder):
    program(folder, "python3", INSTALLS)
    program(folder, "stub", f'echo "$0 $*" >> calls; {MAKES_STATIC}')
    called = run(folder, "test", "-m", "static")[2][-1]
    assert called.endswith(".venv-static/bin/python -m tools.dev.test -m static")
    assert run(folder, "test", "-k", "x")[2][-1].endswith(".venv/bin/python -m tools.dev.test -k x")
    assert run(folder, "data", "static")[2][-1].endswith(".venv/bin/python -m data.download static")


@pytest.mark.parametrize("said, words", [
    ("Python 2.7.18", ["3.11", "PYTHON=mine is Python 2.7.18"]), ("Python 3.8.18", ["3.11"]),
    ("Python 3.10.13", ["3.11"]), (None, ["PYTHON=mine is no program"])])
def test_an_interpreter_of_ones_own_that_does_not_do(said, words, folder):
    if said:
        program(folder, "mine", f'[ "$1" = -V ] && echo {said} || echo "$*" >> calls')
    refused(folder, words, "setup", PYTHON="mine")


def test_a_new_interpreter_of_ones_own(folder):
    """Whatever the driver is."""
    program(folder, "nvidia-smi", DRIVER.format("535.1"))
    program(folder, "new", '[ "$1" = -V ] && echo Python 3.14.0 || echo "$*" >> calls')
    assert run(folder, "script", PYTHON="new") == (0, "", ["-m tools.run.script"])


def test_a_home_that_cannot_be_written(folder):
    """Caches then stand beside .venv, unless told otherwise, and pip keeps none."""
    program(folder, "stub", 'echo "$MPLCONFIGDIR $UV_CACHE_DIR $PIP_NO_CACHE_DIR" >> calls')
    cache = folder / ".venv-cache"
    there = f"{cache}/matplotlib {cache}/uv 1"
    assert run(folder, "script", PYTHON="stub", HOME="/proc/nowhere")[2][-1] == there
    told = dict(MPLCONFIGDIR="a", UV_CACHE_DIR="b")
    assert run(folder, "script", PYTHON="stub", HOME="/proc/nowhere", **told)[2][-1] == "a b 1"
    assert run(folder, "script", PYTHON="stub")[2][-1].strip() == ""


def test_unsupported_python(folder):
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        program(folder, name, '[ "$1" = -V ] && echo Python 3.9.2; exit 1')
    refused(folder, ["3.11", "Python 3.9.2"], "setup")


def test_no_venv_module(folder):
    program(folder, "python3", 'case "$2" in *ensurepip*) exit 1;; esac')
    refused(folder, ["python3-venv"], "setup")


def test_an_installation_is_made_once(folder):
    program(folder, "python3", INSTALLS)
    pip, ready, imports = (f"tools/run/install.py {words}requirements.txt"
                           for words in (".venv/", "--ready ", "--imports "))
    assert run(folder, "setup") == (0, "", [pip, imports])
    assert run(folder, "setup") == (0, "", [ready])
    (folder / "requirements.txt").write_text("torch==2.13.0\nnumpy\n")
    assert run(folder, "setup")[2][-2:] == [pip, imports]
    # `static` has one of its own, with a CUDA build
    program(folder, "stub", f'echo "$*" >> calls; {MAKES_STATIC}')
    shutil.copy(folder / "bin/stub", folder / ".venv/bin/python")
    calls = run(folder, "static", "golf")[2]
    assert calls[-3:] == [pip.replace(".venv", ".venv-static"), imports, "-m tools.gpu.static golf"]
    assert (folder / ".venv-static/requirements.txt").read_text() == "torch===2.13.0\nnumpy\n"
    assert run(folder, "static")[2] == [ready, ready, "-m tools.gpu.static"]


DRIVER = 'case "$*" in *driver_version*) echo {};; *) echo "GPU 0: NVIDIA H100";; esac'


@pytest.mark.parametrize("driver, words", [
    ("575.57.08", ["driver 575.57.08", "580", "torch==2.13.0", "/whl/cu126", "PYTHON=mine/bin/python"]),
    ("470.256.02", ["driver 470.256.02", "580", "update"]), ("580.65.06", None), ("1000.1", None),
    ("[N/A]", None)])
def test_the_driver_is_compared_before_anything_is_installed(driver, words, folder):
    (folder / "requirements.txt").write_text("torch==2.13.0\n")
    program(folder, "python3", INSTALLS)
    program(folder, "nvidia-smi", DRIVER.format(driver))
    program(folder, "stub", f'echo "$*" >> calls; {MAKES_STATIC}')
    if words:
        refused(folder, words, "setup")
        assert not (folder / ".venv").exists()
        assert run(folder, "static")[0] == 0                        # needs no GPU
    else:
        assert run(folder, "setup")[0] == 0
    assert run(folder, "setup")[0] == 0                         # what is installed is not asked about again


@pytest.mark.parametrize("checkout", ["my own code", '(a)&"b"'])
def test_a_path_with_spaces_or_quotes(checkout, folder):
    """torch's compiler is called with paths that have none; nobody else's link is used."""
    home = folder / checkout
    links = folder / f"train_gpt_{os.getuid()}"
    home.mkdir()
    for name in ("run.sh", "requirements.txt", "bin"):
        shutil.move(folder / name, home)
    program(home, "python3", INSTALLS)
    program(home, "stub", 'echo "$*" >> calls; echo "$0" >> ran')
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


def test_uv_makes_the_environment_where_there_is_one(folder):
    program(folder, "python3", "exit 0")
    program(folder, "uv", 'echo "uv $*" >> calls; mkdir -p .venv/bin; cp bin/stub .venv/bin/python')
    assert run(folder, "setup") == (0, "", [
        "uv venv -q --clear --python python3 .venv", "tools/run/install.py .venv/requirements.txt",
        "tools/run/install.py --imports requirements.txt"])


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


BROKEN = {
    "its interpreter is gone": interpreter_gone,
    "no interpreter": lambda folder: shutil.rmtree(folder / ".venv/bin"),
    "an interpreter that does not run": interpreter_of_no_kind,
    "a package is gone": lambda folder: (folder / "torch").write_text("gone")}


@pytest.mark.parametrize("case", BROKEN)
def test_an_environment_that_broke_is_made_again(case, folder):
    program(folder, "python3", VENV)
    (folder / "tools/run").mkdir(parents=True)
    (folder / "tools/run/install.py").write_text(NOTED)
    (folder / "torch").write_text("there")
    words = [".venv/", "--imports ", "--ready "]
    install, imports, ready = (f"tools/run/install.py {word}requirements.txt" for word in words)
    assert run(folder, "setup") == (0, "", [install, imports])
    assert run(folder, "setup") == (0, "", [ready])
    BROKEN[case](folder)
    asked = [ready] if case == "a package is gone" else []
    assert run(folder, "setup") == (0, "", [*asked, install, imports])
    assert subprocess.run([folder / ".venv/bin/python", "-c", ""]).returncode == 0
    (folder / "torch").write_text("there")
    assert run(folder, "setup") == (0, "", [ready])


def test_an_environment_that_is_a_link(folder):
    """To a folder elsewhere it is followed; to nowhere, such as a disk that is not there, it is a
    sentence, and so is a file."""
    program(folder, "python3", INSTALLS)
    (folder / ".venv").write_text("mine")
    refused(folder, [".venv is a file"], "setup")
    (folder / ".venv").unlink()
    (folder / ".venv").symlink_to(folder / "elsewhere/venv")
    refused(folder, [f".venv is a link to nowhere ({folder}/elsewhere/venv)", "remove the link"], "setup")
    assert (folder / ".venv").is_symlink() and not (folder / "elsewhere").exists()
    (folder / "elsewhere/venv").mkdir(parents=True)
    assert run(folder, "setup")[0] == 0
    assert (folder / "elsewhere/venv/installed.txt").exists()


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


def test_git_leaves_the_ends_of_lines():
    """... of what runs and of what digests are made of, whatever core.autocrlf is."""
    for attribute, files in (
            ("eol: lf", ["run.sh", ".ci/run", "requirements.txt", "tools/run/watch.py"]),
            ("text: unset", ["docs/loss.png", "tests/golden/golf.npz", "final_model.int8.ptz"])):
        name = attribute.partition(":")[0]
        said = subprocess.check_output(["git", "check-attr", name, "--", *files], cwd=ROOT, text=True)
        assert said == "".join([f"{file}: {attribute}\n" for file in files])


# ---------------------------------------------------------------- tools/run/install.py
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
        subprocess.run([sys.executable, ROOT / "tools/run/install.py", "r.txt"], cwd=tmp_path, check=True,
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
        command = [sys.executable, ROOT / "tools/run/install.py", word, tmp_path / "r.txt"]
        done = subprocess.run(command, text=True, capture_output=True,
                              env=os.environ | dict(PYTHONPATH=str(tmp_path)))
        assert (done.returncode, done.stdout.strip()) == (1 if said else 0, said)


PIP_FAILS = "import sys\nif 'install' in sys.argv:\n    sys.exit('{}')\n"


@pytest.mark.parametrize("words, said", [
    ("OSError: No space left on device", "run.sh: the disk is full: env takes some gigabytes\n"),
    ("no route", "run.sh: requirements.txt could not be installed: is there a network? env/install.log has "
                 "the details\n")])
def test_an_install_that_fails(words, said, tmp_path):
    """... is a sentence, and what pip said is kept."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(PIP_FAILS.format(words))
    (tmp_path / "env").mkdir()
    env = dict(PATH="/usr/bin:/bin", PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, ROOT / "tools/run/install.py", "env/r.txt"], cwd=tmp_path, env=env,
                          text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert words in (tmp_path / "env/install.log").read_text()


def test_uv_installs_where_there_is_one(folder):
    """Into the environment of the interpreter that runs install.py."""
    program(folder, "uv", 'echo "$*" > calls; echo quiet')
    done = subprocess.run([sys.executable, ROOT / "tools/run/install.py", "r.txt"], cwd=folder, text=True,
                          capture_output=True, env=dict(PATH=f"{folder / 'bin'}:/usr/bin:/bin"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (folder / "calls").read_text() == f"pip install --python {sys.executable} -r r.txt\n"


@pytest.mark.parametrize("how", ["TERM", "the end of run.sh"])
def test_an_installation_ends_with_run_sh(how, folder):
    """Nothing goes on fetching gigabytes."""
    program(folder, "python3", INSTALLS)
    program(folder, "stub", f'exec {sys.executable} "$@"')
    (folder / "tools/run").mkdir(parents=True)
    shutil.copy(ROOT / "tools/run/install.py", folder / "tools/run")
    program(folder, "uv", '[ "$1" = pip ] || { mkdir -p .venv/bin; cp bin/stub .venv/bin/python; exit; }\n'
                          "echo $$ > uv; exec sleep 600")
    process = subprocess.Popen(["bash", "run.sh", "setup"], cwd=folder, stdout=subprocess.DEVNULL,
                               env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)})
    wait_until(lambda: (folder / "uv").exists() and (folder / "uv").read_text().strip())
    uv = int((folder / "uv").read_text())
    if how == "TERM":
        installer = int(Path(f"/proc/{uv}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(installer, signal.SIGTERM)
    else:
        process.kill()
    assert process.wait(60) == (130 if how == "TERM" else -9)
    cmdline = Path(f"/proc/{uv}/cmdline")       # of a zombie it is empty
    wait_until(lambda: not cmdline.exists() or not cmdline.read_bytes())


def test_help_is_the_comment_at_the_top(folder):
    done = subprocess.run(["bash", "run.sh", "--help"], cwd=folder, capture_output=True, text=True)
    assert done.stdout.count("\n") == 11 and "sp1024" in done.stdout and "PYTHON=" in done.stdout


def test_only_the_program_prints_to_stdout(folder):
    """Whatever the set-up says goes to stderr: a script is piped into a file. The exit code is the
    program's."""
    program(folder, "python3", INSTALLS)
    program(folder, "stub", 'case "$*" in *run.script*) echo "the script of $3"; exit 3;; esac')
    done = subprocess.run(["bash", "run.sh", "script", "golf"], cwd=folder, capture_output=True, text=True,
                          env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder)})
    assert (done.returncode, done.stdout) == (3, "the script of golf\n")
    assert done.stderr.startswith("setting up .venv: ")


WORDS = [   # what is typed -> what runs
    ([], "-m tools.run.launch"), (["golf", "--seed=1", "A=a b"], "-m tools.run.launch golf --seed=1 A=a b"),
    (["train"], "-m tools.run.launch train"), (["--dry-run"], "-m tools.run.launch --dry-run"),
    (["tiny", "--help"], "-m tools.run.launch tiny --help"),
    (["data"], "-m data.prepare"), (["data", "--text", "x"], "-m data.prepare --text x"),
    (["data", "sp1024", "-n", "2"], "-m data.download sp1024 -n 2"),
    (["test"], "-m tools.dev.test"), (["test", "-k", "x"], "-m tools.dev.test -k x"),
    (["bench", "golf"], "-m tools.dev.bench golf"), (["static", "golf"], "-m tools.gpu.static golf"),
    (["gpu-report", "--toy"], "-m tools.gpu.report --toy"), (["script", "golf"], "-m tools.run.script golf"),
    (["sample", "a", "b c"], "-m tools.run.sample a b c"),
    (["record", "check", "x"], "-m records.record check x"),
    (["board", "--html", "x"], "-m records.record board --html x")]


def test_each_word_is_a_program(folder):
    for typed, called in WORDS:
        assert run(folder, *typed, PYTHON="stub")[2] == [called]
        assert importlib.util.find_spec(called.split()[1])
    assert os.access(ROOT / "run.sh", os.X_OK)


def test_run_sh_knows_neither_presets_nor_flags():
    """And is short."""
    text = (ROOT / "run.sh").read_text()
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert text.count("\n") <= 150
    words = ("tiny", "golf", "speedrun", "RESUME", "=*)")
    assert not [line for line in code if any(word in line for word in words)]
