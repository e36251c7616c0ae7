"""Scripts by commit and preset: which commit holds the script of a run, whole or as `./run.sh script PRESET`
makes it, and two scripts of one kind, whose difference a record shows.

There are whole files, which hold a registry of recipes; what the tool makes of one, with a single recipe; and
older whole files, which have no registry, so that no tool makes anything of them.
"""
import ast
import functools
import io
import subprocess
import sys
import tarfile
import tempfile
from typing import Any, NamedTuple

from records.judge.runs import Refused
from records.verify.folders import ROOT, Folder

UNKNOWN = "not committed"       # in place of a commit
TOOL = ("tools/run/script.py", "tools/script.py")       # what makes a script, and where older commits have it


class Source(NamedTuple):
    """The script of a record and where it comes from."""
    script: bytes
    commit: str
    preset: str


def source_of(folder: Folder) -> Source:
    """Source of a record of ours."""
    preset = folder.runs[0].result["preset"]
    return Source(folder.script, folder.submission["git_commit"], preset)


def git(*words: str, **more: Any) -> bytes:
    """stdout of a git command in this repository; nothing where it fails or git is not there."""
    try:
        return subprocess.run(["git", *words], capture_output=True, cwd=ROOT, **more).stdout
    except FileNotFoundError:
        return b""


def is_known(commit: str) -> bool:
    """Does this repository have the commit?"""
    return git("cat-file", "-t", commit).strip() == b"commit"


def recipes_of(script: bytes) -> list[str]:
    """The presets in a script's registry; none in older ones, or in what is no Python."""
    try:
        nodes = ast.parse(script).body
    except (SyntaxError, ValueError, RecursionError):
        return []
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECIPES":
            return [keyword.arg for keyword in getattr(node.value, "keywords", ())]
    return []


def whole_at(commit: str) -> bytes:
    """train_gpt.py of a commit; b"" where this repository does not know it."""
    return git("show", f"{commit}:train_gpt.py") if is_known(commit) else b""


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


def is_made_at(commit: str, script: bytes, preset: str) -> bool:
    """Is a script the whole file of a commit, or what the tool makes of it for the preset?"""
    return script == whole_at(commit) or len(recipes_of(script)) == 1 and script == made_at(commit, preset)


def git_commit(script: bytes, preset: str) -> str:
    """The newest commit that holds a run's script, whole or as the tool makes it, or "not committed"."""
    commits = git("log", "--format=%H", "-n", "500", "--", "train_gpt.py", *TOOL).decode().split()
    asked = "".join(f"{commit}:train_gpt.py\n" for commit in commits)
    blobs = git("cat-file", "--batch-check=%(objectname)", input=asked.encode()).decode().splitlines()
    blob = git("hash-object", "--stdin", input=script).decode().strip()
    lines = {*script.splitlines()[1:]}
    one_recipe = len(recipes_of(script)) == 1
    for commit, found in zip(commits, blobs):
        if found == blob:
            return commit
        if one_recipe:
            # all its lines are those of the whole file, but for the first one and the registry
            unknown = lines - {*whole_at(commit).splitlines()}
            if len(unknown) <= 1 and made_at(commit, preset) == script:
                return commit
    return UNKNOWN


def of_one_kind(before: Source, after: Source) -> list[tuple[str, bytes]]:
    """Two Sources -> [(name, script)] of both for a diff. Where one is whole and the other has a single
    recipe, the tool of the whole one's commit makes it one with a single recipe, too; of an older file, which
    has no recipes, it cannot: then the whole file of the other one's commit is compared. Raises Refused."""
    alone = [len(recipes_of(source.script)) == 1 for source in (before, after)]
    shown = [("before/train_gpt.py", before.script), ("train_gpt.py", after.script)]
    if alone[0] == alone[1]:
        return shown
    for i, source in enumerate((before, after)):
        if not alone[i] and (made := made_at(source.commit, source.preset)):
            shown[i] = f"{shown[i][0]}, {source.preset} of {source.commit[:9]}", made
            return shown
    for i, source in enumerate((before, after)):
        if alone[i] and (whole := whole_at(source.commit)):
            shown[i] = f"{shown[i][0]}, whole, of {source.commit[:9]}", whole
            return shown
    raise Refused("one of the scripts is whole, the other has a single recipe, and their commits are not "
                  "here: commit train_gpt.py before you train, in a clone with its whole history, so that "
                  "scripts of one kind are compared")
