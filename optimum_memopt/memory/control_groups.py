"""Control groups, as containers, Slurm and systemd make them: the limits of memory that hold for this process."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class ControlGroup:
    """A group whose processes, with those of the groups in it, share an amount of memory; bytes.

    Attributes:
        limit: that they must not pass.
        held: by all of them, without files that the kernel can drop; 0 where it is not known.
    """

    limit: int
    held: int


@dataclass(frozen=True)
class _Version:
    """Names of files, and of the numbers in `memory.stat`."""

    limit: str
    usage: str
    prefix: str = ""


# By type of file system: version 2 and 1 (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst in Linux).
_VERSIONS = {
    "cgroup2": _Version("memory.max", "memory.current"),
    "cgroup": _Version("memory.limit_in_bytes", "memory.usage_in_bytes", prefix="total_"),
}
_CONTROLLER = "memory"


def control_groups(root: Path) -> list[ControlGroup]:
    """This process's groups that have a limit: its own, and those that they are in.

    Args:
        root: folder with `proc` and `sys`.
    """
    groups = []
    for version, folder in _folders(root):
        limit = _text(folder / version.limit)
        # "max" is none.
        if limit.isdigit():
            groups.append(ControlGroup(int(limit), _held(folder, version)))
    return groups


def _held(folder: Path, version: _Version) -> int:
    usage = _text(folder / version.usage)
    stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    files = sum(int(stat.get(f"{version.prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(0, int(usage) - files) if usage.isdigit() else 0


def _folders(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Where the files of this process's groups are, from its own to the outermost that can be seen."""
    # `4:memory:/docker/12ab` in version 1, `0::/user.slice/run.scope` in version 2.
    lines = (line.split(":", maxsplit=2) for line in _text(root / "proc/self/cgroup").splitlines())
    paths = {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    for mount in _text(root / "proc/self/mountinfo").splitlines():
        before, _, behind = mount.partition(" - ")
        (kind, *_, options), (top, place) = behind.split(), map(_unescaped, before.split()[3:5])
        has_memory = kind == "cgroup2" or (kind == "cgroup" and _CONTROLLER in options.split(","))
        path = paths.get("" if kind == "cgroup2" else _CONTROLLER)
        if not has_memory or path is None:
            continue
        if (inner := _inner(path, top)) is not None:
            for one in (inner, *inner.parents):
                yield _VERSIONS[kind], root / place.lstrip("/") / one


def _inner(path: str, top: str) -> PurePosixPath | None:
    """Where a group is in a mount of the group `top`; None: elsewhere. A container may see a part of its host."""
    # As a namespace of groups shows what is outside of it.
    if ".." in (*PurePosixPath(path).parts, *PurePosixPath(top).parts):
        return PurePosixPath()
    with contextlib.suppress(ValueError):
        return PurePosixPath(path).relative_to(top)
    return None


def _unescaped(path: str) -> str:
    """Spaces and backslashes are octal in `mountinfo`."""
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
