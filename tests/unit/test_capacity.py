import resource
from pathlib import Path

import psutil
import pytest
import torch

from optimum_memopt.errors import MemOptError
from optimum_memopt.memory import capacity as capacity_module
from optimum_memopt.memory.capacity import capacity, capacity_of
from tests.unit.control_groups import V2, run_in

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


def test_processes_of_one_launch_share_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = capacity(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = capacity(CPU)
    assert shared.total == alone.total // 4
    assert shared.available <= shared.total


@pytest.mark.parametrize("text", ["0", "x", "1.5", "-2", "³", "9" * 5000])
def test_what_is_no_number_of_processes_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(MemOptError, match=r"^LOCAL_WORLD_SIZE=\S+: allowed are whole numbers from 1 on") as refused:
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
    # The address space is the process's own.
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
    # The kernel drops files where memory is needed. This process itself grows while tests run.
    assert found.available == pytest.approx(limit - others, abs=2**25)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    of_two = capacity(CPU).available
    free = limit - others - (own.rss - own.shared)
    assert of_two == pytest.approx(min(limit // 2, free // 2 + own.rss - own.shared), abs=2**25)


def test_a_named_device_runs_nothing_else() -> None:
    found = capacity_of(80 * 2**30)
    assert found.total == 80 * 2**30 and 0.8 < found.available / found.total < 0.9
