from pathlib import Path

import pytest

from optimum_memopt.memory.capacity import ControlGroup, control_groups
from tests.unit.control_groups import V1, V2, run_in

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
    """Without a namespace of groups its paths are the host's, which are not there."""
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
