import io
import logging
import sys

import pytest
from tqdm.auto import tqdm

from optimum_memopt.logs import LOG_LEVELS, get_logger, rank, set_log_level


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
    assert rank() == 1
    set_log_level("verbose")
    for name in LOG_LEVELS:
        say(name, name)
    assert capsys.readouterr().err.splitlines() == ["[memopt] devinfo", "[memopt] verbose"]
    monkeypatch.delenv("RANK")
    assert rank() == 0
    say("info", "rank 0")
    assert "rank 0" in capsys.readouterr().err


def test_the_rank_is_that_of_the_process_group_once_there_is_one(tmp_path, monkeypatch):
    import torch

    monkeypatch.setenv("RANK", "3")
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
    # As a terminal shows it: what a carriage return leaves to be written over.
    shown = [line.split("\r")[-1].rstrip() for line in terminal.getvalue().split("\n")]
    assert "[memopt] a line" in shown
