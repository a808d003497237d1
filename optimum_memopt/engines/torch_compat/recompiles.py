"""Recompiles: torch's reasons, the code that each comes from, and code that is left to Python.

Checked in torch 2.13.0. Before it, reasons have no stack, and the place is that of the function that torch compiled.
"""

import contextlib
import re
import traceback
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo import convert_frame, trace_rules
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Marks the reason of an intended graph break.
MEANT = "optimum_memopt runs it untraced"
_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_HERE = str(Path(__file__).parent)
# An attribute of masks without padding; torch guards on whether an input of a traced forward has it.
NO_PADDING = "_memopt_has_no_padding"
_NO_PADDING = re.compile(rf"(?P<not>not )?hasattr\((?P<mask>[^,]+), '{NO_PADDING}'\)")
# The attribute by which traced code finds the results of a module that has run ahead.
RUN_AHEAD = "results_of_run_ahead"
# Stands in guards for the call of that module.
RUN_AHEAD_CALL = "(…)"
_RUN_AHEAD = re.compile(rf"\.forward\.__closure__\[\d+\]\.cell_contents\.{RUN_AHEAD}")
# An entry of a dict by its number.
_ENTRY = re.compile(r"dict\.__getitem__\((?P<of>.+?), list\(dict\.keys\((?P=of)\)\)\[(?P<number>\d+)\]\)")
# Prefix of a recompile reason.
_COMPILE_ID = re.compile(r"^\d+/\d+: ")
# Dynamo's name for the rest of a function after a graph break.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(?P<function>.*)_at_(?P<line>\d+)$")
# A frame of the stack after a reason (`get_guard_fail_reason_helper` in `torch/_dynamo/guards.py`).
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)$', re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)\b")
# torch's guards on Python numbers: `self.calls == 3`, `self.head.scale == 0.5`, `alpha == 1.0`.
_CHANGED_NUMBER = re.compile(rf"^(?P<name>[\w.\[\]'\"]+) == {NUMBER.pattern}$")
# The model's name in a traced wrapper that takes `*args` (`decide.with_detached_outputs`).
_MODEL = re.compile(r"\bargs\[0\](?=\.)")
_MODULES = re.compile(r"\._modules\['(?P<name>[^']+)'\]")
# An argument's name in a wrapper that takes `**kwargs`.
_BY_NAME = re.compile(r"\bkwargs\['(?P<name>\w+)'\]")
_SIZE = re.compile(r"^L\[['\"](?P<name>\w+)['\"]\](?P<rest>.*)\.size\(\)\[(?P<dim>\d+)\]$")
_SIZE_MISMATCH = re.compile(r"^tensor '(?P<name>.+?)' size mismatch at index (?P<dim>\d+)\.")


@dataclass(frozen=True)
class CodePlace:
    """A line of a function."""

    file: str
    line: int
    function: str

    @classmethod
    def of(cls, file: str, line: int, function: str) -> "CodePlace":
        """Returns a place; a function that torch made for the rest after a graph break gets its original's name."""
        return cls(file, line, _RESUMED.sub(r"\g<function>", function))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"

    def is_in(self, code: types.CodeType) -> bool:
        if (code.co_filename, code.co_name) != (self.file, self.function):
            return False
        last = max((line for *_, line in code.co_lines() if line is not None), default=0)
        return code.co_firstlineno <= self.line <= last


def is_of_the_user(file: str) -> bool:
    """True for code that is neither torch's nor this package's."""
    return not file.startswith((_TORCH, _PACKAGE))


