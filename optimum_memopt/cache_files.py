"""The files of this package's caches, which anybody may damage, and several processes read and write."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def entry_bytes(path: Path, largest: int) -> bytes | None:
    """Returns the content of an entry; None where there is none that can be read.

    Args:
        largest: bytes; an entry with more is none.
    """
    # Without waiting, since a FIFO may have no writer. ValueError: a path with a NUL.
    with (
        contextlib.suppress(OSError, ValueError),
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file,
    ):
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
            return file.read()
    return None


def write_entry(path: Path, content: bytes) -> None:
    """Write an entry that others read while it is written. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder that goes whatever fails, as on a full disk.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        written.write_bytes(content)
        written.replace(path)


def written_whole(path: Path, text: str) -> None:
    """Write an entry; a folder that cannot be written to has no cache."""
    with contextlib.suppress(OSError):
        write_entry(path, text.encode())
