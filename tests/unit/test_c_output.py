import ctypes
import os
import threading

import pytest

from optimum_memopt.engines.compile.solver.cut import without_c_output


def say(text: str) -> None:
    ctypes.CDLL(None).puts(text.encode())


def test_what_c_prints_is_dropped_and_nothing_else(capfd):
    print("python, before")
    say("c, before")
    with without_c_output():
        say("c, within")
    say("c, after")
    ctypes.CDLL(None).fflush(None)
    print("python, after")
    assert capfd.readouterr().out.splitlines() == ["python, before", "c, before", "c, after", "python, after"]


def test_the_output_is_there_again_after_two_threads(capfd):
    within, left = threading.Event(), threading.Event()

    def first() -> None:
        with without_c_output():
            within.set()
            left.wait(1)

    def second() -> None:
        within.wait()
        with without_c_output():
            # If it need not wait for the first thread, the first one leaves before it.
            left.set()
            other.join()

    other, last = threading.Thread(target=first), threading.Thread(target=second)
    other.start()
    last.start()
    last.join()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_it_may_be_nested_and_ends_with_an_error(capfd):
    with pytest.raises(KeyboardInterrupt), without_c_output():
        with without_c_output():
            say("c, within")
        say("c, within")
        raise KeyboardInterrupt
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_a_closed_output_is_left_closed(capfd):
    kept = os.dup(1)
    os.close(1)
    try:
        with without_c_output():
            pass
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(1)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
