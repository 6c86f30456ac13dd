"""`build_once`: one builder at a time, whole folders only, through deaths, damage, full and read-only disks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mrv2.errors import ModelCacheError
from mrv2.loader.cache import MARKER, build_once, cache_dir, is_whole


def write_files(folder, text="hello"):
    (folder / "a.txt").write_text(text)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.bin").write_bytes(bytes(100))


def build_and_count(log, barrier):
    """In a process of its own: build, noting each time it was really done."""

    def build(folder):
        with log.open("a") as f:
            f.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        write_files(folder)

    barrier.wait()
    assert (build_once("key", build, what="testing") / "a.txt").read_text() == "hello"


def build_and_die(started):
    def build(folder):
        (folder / "a.txt").write_text("half")
        started.set()
        time.sleep(60)

    build_once("key", build, what="testing")


def test_the_folder_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("MRV2_CACHE", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x"
    monkeypatch.setenv("MRV2_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "y"))
    assert cache_dir() == tmp_path / "y" / "mrv2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "mrv2"


def test_a_second_call_finds_it_made(cache, capsys):
    first = build_once("key", write_files, what="making it")
    assert is_whole(first)
    assert "making it" in capsys.readouterr().err
    assert build_once("key", lambda f: pytest.fail("built again"), what="making it") == first
    assert capsys.readouterr().err == ""


def test_processes_at_the_same_time_build_once(cache, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    log = tmp_path / "log"
    workers = [context.Process(target=build_and_count, args=(log, barrier)) for _ in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1
    assert sorted(p.name for p in cache.iterdir()) == ["key", "key.lock"]


def test_threads_at_the_same_time_build_once(cache):
    built = []

    def build(folder):
        built.append(1)
        time.sleep(0.1)
        write_files(folder)

    threads = [threading.Thread(target=build_once, args=("key", build), kwargs={"what": "x"}) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert built == [1]


def test_a_killed_builder_neither_blocks_nor_leaves_anything(cache):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    victim = context.Process(target=build_and_die, args=(started,))
    victim.start()
    assert started.wait(60)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(30)
    assert any(p.name.startswith("key.tmp-") for p in cache.iterdir())
    assert not (cache / "key").exists()
    folder = build_once("key", write_files, what="x")
    assert (folder / "a.txt").read_text() == "hello"
    assert sorted(p.name for p in cache.iterdir()) == ["key", "key.lock"]


def test_a_waiting_process_takes_over_from_a_killed_one(cache):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    victim = context.Process(target=build_and_die, args=(started,))
    victim.start()
    assert started.wait(60)
    waiter = threading.Thread(target=build_once, args=("key", write_files), kwargs={"what": "x"})
    waiter.start()
    time.sleep(0.3)
    assert waiter.is_alive()
    os.kill(victim.pid, signal.SIGKILL)
    waiter.join(30)
    victim.join(30)
    assert is_whole(cache / "key")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing_and_passes_its_error_on(cache, error):
    def build(folder):
        write_files(folder)
        raise error("x")

    with pytest.raises(error):
        build_once("key", build, what="x")
    assert [p.name for p in cache.iterdir()] == ["key.lock"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "a.txt").write_text("hellO"),
        lambda f: (f / "a.txt").write_text("longer than it was"),
        lambda f: (f / "a.txt").unlink(),
        lambda f: (f / "sub" / "b.bin").write_bytes(bytes(99)),
        lambda f: (f / MARKER).unlink(),
        lambda f: (f / MARKER).write_text("{"),
        lambda f: (f / MARKER).write_text('{"files": [1]}'),
        lambda f: (f / MARKER).write_text("[" * 100_000),
    ],
)
def test_damage_is_noticed_and_mended(cache, damage, capsys):
    folder = build_once("key", write_files, what="x")
    damage(folder)
    assert not is_whole(folder)
    assert build_once("key", write_files, what="x") == folder
    assert (folder / "a.txt").read_text() == "hello"
    assert "damaged" in capsys.readouterr().err


def test_a_cache_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MRV2_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelCacheError, match="MRV2_CACHE to a folder that can be written"):
        build_once("key", write_files, what="x")


def test_a_cache_that_no_one_can_write(monkeypatch):
    monkeypatch.setenv("MRV2_CACHE", "/proc/mrv2")
    with pytest.raises(ModelCacheError, match="/proc/mrv2"):
        build_once("key", write_files, what="x")


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EROFS, "Read-only"), (errno.EACCES, "denied"), (errno.ENOSPC, "disk is full"), (errno.EDQUOT, "full")],
)
def test_the_systems_refusals_while_writing(cache, number, message):
    def build(folder):
        write_files(folder)
        raise OSError(number, os.strerror(number))

    with pytest.raises(ModelCacheError, match=message) as caught:
        build_once("key", build, what="x")
    assert "MRV2_CACHE" in caught.value.fix
    assert [p.name for p in cache.iterdir()] == ["key.lock"]


def test_a_read_only_cache_that_has_it_is_enough(cache, monkeypatch):
    folder = build_once("key", write_files, what="x")
    monkeypatch.setattr(Path, "mkdir", lambda *a, **k: pytest.fail("wrote"))
    assert build_once("key", write_files, what="x") == folder


def test_a_mistyped_model_is_refused_without_importing_torch():
    code = (
        "import sys; from mrv2.loader.model import resolve_model; from mrv2.errors import ModelNotFoundError\n"
        "try: resolve_model('nosuch')\n"
        "except ModelNotFoundError: sys.exit('torch' in sys.modules)\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["file", "link to nothing", "link to a folder"])
def test_whatever_has_taken_the_folders_name_is_replaced(cache, tmp_path, kind):
    cache.mkdir()
    other = tmp_path / "other"
    if kind == "file":
        (cache / "key").write_text("x")
    else:
        (cache / "key").symlink_to(other)
    if kind == "link to a folder":
        other.mkdir()
        (other / "mine").write_text("precious")
    folder = build_once("key", write_files, what="x")
    assert is_whole(folder)
    assert not folder.is_symlink()
    assert kind != "link to a folder" or (other / "mine").read_text() == "precious"


def test_no_home_is_no_crash(monkeypatch):
    monkeypatch.setenv("MRV2_CACHE", "~no_such_user/cache")
    assert cache_dir() == Path("~no_such_user/cache")
    for name in ("MRV2_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # as for a container's user without an entry
    assert cache_dir() == Path("~/.cache/mrv2")
