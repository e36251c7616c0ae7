"""Scripts by commit and preset: which commit holds the script of a run, whole or as `./run.sh script PRESET`
makes it, and two scripts of one kind, whose difference a record shows.

There are whole files, which hold a registry of recipes; what the tool makes of one, with a single recipe; and
older whole files, which have no registry, so that no tool makes anything of them.
"""
import functools
import io
import re
import subprocess
import sys
import tarfile
import tempfile

from records.verify.folders import ROOT, Folder, LeftOut

UNKNOWN = "not committed"       # in place of a commit
TOOL = ("tools/run/script.py", "tools/script.py")       # what makes a script, and where older commits have it


def git(*words: str) -> bytes:
    """stdout of a git command in this repository; nothing where it fails or git is not there."""
    try:
        return subprocess.run(["git", *words], capture_output=True, cwd=ROOT).stdout
    except FileNotFoundError:
        return b""


def has_one_recipe(script: bytes) -> bool:
    """Does a script's registry hold a single recipe? Older ones have none."""
    registry = re.search(rb"(?ms)^RECIPES = dict\((.*?)\)", script)
    return bool(registry) and registry[1].count(b"=") == 1


@functools.cache
def made_at(commit: str, preset: str) -> bytes:
    """What `./run.sh script PRESET` prints at a commit; b"" where this repository lacks the commit, or the
    commit lacks the tool or the preset."""
    tool = next((path for path in TOOL if git("cat-file", "-t", f"{commit}:{path}")), None)
    if tool is None:
        return b""
    archive = git("archive", "--format=tar", commit, "train_gpt.py", "tools")
    with tempfile.TemporaryDirectory() as scratch:
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(scratch, filter="data")
        made = subprocess.run([sys.executable, "-B", tool, preset], cwd=scratch,
                              capture_output=True)
    return b"" if made.returncode else made.stdout


def git_commit(script: bytes, preset: str) -> str:
    """The newest commit that holds a run's script, whole or as the tool makes it, or "not committed"."""
    commits = git("log", "--format=%H", "-n", "500", "--", "train_gpt.py", *TOOL).decode().split()
    lines = {*script.splitlines()[1:]}
    one_recipe = has_one_recipe(script)
    for commit in commits:
        whole = git("show", f"{commit}:train_gpt.py")
        # all lines of a script are those of the whole file, but for the first one and the registry
        looks_made = one_recipe and len(lines - {*whole.splitlines()}) <= 1
        if script == whole or looks_made and script == made_at(commit, preset):
            return commit
    return UNKNOWN


def of_one_kind(before: Folder, after: Folder) -> list[tuple[str, bytes]]:
    """Two records -> [(name, script)] of both for a diff. Where one is whole and the other has a single
    recipe, the tool of the whole one's commit makes it one with a single recipe, too. Raises LeftOut where it
    cannot, as of an older file, which has no recipes."""
    alone = [has_one_recipe(folder.script) for folder in (before, after)]
    shown = [("before/train_gpt.py", before.script), ("train_gpt.py", after.script)]
    for i, folder in enumerate((before, after)):
        if any(alone) and not alone[i]:
            commit = folder.submission["git_commit"]
            preset = folder.runs[0].result["preset"]
            made = made_at(commit, preset)
            if not made:
                raise LeftOut("one of the scripts is whole, the other has a single recipe, and its commit is "
                              "not here: commit train_gpt.py before you train, in a clone with all history")
            shown[i] = f"{shown[i][0]}, {preset} of {commit[:9]}", made
    return shown
