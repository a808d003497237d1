"""A file of the user's is written whole, or stays as it was."""

import os
import resource
import stat
from pathlib import Path

import pytest

from optimum_memopt.cache_files import write_file


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_file(path, b"earlier")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_file(path, b"later" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_links_modes_and_pipes_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    write_file(path, b"earlier")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, b"later")
    assert link.is_symlink() and path.read_bytes() == b"later"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, b"through")
    assert os.read(reader, 100) == b"through" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "missing" / "plan.json", b"plan")
