"""The errors that this package raises for its users, helpers for error messages, and a script's exit on an error."""

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar


class MemOptError(ValueError):
    """Bad input or an unsupported combination; the message is one line: what is wrong, where, what is allowed."""


class UnsupportedModelError(MemOptError):
    """The engine cannot train this model on this machine; the message ends with a suggestion."""

    def __init__(self, why: str, suggestion: str = "") -> None:
        super().__init__(f"{why}; {suggestion}" if suggestion else why)
        self.why = why


class DoesNotFitError(MemOptError):
    """No plan brings a training step within its budget.

    Attributes:
        lowest: the lowest possible peak of the step, in bytes.
        is_final: whether the step exceeds the budget even without activations, so that no other graphs would fit.
    """

    def __init__(self, text: str, lowest: int, is_final: bool = False) -> None:
        super().__init__(text)
        self.lowest, self.is_final = lowest, is_final


_FLAG = re.compile(r"--(\w+)")


@contextlib.contextmanager
def flags_named(name_of: Callable[[str], str]) -> Iterator[None]:
    """Rename the flags in the message of a MemOptError that is raised within this context.

    Args:
        name_of: takes a flag without its dashes, `memory_opt_budget`, and returns its name there: `budget` in a
            function's errors, `--budget` in a command's.
    """
    try:
        yield
    except MemOptError as error:
        error.args = (_FLAG.sub(lambda match: name_of(match[1]), str(error)),)
        raise


_OF_DYNAMO = ("TorchRuntimeError", "Unsupported")


def line_of(error: BaseException) -> str:
    """Returns an error's class and first line; for an error wrapped by torch's compiler, those of the inner error."""
    error = getattr(error, "inner_exception", None) or error
    if type(error).__name__ == "TorchRuntimeError":
        # An operator's error while dynamo traced it; in torch 2.13 the first line says only that an error occurred.
        error = next((each for each in with_causes(error) if type(each).__name__ not in _OF_DYNAMO), error)
    reason = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then its cause or context, and so on."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def clear_frames(error: BaseException) -> None:
    """Clear the frames in the tracebacks of an error and its causes: they refer to tensors."""
    for each in with_causes(error):
        traceback.clear_frames(each.__traceback__)


def forget_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes, and drop the tracebacks, which also keep the callers' frames."""
    clear_frames(error)
    for each in with_causes(error):
        each.__traceback__ = None
        # An error of torch's compiler keeps a traceback in a reference cycle with itself (`ShortenTraceback` in
        # `torch/_dynamo/exc.py`, 2.9 to 2.15), and so the caller's variables until the garbage collector runs.
        if getattr(each, "first_useful_frame", None) is not None:
            vars(each)["first_useful_frame"] = None


def add_context(error: BaseException, earlier: BaseException) -> None:
    """Chain an error to an earlier one, as if it had been raised while handling that one."""
    chain = list(with_causes(error))
    if earlier not in chain:
        chain[-1].__context__ = earlier


QUOTED = 80
_BEFORE = 30


def listing(word: str, names: str, near: Sequence[str]) -> str:
    """Returns `available: a, b`; with names like the given one, `did you mean a? Available: a, b`."""
    return f"did you mean {' or '.join(near)}? {word.capitalize()}: {names}" if near else f"{word}: {names}"


def excerpt(value: object, around: int = 0, longest: int = QUOTED) -> str:
    """Returns a user's input for an error message: printable, at most `longest` characters, `…` where it is cut.

    Args:
        value: the input; a string is shown as it is, anything else by its `repr`.
        around: position in a long string that stays visible.
    """
    text = value if isinstance(value, str) else _repr(value)
    start = max(0, min(around - _BEFORE, len(text) - longest + 1)) if len(text) > longest else 0
    end = start + longest
    printable = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[start:end]
    )
    lead, tail = "…" * (start > 0), "…" * (end < len(text) or len(printable) + (start > 0) > longest)
    return lead + printable[: longest - len(lead) - len(tail)] + tail


def path_excerpt(path: object) -> str:
    """Returns `excerpt` with a higher limit, since paths are long."""
    return excerpt(str(path), longest=4 * QUOTED)


def abbreviate(texts: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Returns the first `most` texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{separator.join(texts[:most])}{more}"


@contextlib.contextmanager
def writing(what: str, path: object) -> Iterator[None]:
    """Convert errors of writing a file in the block to MemOptError.

    Raises:
        MemOptError: the file cannot be written.
    """
    try:
        yield
    # ValueError: a path with a NUL; TypeError: not a path.
    except (OSError, ValueError, TypeError) as error:
        raise MemOptError(f"{what} {path_excerpt(path)}: not written: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Returns the reason why a file cannot be read or written."""
    return getattr(error, "strerror", None) or str(error)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        # Python does not print integers of more than 4,300 digits, and an object's `__repr__` may raise any error.
        return f"of type {type(value).__name__}"


# Messages of torch's allocators (`c10/core/impl/alloc_cpu.cpp`, `c10/cuda/CUDACachingAllocator.cpp`, 2.13) and of C++.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "failed to allocate memory")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)"
_REQUESTED = re.compile(rf"tried to allocate {_AMOUNT}", re.IGNORECASE)
_ALLOCATED = re.compile(rf"{_AMOUNT} is allocated by PyTorch")


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error of any device."""
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError is a RuntimeError; errors wrapped by a compiler or launcher are not.
    return isinstance(error, RuntimeError) and says_out_of_memory(error)


def says_out_of_memory(error: BaseException) -> bool:
    """True if the message contains an allocator's words for out of memory."""
    return any(words in str(error).lower() for words in _WORDS)


def shortage(error: BaseException) -> tuple[int | None, int | None]:
    """Returns the bytes of the failed allocation and those held by torch's allocator; None if the error does not say.
    CUDA's numbers are rounded to hundredths of their unit."""

    def amount(pattern: re.Pattern[str]) -> int | None:
        match = pattern.search(str(error))
        return None if match is None else int(float(match[1]) * _UNITS[match[2]])

    return amount(_REQUESTED), amount(_ALLOCATED)


Result = TypeVar("Result")


def run(main: Callable[[], Result]) -> Result:
    """Run a script's `main`: a `MemOptError` ends it with one line on stderr and exit code 2, without a traceback.

    Raises:
        SystemExit: `main` raised a `MemOptError`, which is its cause.
    """
    try:
        return main()
    except MemOptError as error:
        _close_progress_bars()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _close_progress_bars() -> None:
    """Close tqdm's open bars, which would be drawn once more at exit, over and after the error."""
    from tqdm.auto import tqdm

    # tqdm's own list (4.64 to 4.67); it exists before the first bar, except with other kinds of bars.
    for bar in tuple(getattr(tqdm, "_instances", ())):
        bar.leave = False
        bar.close()
