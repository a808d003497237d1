import sys
import weakref

from optimum_memopt.errors import forget_frames


class Held:
    pass


class Compilers(Exception):
    """Keeps the most useful frame, as errors of torch's compiler do."""

    def __init__(self) -> None:
        super().__init__("backend raised")
        self.first_useful_frame = sys._getframe(1)


def test_no_frame_of_a_forgotten_error_holds_its_callers_variables():
    def inner():
        raise Compilers

    def step() -> weakref.ref:
        held = Held()
        try:
            inner()
        except Compilers as error:
            kept = error
            # A reference cycle, like that of a frame with its error among its variables.
            kept.itself = kept
        forget_frames(kept)
        return weakref.ref(held)

    assert step()() is None
