import re
import threading

import pytest

from optimum_memopt.logs import Deadline, TimeIsUpError, announced, get_logger


def test_a_line_at_the_beginning_and_one_with_the_seconds_at_the_end(capsys) -> None:
    with announced("compiling a graph", "compiled a graph", "once"):
        first = capsys.readouterr().err
        get_logger().info("a line of the task")
    last = capsys.readouterr().err.splitlines()
    assert first == "[memopt] compiling a graph: once\n"
    assert last[0] == "[memopt] a line of the task"
    assert re.fullmatch(r"\[memopt\] compiled a graph in \d+\.\d s", last[1]) and len(last) == 2


def test_lines_in_between_say_the_stage(monkeypatch) -> None:
    lines: list[str] = []
    has_two = threading.Event()

    def note(line: str) -> None:
        lines.append(line)
        if sum("second stage" in line for line in lines) == 2:
            has_two.set()

    monkeypatch.setattr(get_logger(), "info", note)
    with announced("compiling a graph", "compiled a graph", every=0.001) as progress:
        progress.stage = "second stage"
        assert has_two.wait(timeout=60)
    between = [line for line in lines[1:-1] if "second stage" in line]
    assert all(re.fullmatch(r"still compiling a graph: second stage, \d+ s so far", line) for line in between)
    assert lines[0] == "compiling a graph" and lines[-1].startswith("compiled a graph in ")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_task_that_fails_leaves_no_last_line_and_no_thread(capsys, error) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error), announced("compiling a graph", "compiled a graph"):
        raise error
    assert not set(threading.enumerate()) - before
    assert capsys.readouterr().err == "[memopt] compiling a graph\n"


def test_a_part_begins_where_there_is_time_for_it():
    deadline = Deadline(60)
    deadline.check()
    deadline.check(needed=30)
    with pytest.raises(TimeIsUpError):
        deadline.check(needed=60)
    assert 0 <= deadline.elapsed < 60


def test_no_part_begins_when_the_time_is_up():
    with pytest.raises(TimeIsUpError):
        Deadline(0).check()
