"""malloc settings, which apply to a whole process and depend on its history, so each case runs in its own process."""

import os
import platform
import subprocess
import sys

import pytest

from tests import fresh_process
from tests.rotation import in_turn

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

# Runs without torch, whose own allocations are irrelevant here and whose import takes most of a process's time.
SCRIPT = """
from optimum_memopt.memory import process

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def kept_mib(block_kib):
    # One early free makes glibc raise its threshold, and the last block stays, so that the heap cannot shrink.
    del_me = b"1" * 2**22; del del_me
    before = resident()
    blocks = [b"1" * (block_kib * 1024) for _ in range(100 * 1024 // block_kib)]
    assert resident() - before > 90
    del blocks[:-1]
    return resident() - before
"""


def inherited():
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}


def run(body, **variables):
    command, environment = [sys.executable, "-c", SCRIPT + body], {**inherited(), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


def test_freed_blocks_go_back_to_the_system_and_do_not_without_it():
    told, kept = run("print(process.return_freed_memory(), kept_mib(512))")
    assert told == "True" and float(kept) < 10
    assert float(*run("print(kept_mib(512))")) > 80


def test_what_is_kept_is_told():
    before, after = run(
        "first = b'1' * 2**22; del first; before = process.kept_bytes(); blocks = [b'1' * 2**19 for _ in range(200)];"
        "del blocks[:-1]; print(before, process.kept_bytes())"
    )
    # Each block has a header.
    assert int(after) - int(before) == pytest.approx(199 * 2**19, abs=2**17)


def test_a_user_s_own_setting_wins():
    told, kept = run("print(process.return_freed_memory(), kept_mib(512))", MALLOC_MMAP_THRESHOLD_=str(2**25))
    assert told == "False" and float(kept) > 80
    assert run("print(process.return_freed_memory())", MALLOC_TRIM_THRESHOLD_="0") == ["False"]


@pytest.mark.parametrize(
    "asked", ["process.return_freed_memory();", "process.return_freed_memory();" * 2 + "process.restore_malloc();"]
)
def test_restore_by_the_last_that_asked_takes_the_smaller_default_threshold_again(asked):
    # 192 KiB is between glibc's default threshold and the one that is set.
    (meanwhile,), (afterwards,) = (
        run(asked + "print(kept_mib(192))"),
        run(asked + "process.restore_malloc(); print(kept_mib(192))"),
    )
    assert float(meanwhile) > 80
    assert float(afterwards) < 10


@pytest.mark.parametrize("engine", ["ort", "compile"])
def test_an_engine_tells_it_and_takes_it_back(engine):
    attach = (
        "import torch, optimum_memopt; "
        f"attached = optimum_memopt.optimize(torch.nn.Linear(2, 2), memory_opt_engine='{engine}'); "
    )
    # Memory freed by imports is in the history of a process and its forks: without the setting it keeps the blocks.
    script = SCRIPT + attach + "print(kept_mib(512)); attached.detach(); print(kept_mib(192))"
    done = fresh_process.run("-c", script, environment=inherited())
    assert done.returncode == 0, done.stderr
    large, small = done.stdout.split()
    assert float(large) < 10 and float(small) < 10


STEPS = """
import resource, torch, optimum_memopt
from optimum_memopt.memory import process

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

# Activations of 1 and 2 MiB.
model, x = torch.nn.Sequential(*(Layer() for _ in range(3))), torch.randn(1024, 256)

def engine(**plan):
    return optimum_memopt.optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", **plan)

def steps(count):
    for _ in range(count):
        model(x).sum().backward()
        model.zero_grad()

def faults():
    steps(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps(5)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5
"""


@in_turn
def test_steps_reuse_what_they_free_where_no_plan_asks_for_less_memory():
    """Without a plan, steps reuse freed memory instead of requesting new pages; with a plan it is returned at once."""
    asked = (
        "planned = engine(memory_opt_level=1); print(faults(), process.keeps_freed_memory()); planned.detach();"
        "plain = engine(); print(faults(), process.keeps_freed_memory()); plain.detach();"
        "print(process.keeps_freed_memory())"
    )
    done = fresh_process.run("-c", STEPS + asked, environment=inherited())
    assert done.returncode == 0, done.stderr
    returned, keeps_with_plan, kept, keeps, after = done.stdout.split()
    # Activations take 15 MiB in pages of 4 KiB.
    assert int(returned) > 3000 and int(kept) < int(returned) / 4
    assert (keeps, after, keeps_with_plan) == ("True", "False", "False")


def test_an_engine_with_a_plan_decides_for_the_process():
    asked = (
        "first = engine(); steps(2); kept = process.keeps_freed_memory(); first_model = model;"
        "model = torch.nn.Sequential(Layer(), Layer()); second = engine(memory_opt_level=1);"
        "print(kept, process.keeps_freed_memory()); second.detach(); print(process.keeps_freed_memory())"
    )
    done = fresh_process.run("-c", STEPS + asked, environment=inherited())
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "True"]


def test_what_malloc_has_kept_goes_back_too():
    kept, left = run(
        "first = b'1' * 2**22; del first; before = resident(); blocks = [b'1' * 2**17 for _ in range(800)];"
        "del blocks[:-1]; kept = resident() - before; process.return_freed_memory(); print(kept, resident() - before)"
    )
    assert float(kept) > 80 and float(left) < 10