def _is_around_model(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.startswith(_HERE)


def place_in(stack: Iterable[traceback.FrameSummary]) -> CodePlace | None:
    """Returns the innermost place of a stack in the user's code; None if there is none."""
    return next((place for place in reversed(_places(stack)) if is_of_the_user(place.file)), None)


def place_text(stack: Iterable[traceback.FrameSummary]) -> str:
    """Returns the user's line in a stack, as `, at model.py:28, in forward`; empty if there is none."""
    place = place_in(stack)
    return "" if place is None else f", at {place}"


def _places(stack: Iterable[traceback.FrameSummary]) -> list[CodePlace]:
    return [CodePlace.of(frame.filename, frame.lineno or 0, frame.name) for frame in stack]


@dataclass(frozen=True)
class Recompile:
    """A recompile of one function.

    Attributes:
        guard: the guard that failed.
        places: the stack of functions from the compiled one to the one that the guard comes from.
    """

    guard: str
    places: tuple[CodePlace, ...]

    @classmethod
    def of(cls, metrics: Any) -> "Recompile | None":
        """Returns a recompile from torch's `CompilationMetrics`; None for a first compile, and for a compile on
        another thread."""
        if not metrics.recompile_reason or metrics.co_name is None:
            return None
        frames = _FRAME.finditer(metrics.recompile_reason)
        places = [CodePlace.of(frame["file"], int(frame["line"]), frame["function"]) for frame in frames]
        resumed = _RESUMED.match(metrics.co_name)
        line = metrics.co_firstlineno if resumed is None else int(resumed["line"])
        compiled = CodePlace.of(metrics.co_filename, line, metrics.co_name)
        return cls(_guard_in(metrics.recompile_reason), tuple(places or [compiled]))

    @property
    def number(self) -> str:
        """Returns the name of the Python number that has changed; empty if something else has."""
        match = _CHANGED_NUMBER.match(self.guard)
        return match["name"] if match else ""

    @property
    def place(self) -> CodePlace | None:
        """Returns the user's line that the guard comes from; None if torch does not report one."""
        return next((place for place in reversed(self.places) if is_of_the_user(place.file)), None)

    @property
    def functions(self) -> frozenset[CodePlace]:
        """Returns the places of the user's functions, which Python may run instead of compiled code; empty if torch
        reports none."""
        return frozenset(place for place in self.places if is_of_the_user(place.file))

    @property
    def is_around_model(self) -> bool:
        """True if torch has compiled a wrapper of this package around the model's forward."""
        return _is_around_model(self.places[0].file)

    def with_sizes(self, specialized: Mapping[tuple[str, int], tuple[CodePlace, ...]]) -> "Recompile":
        """Returns the recompile with the place where a size became a constant, see `specialized_sizes`; torch's guard
        on the size has no place."""
        size = _SIZE_MISMATCH.match(self.guard)
        places = None if size is None else specialized.get((size["name"], int(size["dim"])))
        # Two functions may have arguments of the same name.
        is_same = places and (places[0].file, places[0].function) == (self.places[0].file, self.places[0].function)
        return Recompile(self.guard, places) if places and is_same else self


def source_name(source: Any) -> str:
    """Returns the name of a value's source in dynamo, as `L['input_ids']`."""
    # A property since 2.11, a method before.
    name: str = source.name if isinstance(source.name, str) else source.name()
    return name


def specialized_sizes(shapes: ShapeEnv | None) -> dict[tuple[str, int], tuple[CodePlace, ...]]:
    """Returns the stacks at which sizes of arguments became constants in a trace, by argument name and dimension."""
    stacks: Mapping[Any, Iterable[traceback.FrameSummary]] = getattr(shapes, "specialization_stacks", {})
    found = {}
    for source, stack in stacks.items():
        size = _SIZE.match(source_name(source))
        if size is not None:
            name = _BY_NAME.sub(r"\g<name>", f"{size['name']}{size['rest']}")
            found[name, int(size["dim"])] = tuple(_places(stack))
    return found


def first_line(text: str) -> str:
    return text.strip().split("\n")[0].split("  #")[0].strip()


def _guard_in(reason: str) -> str:
    """Returns the guard in a recompile reason of torch, `0/1: x > 1  # if x > 1`."""
    guard = _COMPILE_ID.sub("", first_line(reason))
    guard = _NO_PADDING.sub(lambda match: f"{match['mask']} has {'' if match['not'] else 'no '}padding", guard)
    guard = _ENTRY.sub(r"\g<of>[\g<number>]", _RUN_AHEAD.sub(RUN_AHEAD_CALL, guard))
    return _MODULES.sub(r".\g<name>", _BY_NAME.sub(r"\g<name>", _MODEL.sub("self", guard)))


def numbers_first() -> contextlib.AbstractContextManager[Any]:
    """Make torch report a changed number as the reason of a recompile, if there is one.

    torch has a reason for each earlier graph, and reports the first (`_compile` in `torch/_dynamo/convert_frame.py`),
    which may be about a graph for tensors of another kind. To find the reason it evaluates the sources of an earlier
    graph's tensors (`recompilation_reason_for_no_tensor_aliasing_guard` in `torch/_dynamo/guards.py`, 2.9 to 2.15),
    which may not exist in this call, such as an item of a shorter list.
    """
    name = "get_and_maybe_log_recompilation_reasons"
    reasons = getattr(convert_frame, name)

    def ordered(*args: Any, **kwargs: Any) -> list[str]:
        try:
            found = reasons(*args, **kwargs)
        except (LookupError, AttributeError, TypeError):
            return ["the call has other tensors"]
        return sorted(found, key=lambda reason: _CHANGED_NUMBER.match(_guard_in(reason)) is None)

    return mock.patch.object(convert_frame, name, ordered)


@contextlib.contextmanager
def left_to_python(places: Collection[CodePlace], skipped: list[types.CodeType]) -> Iterator[None]:
    """Exclude functions at these places from compilation and from traces of others.

    The functions that they call are still compiled, except this package's wrappers around the model's forward. torch
    calls `check_verbose` for both decisions (in `torch/_dynamo`: `CatchErrorsWrapper` in `convert_frame.py`,
    `check_inlineable` in `symbolic_convert.py`), and then leaves a frame's code object to Python for good.

    Args:
        places: the functions to exclude.
        skipped: a list to which these code objects are appended.
    """
    if not places:
        yield
        return
    check = trace_rules.check_verbose

    def checked(function: Any, *args: Any, **kwargs: Any) -> trace_rules.SkipResult:
        if (code := _code_of(function)) is None:
            return check(function, *args, **kwargs)
        is_frame = function is code
        is_left = any(place.is_in(code) for place in places)
        if not is_left and not (is_frame and _is_around_model(code.co_filename)):
            return check(function, *args, **kwargs)
        if is_frame:
            skipped.append(code)
        return trace_rules.SkipResult(True, MEANT)

    with mock.patch.object(trace_rules, "check_verbose", checked):
        yield


def _code_of(function: Any) -> types.CodeType | None:
    if isinstance(function, types.CodeType):
        return function
    # `get_code` is a method of dynamo's variable for a function.
    code = function.get_code() if hasattr(function, "get_code") else getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None
