import subprocess
import sys

import pytest

from optimum_memopt import MemOptError, run

SCRIPT = """
import sys
from tqdm.auto import tqdm
from optimum_memopt import MemOptError, run

def main():
    bar = tqdm(total=10)
    bar.update(3)
    raise {error}

run(main)
"""


def script(error: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True)


def test_a_mistake_is_the_last_line_below_the_closed_bar():
    done = script('MemOptError("no such plan")')
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("error: no such plan\n")
    assert "Traceback" not in done.stderr and done.stderr.count("error") == 1


def test_another_error_keeps_its_traceback():
    done = script('KeyError("a bug")')
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "error:" not in done.stderr


def test_what_main_returns_and_why_it_ended():
    assert run(lambda: 7) == 7
    error = MemOptError("one line")
    with pytest.raises(SystemExit) as caught:
        run(lambda: (_ for _ in ()).throw(error))
    assert caught.value.code == 2 and caught.value.__cause__ is error
