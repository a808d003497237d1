import io
import logging
import re
import sys
import threading

import pytest
from tqdm.auto import tqdm

from optimum_memopt.logs import (
    LOG_LEVELS,
    Deadline,
    TimeIsUpError,
    announced,
    get_logger,
    rank,
    set_log_level,
    watched,
)


def say(level, message):
    get_logger().log(LOG_LEVELS[level], message)


def test_lines_are_marked_and_come_once_however_often_the_logger_is_asked_for(capsys):
    for _ in range(3):
        get_logger().info("a line")
    assert capsys.readouterr().err.splitlines() == ["[memopt] a line"] * 3


def test_a_configured_root_does_not_repeat_the_lines(capsys):
    root, repeated = logging.getLogger(), []
    handler = logging.Handler()
    handler.emit = repeated.append
    root.addHandler(handler)
    try:
        get_logger().warning("a line")
    finally:
        root.removeHandler(handler)
    assert capsys.readouterr().err == "[memopt] a line\n"
    assert repeated == []


@pytest.mark.parametrize(
    "level, heard",
    [
        ("warning", ["warning"]),
        ("info", ["warning", "info"]),
        ("devinfo", ["warning", "info", "devinfo"]),
        ("verbose", ["warning", "info", "devinfo", "verbose"]),
    ],
)
def test_each_level_hears_itself_and_what_matters_more(capsys, level, heard):
    set_log_level(level)
    for name in LOG_LEVELS:
        say(name, name)
    assert capsys.readouterr().err.split() == [word for name in heard for word in ("[memopt]", name)]


def test_other_ranks_speak_from_devinfo_on_only(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank() == 1
    set_log_level("verbose")
    for name in LOG_LEVELS:
        say(name, name)
    assert capsys.readouterr().err.splitlines() == ["[memopt] devinfo", "[memopt] verbose"]
    monkeypatch.delenv("RANK")
    assert rank() == 0
    say("info", "rank 0")
    assert "rank 0" in capsys.readouterr().err


@pytest.mark.parametrize("rank_of_lora", ["16", "", "x", "-1", "1.5", "²"])
@pytest.mark.parametrize("world_size", [None, "", "x", "0", "1", "16"])
def test_a_variable_for_something_else_silences_nothing(capsys, monkeypatch, rank_of_lora, world_size):
    monkeypatch.setenv("RANK", rank_of_lora)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert rank() == 0
    say("info", "a line")
    assert capsys.readouterr().err == "[memopt] a line\n"


def test_the_rank_is_that_of_the_process_group_once_there_is_one(tmp_path, monkeypatch):
    import torch

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert rank() == 0
    finally:
        torch.distributed.destroy_process_group()
    assert rank() == 3


def test_a_progress_bar_is_not_torn(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with tqdm(total=3, file=terminal, mininterval=0, ncols=40) as bar:
        bar.update(1)
        get_logger().info("a line")
        bar.update(1)
    # The visible text on a terminal: a carriage return overwrites the line.
    shown = [line.split("\r")[-1].rstrip() for line in terminal.getvalue().split("\n")]
    assert "[memopt] a line" in shown


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


def test_what_is_watched_has_lines_in_between_alone_and_its_parts_are_in_them(monkeypatch) -> None:
    lines: list[str] = []
    has_all = threading.Event()

    def note(line: str) -> None:
        lines.append(line)
        if "still predicting a step: tracing a graph: partitioning" in line:
            has_all.set()

    monkeypatch.setattr(get_logger(), "info", note)
    with watched("predicting a step", every=0.001):
        with watched("tracing a graph", every=0.001) as part:
            part.stage = "partitioning"
            assert has_all.wait(timeout=60)
        lines.clear()
        has_all.clear()
    assert not any("tracing" in line for line in lines)
    lines.clear()
    with watched("predicting a step"):
        pass
    assert not lines


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
