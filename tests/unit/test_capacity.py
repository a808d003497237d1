import resource
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from optimum_memopt.errors import MemOptError
from optimum_memopt.memory import capacity as capacity_module
from optimum_memopt.memory.capacity import ControlGroup, capacity, capacity_of, control_groups, host_available
from optimum_memopt.sizes import parse_budget

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def free_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(capacity_module, "_ROOT", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_alone_on_a_host_it_has_all_of_it() -> None:
    found = capacity(CPU)
    assert found.total == psutil.virtual_memory().total
    assert psutil.Process().memory_info().rss < found.available <= found.total


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [
        (2**34 * 85 // 100, "fits: 13.60 GiB of 13.60 GiB"),
        (2**34, "does not fit: 16.00 GiB of 13.60 GiB"),
        (2**29, "fits: 512.0 MiB of 13.60 GiB"),
    ],
)
def test_a_verdict_has_the_bytes_that_a_budget_of_auto_allows(peak: int, verdict: str) -> None:
    assert capacity_of(2**34).verdict(peak) == verdict


def test_processes_of_one_launch_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = capacity(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = capacity(CPU)
    assert shared.total == alone.total // 4
    assert shared.available <= shared.total


@pytest.mark.parametrize("text", ["0", "x", "1.5", "-2", "³", "9" * 5000])
def test_what_is_no_number_of_processes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(MemOptError, match=r"^LOCAL_WORLD_SIZE=\S+: allowed: whole numbers from 1 up") as refused:
        capacity(CPU)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_an_empty_number_of_processes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = capacity(CPU).total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert capacity(CPU).total == alone


def test_a_container_and_a_process_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(tmp_path, V2, "0::/\n", {"": {"memory.max": 3 * 2**30}})
    assert capacity(CPU).total == 3 * 2**30
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    assert capacity(CPU).total == 2**30
    data = psutil.Process().memory_info().data + 2**28
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (data if kind == resource.RLIMIT_DATA else resource.RLIM_INFINITY,) * 2
    )
    assert host_available() == pytest.approx(2**28, abs=2**24)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    # The address space limit is per process.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert capacity(CPU).total == 2**30


def test_what_others_of_a_group_hold_is_not_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process().memory_info()
    others, files = 2**30, 2**31
    usage = own.rss - own.shared + others + files
    stat = f"anon {usage - files}\nactive_file {files - 5}\ninactive_file 5\nslab 7"
    limit = usage + 2**29
    run_in(tmp_path, V2, "0::/\n", {"": {"memory.max": limit, "memory.current": usage, "memory.stat": stat}})
    found = capacity(CPU)
    assert found.total == limit
    # The kernel drops file pages when memory is needed. This process itself grows while tests run.
    assert found.available == pytest.approx(limit - others, abs=2**25)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    of_two = capacity(CPU).available
    free = limit - others - (own.rss - own.shared)
    assert of_two == pytest.approx(min(limit // 2, free // 2 + own.rss - own.shared), abs=2**25)


def test_what_other_processes_hold_on_a_host_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, held = psutil.virtual_memory(), psutil.Process().memory_info().rss
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=2**40, available=2**33))
    found = capacity(CPU)
    assert found.available == pytest.approx(2**33 + held, abs=2**25)
    assert found.elsewhere == found.total - found.available


def test_what_another_process_holds_on_a_gpu_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's memory is not available, while the process's own cached blocks are."""
    total, vllm, cached, context = (size * 2**30 for size in (80, 40, 6, 1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - vllm - cached - context, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: cached)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: 1.0)
    found = capacity(torch.device("cuda"))
    assert found.total == total
    assert found.elsewhere == vllm + context
    assert found.available == pytest.approx(0.85 * (total - vllm - context), abs=1)
    assert parse_budget("auto").on_device(found.total, found.available) == found.available


@pytest.mark.parametrize("fraction, available", [(0.25, 20), (0.8, 40)])
def test_a_process_takes_its_fraction_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, fraction: float, available: int
) -> None:
    """`torch.cuda.set_per_process_memory_fraction` limits the total; other processes hold half of the GPU."""
    total = 80 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total // 2, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: fraction)
    found = capacity(torch.device("cuda"))
    assert found.total == int(fraction * total)
    assert found.available == pytest.approx(0.85 * available * 2**30, abs=1)
    assert parse_budget("auto").on_device(found.total, found.available) == found.available
    assert parse_budget("50%").on_device(found.total, found.available) == found.total // 2


def test_a_named_device_runs_nothing_else() -> None:
    found = capacity_of(80 * 2**30)
    assert found.total == 80 * 2**30 and 0.8 < found.available / found.total < 0.9


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
    """Write the /proc and cgroup files that a process sees: `files` by group and name, below the mount `at`."""
    texts = {"proc/self": {"mountinfo": mounts, "cgroup": groups}}
    texts |= {f"{at}/{group}": {name: f"{value}\n" for name, value in found.items()} for group, found in files.items()}
    for folder, named in texts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in named.items():
            (root / folder / name).write_text(text)


MANY = 9223372036854771712


def test_each_group_above_counts_in_version_2(tmp_path: Path) -> None:
    files = {
        "user.slice": {"memory.max": 1200},
        "user.slice/run.scope": {
            "memory.max": "max",
            "memory.current": 700,
            "memory.stat": "anon 300\nactive_file 1\ninactive_file 2\ntotal_active_file 500",
        },
        "user.slice/run.scope/job": {
            "memory.max": 2000,
            "memory.current": 700,
            "memory.stat": "anon 300\nactive_file 150\ninactive_file 250",
        },
        "user.slice/other.scope": {"memory.max": 5},
    }
    run_in(tmp_path, V2, "0::/user.slice/run.scope/job\n", files)
    assert control_groups(tmp_path) == [ControlGroup(2000, 300), ControlGroup(1200, 0)]


def test_the_group_of_the_memory_controller_counts_in_version_1(tmp_path: Path) -> None:
    groups = "5:cpuacct,cpu:/slurm/cpu\n4:memory:/slurm/job:7/step\n0::/elsewhere\n"
    files = {
        "": {"memory.limit_in_bytes": MANY},
        "slurm/job:7": {
            "memory.limit_in_bytes": 1200,
            "memory.usage_in_bytes": 900,
            "memory.stat": "active_file 1\ntotal_active_file 200\ntotal_inactive_file 100\ntotal_rss 600",
        },
        "slurm/job:7/step": {"memory.limit_in_bytes": MANY, "memory.usage_in_bytes": 90},
        "slurm/cpu": {"memory.limit_in_bytes": 5},
    }
    run_in(tmp_path, V1, groups, files, at="sys/fs/cgroup/memory")
    assert control_groups(tmp_path) == [ControlGroup(MANY, 90), ControlGroup(1200, 600), ControlGroup(MANY, 0)]


@pytest.mark.parametrize("escaped", ["docker/12ab", r"system.slice/run\134x2d1\040b"])
def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path, escaped: str) -> None:
    """A group is found although, without a cgroup namespace, its path is the host's and not in the container."""
    path = escaped.replace(r"\134", "\\").replace(r"\040", " ")
    mount = V1.replace("0:32 /", f"0:32 /{escaped}")
    files = {"": {"memory.limit_in_bytes": 3000}, "inner": {"memory.limit_in_bytes": 1200}}
    run_in(tmp_path, mount, f"4:memory:/{path}/inner\n", files, at="sys/fs/cgroup/memory")
    assert [group.limit for group in control_groups(tmp_path)] == [1200, 3000]


def test_a_mount_of_another_group_does_not_count(tmp_path: Path) -> None:
    mount = V2.replace("0:25 /", "0:25 /other")
    run_in(tmp_path, mount, "0::/own\n", {"": {"memory.max": 5}, "own": {"memory.max": 6}})
    assert control_groups(tmp_path) == []


def test_a_group_outside_of_the_namespace_has_the_limit_of_the_mount(tmp_path: Path) -> None:
    run_in(tmp_path, V2, "0::/../../run.scope\n", {"": {"memory.max": 1200}})
    assert control_groups(tmp_path) == [ControlGroup(1200, 0)]


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert control_groups(tmp_path) == []


def test_this_process() -> None:
    assert all(group.limit > 0 for group in control_groups(Path("/")))
