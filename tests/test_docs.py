"""README and docs/: every command in them runs, at small size, in a copy of the repository whose path has a
space; their links lead somewhere."""
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml

import fork_server
import train_gpt
from helpers import ROOT, TOY, free_port, slow

BY_HEADING = ("README.md", "docs/running.md")
PAGES = [*BY_HEADING, "docs/first_change.md", "docs/own_text.md", "docs/first_gpu.md"]
NOWHERE = "http://127.0.0.1:9"
SMALL = TOY | dict(OMP_NUM_THREADS="1", ITERATIONS="4", VAL_TOKENS="1024", SAMPLE_TOKENS="2",
                   TRAIN_BATCH_TOKENS="256", COUNT_ORDERS="2", COUNT_WORDS="0")
SMALL |= dict(HF_ENDPOINT=NOWHERE, CORE_BUNDLE_URL=NOWHERE, GPT2_VOCAB_URL=NOWHERE)


# What stands for something else, or is too large: a pattern and what it becomes
INSTEAD = [
    (r"git clone <this repository> train_gpt", f"git clone -q '{ROOT}' train_gpt"),
    (r"<run_id>|\bRUN\b", "first"), (r"logs/first …", "logs/alone"), (r"\bPATH\b", "tests"),
    (r"--nproc_per_node=8", "--nproc_per_node=2"), (r"--nnodes=2", "--nnodes=1"),
    (r"\bHOST:29500", f"localhost:{free_port()}"),
    (r"-n [35]\b", "-n 2"), (r"--iterations=100\b", "--iterations=4"), (r"\bITERATIONS=100", "ITERATIONS=4"),
    (r"--vocab-size 2048", "--vocab-size 400"), (r"\.venv/lib/python3\*/site-packages/matplotlib", "tests"),
    # the toy text is not the boards', so its scores compare with no record's
    (r"record new\b", "record new --before none"),
    # the record that was just made; test_record.py checks those of the repository
    (r"records/track_tiny/\S+_Baseline", "records/track_tiny/*_MyChange"),
    (r"VOCAB_SIZE=1024 ", "VOCAB_SIZE=512 "), (r"data/datasets/embedded", "data/datasets/toy"),
    # the same run as the line above it: its plan
    (r"run\.sh --matrix-lr=0\.02$", "run.sh --matrix-lr=0.02 --dry-run"),
    (r"--depth=4", "--depth=1"), (r"NUM_ITERATIONS=120", "NUM_ITERATIONS=2"),
    # a game's own shapes do not fit the toy data: its plan
    (r"(run\.sh (?:golf|speedrun|gpt2(?! --depth))\b.*)$", r"\1 --dry-run"),
    (r"torchrun .* train_gpt\.py --preset=(\w+)$", r"python -m tools.run.preflight --preset=\1 --dry-run"),
    # what starts no processes of its own: programs are forks here
    (r"run\.sh test\b(.*?)( -n \d)?$", r"run.sh test\1 --collect-only tests/test_gpu.py"),
    (r"run\.sh static .*", "run.sh static --help"),
    (r"run\.sh gpu-report.*", "run.sh gpu-report --help"), (r"run\.sh bench .*", "run.sh bench --help")]
NETWORK = re.compile(r"run\.sh data (?:sp1024|sp8192|gpt2|fineweb-edu|climbmix|core)\b")
# What a run needs that some command asks for by a name
BEFORE = [("first", "RUN_ID=first ./run.sh"),
          ("logs/alone", "RUN_ID=alone MATRIX_LR=0.0123 ./run.sh --script")]


def commands_in(text):
    """The commands of a part of a page: of its blocks marked sh, and those in the second column of tables."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    for row in re.findall(r"^\| \d+ \| (.*?) \|", text, re.M):
        lines += re.findall(r"`(\./run\.sh [^`]*)`", row)
    return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]


LONG = ("README.md Is it better, or luck?", "README.md Stop and resume", "docs/running.md The large presets",
        "docs/own_text.md Your own text", "docs/first_change.md Your first change",
        "docs/first_gpu.md The first run on rented GPUs")


def parts():
    """(page, heading, commands): README and running.md by their headings, which need nothing of each other; a
    tutorial as a whole."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for part in re.split(r"^## ", text, flags=re.M) if page in BY_HEADING else [text]:
            if commands := commands_in(part):
                name = f"{page} {part.splitlines()[0].strip('# ')}"
                found.append((slow if name in LONG else pytest.param)(commands, id=name))
    return found


@pytest.fixture(scope="module")
def home(tiny_data, tmp_path_factory):
    """A copy of the repository with the toy data, and `python`, `torchrun` and .venv of this interpreter."""
    home = tmp_path_factory.mktemp("a path") / "train gpt"
    skip = shutil.ignore_patterns(".git", ".venv*", "logs", "datasets", "tokenizers", "__pycache__", "golden",
                                  "shared", "*.html")
    shutil.copytree(ROOT, home, ignore=skip)
    (home / ".git").symlink_to(ROOT / ".git")       # whose commits hold the scripts of records
    shutil.copytree(tiny_data / "data", home / "data", dirs_exist_ok=True)
    shutil.copy(home / "data/tokenizers/toy.model", home / "data/tokenizers/embedded.model")
    (home / ".venv/bin").mkdir(parents=True)
    python = fork_server.start()
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        (home / ".venv/bin" / name).write_text(f'#!/bin/sh\nexec "{python}" {words}"$@"\n')
        (home / ".venv/bin" / name).chmod(0o755)
    (home / ".venv/bin/activate").write_text(f'PATH="{home}/.venv/bin:$PATH"\n')
    return home


