"""The file of `--memory_opt_log_file`: one JSON object a line."""

import json
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger, rank


class JsonLines:
    """A file to append records to; rank 0 creates it at once, so that a path that cannot be written is found early.

    Raises:
        MemOptError: rank 0 cannot write it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost = False
        if rank() != 0:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise MemOptError(
                f"the log file {str(path)!r} cannot be written ({_reason(error)}); give another "
                "--memory_opt_log_file, or path of a callback"
            ) from error

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write one line for each record. A file that can no longer be written is given up with one warning: a full
        disk costs the log, not the training."""
        if self._lost:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(record)}\n" for record in records))
        except OSError as error:
            self._lost = True
            get_logger().warning(f"stopped writing the log file {self.path} ({_reason(error)}); training goes on")


# Several callbacks append to one file; whether it can be written is found, and said, once.
_files: "weakref.WeakValueDictionary[Path, JsonLines]" = weakref.WeakValueDictionary()


def json_lines(path: str | os.PathLike) -> JsonLines:
    """The file at `path`, one object for all who ask while it is in use.

    Raises:
        MemOptError: rank 0 cannot write it.
    """
    # A later chdir must not move it.
    absolute = Path(path).absolute()
    file = _files.get(absolute)
    if file is None:
        file = _files[absolute] = JsonLines(absolute)
    return file


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
