"""Reads a JSON file that a user named. Pure."""

import json
from pathlib import Path
from typing import Any

from optimum_memopt.errors import MemOptError, path_excerpt


def read_json(path: Path, kind: str, shape: str, largest: int) -> Any:
    """What a file holds.

    Args:
        path: any path that a user may give.
        kind: of the file, for errors.
        shape: what is expected in it, for errors.
        largest: bytes, since a path may have no end (`/dev/zero`).

    Raises:
        MemOptError: one line that says why it cannot be read.
    """
    shown = path_excerpt(path)
    try:
        with path.open("rb") as file:
            content = file.read(largest + 1)
    # ValueError: a path with a NUL.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MemOptError(f"{kind} file {shown}: {reason}") from None
    if len(content) > largest:
        raise MemOptError(f"{kind} file {shown}: larger than {largest // 2**20} MiB")
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError:
        raise MemOptError(f"{kind} file {shown}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise MemOptError(f"{kind} {shown}: not JSON, line {error.lineno} column {error.colno}: {error.msg}") from None
    # Nested too deeply, or a number with more digits than Python parses.
    except (RecursionError, ValueError):
        raise MemOptError(f"{kind} {shown}: {shape}") from None
