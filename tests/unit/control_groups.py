from collections.abc import Mapping
from pathlib import Path

# Lines of /proc/self/mountinfo.
V2 = "30 23 0:25 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = """24 23 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=1k,mode=755
34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def run_in(
    root: Path, mounts: str, groups: str, files: Mapping[str, Mapping[str, object]], at: str = "sys/fs/cgroup"
) -> None:
    """Write the files that a process in a group finds: `files` by group and name, below the mount `at`."""
    texts = {"proc/self": {"mountinfo": mounts, "cgroup": groups}}
    texts |= {f"{at}/{group}": {name: f"{value}\n" for name, value in found.items()} for group, found in files.items()}
    for folder, named in texts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in named.items():
            (root / folder / name).write_text(text)