def run(home, command, settings=SMALL):
    """In bash. Only plain `./run.sh` draws its picture, which takes longer than the rest of a toy run."""
    if not re.match(r"\./run\.sh( record (plot|new|check)\b.*| board\b.*)?$", command):
        settings = settings | {"PICTURE": "0"}
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    clean["PATH"] = f"{home}/.venv/bin:{clean['PATH']}"
    return subprocess.run(["bash", "-c", command], cwd=home, capture_output=True, text=True, timeout=300,
                          errors="replace", env=clean | settings | {"PYTHON": fork_server.start()})


def small(command):
    for pattern, other in INSTEAD:
        command = re.sub(pattern, other, command)
    if command.startswith("./run.sh gpt2 --depth"):
        command += " DEPTH=1"
    return command


def resumable(home, run_id):
    """A run that was stopped, for RESUME."""
    done = run(home, f"RUN_ID={run_id} SAVE_EVERY=2 FAULT=term@step:3 .venv/bin/python tests/inject.py")
    assert "RESUME=" in done.stderr, done.stderr


@pytest.mark.parametrize("commands", parts())
def test_the_commands_of_a_page(home, commands):
    for trial in (home / "logs").glob("trial_*"):      # of the page before
        shutil.rmtree(trial)
    for command in commands:
        command = small(command)
        for name, first in BEFORE:
            if name in command and not (home / "logs" / name.removeprefix("logs/")).exists():
                assert run(home, first).returncode == 0
        if command.startswith("RESUME="):
            resumable(home, "stopped")
            command = command.replace("first", "stopped")
        # A resumed run has its constants from the checkpoint, a plan those of its game
        settings = SMALL
        if command == "./run.sh" and not (home / "logs/first").exists():
            settings = SMALL | {"RUN_ID": "first"}
        if command.startswith("./run.sh gpt2 --depth"):     # without what tiny alone has
            own = constants_of(train_gpt.RECIPES["gpt2"])
            tiny = constants_of(train_gpt.RECIPES["tiny"])
            settings = {name: text for name, text in SMALL.items()
                        if name.lower() in own or name.lower() not in tiny}
        if "RESUME" in command or "--dry-run" in command:
            settings = {"OMP_NUM_THREADS": "1", "DEVICE": "cpu"}
        done = run(home, command, settings)
        said = done.stdout[-2000:] + done.stderr[-2000:]
        if NETWORK.search(command):     # there is none here: as far as that, not refused
            assert done.returncode == 1 and "refused" in said.splitlines()[-1], (command, said)
        elif "record check " in command:    # as the record in the repository, or with rules that fail
            assert done.returncode in (0, 1) and "fail" in said.splitlines()[-1], (command, said)
        else:
            assert done.returncode == 0, (command, said)
            assert "Traceback" not in said, (command, said)


def anchors_of(text):
    """The anchors that a page's headings get on GitHub."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^ *```.*?^ *```", "", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """Links of a page to files that are not there, or to headings that their page does not have."""
    text = page.read_text(encoding="utf-8")
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?m)^\[\w+\]: (\S+)$", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or anchor and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            found.append(link)
    return found


def test_links_lead_somewhere(tmp_path):
    pages = [path for pattern in ("*.md", "docs/**/*.md", "records/**/*.md", ".github/**/*.md")
             for path in ROOT.glob(pattern)]
    assert {page: broken_links(page) for page in pages if broken_links(page)} == {}
    planted = tmp_path / "page.md"
    planted.write_text("# A b: c\n[x](page.md#a-b-c) [y](#a-b-c) [z](gone.md) [w](page.md#a-b)\n[v]: #b\n")
    assert broken_links(planted) == ["gone.md", "page.md#a-b", "#b"]


def test_a_page_selects_tests_that_exist():
    """`./run.sh test FILE -k WORD` on any page: pytest exits 5 where no test of FILE has WORD in its name."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "records/README.md"]
    text = "\n".join([page.read_text(encoding="utf-8") for page in pages])
    found = re.findall(r"run\.sh test (tests/\S+\.py) -k (\w+)", text)
    assert found
    for file, word in found:
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def test_\w*{word}", tests, re.M), f"{file} -k {word}"


def test_forms_and_workflow_of_github():
    """GitHub can read them, and CI runs what .ci/run runs."""
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert ci["jobs"]["test"]["steps"][-1] == {"run": ".ci/run"} and os.access(ROOT / ".ci/run", os.X_OK)
    for form in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"):
        yaml.safe_load(form.read_text(encoding="utf-8"))


def constants_of(recipe):
    """{name, also the second one of a constant: its field} of a recipe."""
    own = {field.name: field for field in train_gpt.fields(recipe)}
    return own | {alias: own[name] for name, alias in recipe.aliases.items()}


def takes(preset, name, text):
    """Is it a value that the recipe's constant may have, with whatever else?"""
    recipe = train_gpt.RECIPES[preset]()
    field = constants_of(recipe)[name.lower()]
    try:
        train_gpt.check_ranges(replace(recipe, **{field.name: train_gpt.parse_value(field, text)}))
    except train_gpt.Refused:
        return False
    return True


@pytest.mark.parametrize("page", [*PAGES, "records/README.md"])
def test_constants_that_a_page_names_take_the_values_it_gives(page):
    """MATRIX_LR=0.02 and --depth=4; what stands for something is in <> or $."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"\b([A-Z][A-Z0-9_]+)=([^\s`'\"|)$<]+)", text)
    found += [(name.upper().replace("-", "_"), value)
              for name, value in re.findall(r"--([a-z][a-z-]+)=([^\s`'\"|)$<]+)", text)]
    for name, value in found:
        owners = [preset for preset, recipe in train_gpt.RECIPES.items()
                  if name.lower() in constants_of(recipe)]
        taken = [preset for preset in owners if takes(preset, name, value.strip(",.:;"))]
        assert taken or not owners, f"{name}={value}"
