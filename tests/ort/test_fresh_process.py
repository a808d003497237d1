"""What the engine leaves alone in a process, and what is the same in every process."""

from pathlib import Path

import pytest

from tests import fresh_process
from tests.ort.helpers import needs_ort, python, run_script

pytestmark = needs_ort


def test_importing_the_package_imports_neither_onnxruntime_nor_deepspeed(tmp_path: Path) -> None:
    script = (
        "import sys, optimum_memopt as m, optimum_memopt.engines.ort\n"
        "m.PlanConfig, m.PlanTable, m.MemOptError\n"
        "assert not {'onnxruntime', 'deepspeed'} & set(sys.modules)"
    )
    done = python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_torch_and_its_exporter_are_left_as_they_were(tmp_path: Path) -> None:
    run_script("leave_torch_unchanged.py", cwd=tmp_path, run=fresh_process.run)


@pytest.mark.nightly
def test_a_table_is_the_same_in_every_process(tmp_path: Path) -> None:
    first = run_script("print_tables.py", cwd=tmp_path)
    assert first.count("saving_bytes") > 50
    assert run_script("print_tables.py", cwd=tmp_path) == first
