"""Temporary files: writers of one output never meet, and what killed ones leave behind is removed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from krnet.errors import InputError
from krnet.io import atomic
from krnet.io.atomic import atomic_write, make_temporary
from krnet.io.lock import working_in

BLOCK = 1 << 16


def write_blocks(path: Path, letter: int, number: int = 16) -> None:
    with atomic_write(path) as file:
        for _ in range(number):
            file.write(bytes([letter]) * BLOCK)


def is_whole(path: Path, number: int = 16) -> bool:
    content = path.read_bytes()
    return len(content) == number * BLOCK and len(set(content)) == 1


def test_threads_that_write_one_file_leave_one_of_theirs_whole(tmp_path):
    path, barrier = tmp_path / "x.krn", threading.Barrier(4)

    def write(letter: int) -> None:
        barrier.wait()
        write_blocks(path, letter)

    for _ in range(12):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert is_whole(path)
        assert [found.name for found in tmp_path.iterdir()] == ["x.krn"]


def _write_often(path: Path, letter: int) -> None:
    atomic.os.getpid = lambda: 1  # type: ignore[assignment]  # as in a container, where each is process 1
    for _ in range(10):
        write_blocks(path, letter)


def test_processes_of_one_number_that_write_one_file_leave_one_of_theirs_whole(tmp_path):
    path = tmp_path / "x.krn"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, letter)) for letter in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert is_whole(path)
    assert [found.name for found in tmp_path.iterdir()] == ["x.krn"]


HALF_WRITTEN = """
import sys, time
from krnet.io.atomic import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_writer_leaves_is_removed_and_that_of_a_living_one_stays(tmp_path):
    path = tmp_path / "x.krn"
    writers = [
        subprocess.Popen([sys.executable, "-c", HALF_WRITTEN, str(path)], stdout=subprocess.PIPE) for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
    dead, living = writers
    os.kill(dead.pid, signal.SIGKILL)
    dead.wait()
    try:
        assert len(list(tmp_path.iterdir())) == 2
        write_blocks(path, 1)
        left = [found.name for found in tmp_path.iterdir() if found != path]
        assert len(left) == 1 and f"-{living.pid}-" in left[0]
    finally:
        living.kill()
        living.wait()
    write_blocks(path, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_only_look_alike_are_left_alone(tmp_path):
    path = tmp_path / "x.krn"
    strangers = [".x.krn.tmp", ".x.krn.1.tmp", ".x.krn.mine.tmp", ".other.krn.host-1-0123456789abcdef.tmp", "x.krn.tmp"]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    write_blocks(path, 1)
    assert {found.name for found in tmp_path.iterdir()} == {*strangers, "x.krn"}


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path, monkeypatch):
    victim, digits = tmp_path / "victim", iter(["0" * 16, "1" * 16])
    victim.write_text("mine")
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda size: next(digits))
    monkeypatch.setattr(atomic.platform, "node", lambda: "host")
    monkeypatch.setattr(atomic, "remove_leftovers", lambda path: None)
    (tmp_path / f".x.krn.host-{os.getpid()}-{'0' * 16}.tmp").symlink_to(victim)
    write_blocks(tmp_path / "x.krn", 1)
    assert victim.read_text() == "mine" and is_whole(tmp_path / "x.krn")


def test_a_name_of_255_bytes_can_be_written(tmp_path):
    path = tmp_path / ("ä" * 125 + "b.krn")
    write_blocks(path, 1)
    assert list(tmp_path.iterdir()) == [path]


def test_a_temporary_file_has_the_rights_that_the_users_mask_gives(tmp_path):
    mask = os.umask(0o027)
    try:
        write_blocks(tmp_path / "x.krn", 1)
    finally:
        os.umask(mask)
    assert (tmp_path / "x.krn").stat().st_mode & 0o777 == 0o640


def test_temporary_names_never_repeat(tmp_path):
    made = [make_temporary(tmp_path / "x.krn") for _ in range(50)]
    for _, descriptor in made:
        os.close(descriptor)
    assert len({path for path, _ in made}) == 50


def test_a_foreign_file_with_the_name_of_the_lock_is_kept(tmp_path):
    (tmp_path / ".lock").write_text("my notes")
    with pytest.raises(InputError, match="holds 'my notes'"), working_in(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "my notes"
