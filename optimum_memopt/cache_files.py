"""Writes files whole; finds and reads this package's cache files, which may be corrupt and are shared by several
processes."""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

CACHE_VARIABLE = "OPTIMUM_MEMOPT_CACHE"


def cache_folder() -> Path | None:
    """Returns the folder of the package's caches: `OPTIMUM_MEMOPT_CACHE`, else `optimum_memopt` in `XDG_CACHE_HOME` or
    `~/.cache`; None for a user without a home folder, as in a container with an arbitrary user id."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimum_memopt"
    except RuntimeError:
        return None


def entry_bytes(path: Path, largest: int) -> bytes | None:
    """Returns the content of an entry; None if it does not exist or cannot be read.

    Args:
        largest: size limit in bytes; a larger entry is ignored.
    """
    # Non-blocking, since a FIFO may have no writer. ValueError: a path with a NUL.
    with (
        contextlib.suppress(OSError, ValueError),
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file,
    ):
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
            return file.read()
    return None


def write_entry(path: Path, content: bytes) -> None:
    """Write an entry atomically, since other processes may read it meanwhile. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, content)


def write_file(path: os.PathLike[str] | str, content: bytes) -> None:
    """Write a file of the user's. If that fails, as on a full disk, an earlier file of that name is unchanged.

    Raises:
        OSError: it cannot be written.
        ValueError: the path has a NUL.
    """
    # A link stays, and the file that it names is replaced.
    target = Path(path).resolve()
    # A pipe or a terminal cannot be replaced, nor a file in a folder that the user may not write to.
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        target.write_bytes(content)
    else:
        _replace(target, content)


def _replace(path: Path, content: bytes) -> None:
    # In a temporary folder, which is removed even if writing fails.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.write_bytes(content)
        if path.exists():
            shutil.copymode(path, written)
        written.replace(path)


def written_whole(path: Path, text: str) -> None:
    """Write an entry atomically; does nothing if the folder cannot be written to."""
    with contextlib.suppress(OSError):
        write_entry(path, text.encode())
