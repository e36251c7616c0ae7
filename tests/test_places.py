"""Where data/prepare.py and data/download.py put things: a failed --force leaves the old dataset, folders may
be links or lie on other disks, and what cannot be put in place is refused before the work."""
import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from data import prepare
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import download
from test_prepare import make_texts, read_documents, run, snapshot, write_jsonl, written


@pytest.fixture(scope="module")
def texts():
    return make_texts(120)


@pytest.fixture
def command(tmp_path, texts):
    """For vocabulary 400; another one may follow."""
    path = write_jsonl(tmp_path / "t.jsonl", texts)
    return ["--text", path, "--name", "toy", "--out", tmp_path / "out", "--vocab-size", 400]


@pytest.fixture
def parquet(tmp_path, texts):
    for number in range(3):
        pq.write_table(pa.table({"text": texts[number::3]}), tmp_path / f"{number}.parquet")
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    return ["--parquet", *paths, "--name", "toy", "--processes", 1, "--out", tmp_path / "out",
            "--vocab-size", 400]


def visible(out):
    """What is there, but for hidden files."""
    return {name: raw for name, raw in snapshot(out).items() if "/." not in name}


# --- a failed --force ----------------------------------------------------------------------------------
def raising(function, number, error, before=True):
    """The function, which fails before or after its number-th call."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if before and len(calls) == number:
            raise error
        result = function(*args, **kwargs)
        if len(calls) == number:
            raise error
        return result
    return call


FAILURES = [
    (shutil, "copyfile", 1, True), (prepare.os, "replace", 1, True),
    (prepare, "train_tokenizer", 1, True), (prepare, "write_manifest", 1, False),
    (prepare, "install", 1, True)]


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("module, name, number, before, error", [
    *((*failure, FULL) for failure in FAILURES), (*FAILURES[1], KeyboardInterrupt())])
def test_a_failed_force_leaves_the_old_dataset(tmp_path, command, monkeypatch, module, name, number, before,
                                               error):
    run(*command)
    old = snapshot(tmp_path / "out")
    with monkeypatch.context() as context:
        context.setattr(module, name, raising(getattr(module, name), number, error, before))
        run(*command, "--vocab-size", 410, "--force", expect=1)
    assert snapshot(tmp_path / "out") == old
    assert "already" in run(*command)
    run(*command, "--vocab-size", 410, "--force")
    manifest = json.loads((tmp_path / "out/datasets/toy/manifest.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 410
    assert visible(tmp_path / "out") == snapshot(tmp_path / "out")


# --- folders elsewhere -----------------------------------------------------------------------------------
@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another disk, if there is one; else one that lies deeper."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else tmp_path
    folder = place / f"elsewhere-{os.getpid()}" / "deep" / "er"
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder.parent.parent)


@pytest.mark.parametrize("name, form", [
    ("", "command"), ("datasets", "parquet"), ("tokenizers", "command"), ("datasets/toy", "command")])
def test_folders_may_be_links_to_another_disk(tmp_path, request, elsewhere, name, form):
    """The tokenizer is found from where the dataset lies, and --force and a second run work there, too."""
    words = request.getfixturevalue(form)
    run(*words, "--out", tmp_path / "plain")
    link = tmp_path / "out" / name
    (tmp_path / "out").mkdir()
    if not name:
        (tmp_path / "out").rmdir()
    link.parent.mkdir(exist_ok=True)
    (elsewhere / "target").mkdir()
    link.symlink_to(elsewhere / "target")
    if name == "datasets/toy":
        assert "without a readable manifest" in run(*words, expect=2)       # what it leads to is no dataset
        (elsewhere / "target").rmdir()
    run(*words)
    assert link.is_symlink()
    for split in ("val", "train"):
        expected = read_documents(tmp_path / "plain", "toy", split)
        assert read_documents(tmp_path / "out", "toy", split) == expected
    assert "already" in run(*words)
    run(*words, "--vocab-size", 410, "--force")
    assert link.is_symlink() and "already" in run(*words, "--vocab-size", 410)
    assert read_documents(tmp_path / "out", "toy", "val") == read_documents(tmp_path / "plain", "toy", "val")
    assert not list(elsewhere.rglob(".toy*"))


def dead_link(place):
    """As to a disk that is not mounted."""
    place.parent.mkdir(parents=True)
    place.symlink_to("/nowhere/at/all")


IN_THE_WAY = {      # {place: (what is made there, what is said)}
    **{name: (dead_link, "not there") for name in ("datasets", "tokenizers", "datasets/toy")},
    "tokenizers/toy.model": (lambda place: place.mkdir(parents=True), "toy.model is a folder"),
    "datasets/": (lambda place: written(place, ""), "cannot be written: cannot write to"),
    "tokenizers/": (lambda place: written(place, ""), "cannot be written: cannot write to")}


@pytest.mark.parametrize("more", [[], ["--force"]])
@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_is_told_before_the_work(tmp_path, command, name, more):
    """And left as it is."""
    make, words = IN_THE_WAY[name]
    make(tmp_path / "out" / name)
    there = sorted(tmp_path.rglob("*"))
    said = run(*command, *more, expect=2)
    assert words in said and "training" not in said, said
    assert sorted(tmp_path.rglob("*")) == there


def test_where_another_disk_is_mounted(tmp_path, command, monkeypatch):
    """Neither can be renamed."""
    folder = tmp_path / "out/datasets/toy"
    folder.mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)
    said = run(*command, "--force", expect=2)
    assert "another disk is mounted" in said and "training" not in said


def test_a_folder_of_a_containers_image(tmp_path, command, monkeypatch):
    """Which cannot be renamed: overlayfs has it that way, with EXDEV."""
    run(*command)
    old = snapshot(tmp_path / "out")
    folder = tmp_path / "out/datasets/toy"
    rename = os.rename

    def of_overlayfs(source, target):
        if Path(source) == folder:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", of_overlayfs)
    with monkeypatch.context() as context:
        context.setattr(shutil, "copytree", raising(shutil.copytree, 1, OSError(errno.ENOSPC, "full")))
        run(*command, "--vocab-size", 410, "--force", expect=1)
    assert snapshot(tmp_path / "out") == old
    run(*command, "--vocab-size", 410, "--force")
    assert json.loads((folder / "manifest.json").read_text())["tokenizer"]["vocab_size"] == 410


# --- downloads -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rooms, more, fits", [     # there, here; bytes of each disk
    ((5070, 5070), 0, True), ((5069, 69), 0, False), ((4999, 10**6), 0, False), ((6070, 6070), 1000, True),
    ((6000, 70), 1001, False)])
def test_each_disk_has_room_for_what_goes_there(rooms, more, fits, tmp_path, elsewhere, monkeypatch):
    """Not the disk of the checkout for a folder that lies on another one."""
    out = tmp_path / "data"
    out.mkdir()
    (out / "datasets").symlink_to(elsewhere)
    file = download.File("", out / "datasets/x/x.bin", "train", 5000, None, None)
    here = download.File("", out / "tokenizers/x.model", "tokenizer", 70, None, None)

    def free(path):
        there = os.stat(path).st_dev == os.stat(elsewhere).st_dev
        return SimpleNamespace(free=download.DISK_MARGIN + rooms[not there])

    monkeypatch.setattr(shutil, "disk_usage", free)
    with nullcontext() if fits else pytest.raises(download.Refused, match="free disk space"):
        download.check_disk([file, here], out, more)
