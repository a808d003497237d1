"""Checks of gpu/acceptance.py, and the process that runs one."""

import gc
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
# Prefix of the output lines that the parent process reads as events.
MARK = "@gpu "


@dataclass(frozen=True)
class Setting:
    """How the checks run.

    Attributes:
        quick: whether to only test that everything runs, with tiny models, few rounds, and no cuDNN or NCCL.
    """

    quick: bool = False

    def compiler(self, model: str) -> str:
        """Returns inductor; under --quick for one model only, since it takes minutes each on few cores."""
        return "aot_eager" if self.quick and model != "roberta" else "inductor"


class Turn:
    """Yielded by a check before its timed part; it continues when nothing else runs on the device."""


ALONE = Turn()


@dataclass(frozen=True)
class Figure:
    """A result of a check.

    Attributes:
        name: name of the figure within its check.
        is_right: whether the figure is within its limit.
        figure: the figure as text.
        limit: the limit as text; empty if there is none.
        data: the numbers behind the figure.
    """

    name: str
    is_right: bool
    figure: str
    limit: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A figure, or the reason why a check has none.

    Attributes:
        check: name of the check.
        status: `PASS`, `FAIL` or `SKIP`.
        name: see `Figure`.
        figure: see `Figure`; otherwise the error's first line, or why the check was skipped.
        limit: see `Figure`.
        crashed: whether the check ended in an error, without a figure.
        data: see `Figure`.
    """

    check: str
    status: str
    name: str
    figure: str
    limit: str = ""
    crashed: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        name = f"{self.check}: {self.name}" if self.name else self.check
        return f"{self.status} {name:<60} {self.figure:<24} {self.limit}".rstrip()


@dataclass(frozen=True)
class Check:
    """A check that yields figures.

    Attributes:
        name: name in the report, matched by `--only`.
        run: yields figures, and `ALONE` before the timed part.
        seconds: time limit, which starts again when the check runs alone.
        needs: required modules besides torch, transformers and accelerate.
    """

    name: str
    run: Callable[[Setting], Iterator[Figure | Turn]]
    seconds: int = 120
    needs: tuple[str, ...] = ()

    def missing(self) -> str:
        """Returns why the check cannot run here, empty if it can."""
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacking)} not installed" if lacking else ""

    def outcomes(self, setting: Setting, wait: Callable[[], object] = lambda: None) -> Iterator[Outcome]:
        """Run the check, and yield its outcomes; an error is an outcome.

        Args:
            setting: how the checks run.
            wait: blocks until nothing else runs on the device.
        """
        if why := self.missing():
            yield Outcome(self.name, SKIP, "", why)
            return
        try:
            for found in self.run(setting):
                if isinstance(found, Turn):
                    wait()
                    continue
                status = PASS if found.is_right else FAIL
                yield Outcome(self.name, status, found.name, found.figure, found.limit, data=found.data)
        except Exception as error:
            traceback.print_exc()
            yield crash(self.name, error_line(error))


def crash(name: str, why: str) -> Outcome:
    """Returns the outcome of a check that ended in an error."""
    return Outcome(name, FAIL, "", why, crashed=True)


def error_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:200]


def within(name: str, value: float, limit: float, text: str = "{:.2e}", **data: Any) -> Figure:
    """Returns a figure that must not exceed its limit; NaN fails."""
    return Figure(name, value <= limit, text.format(value), text.format(limit), {"value": value, **data})


def serve(check: Check, setting: Setting, conditions: str) -> None:
    """Run a check in this process, and print a line for each outcome and for its end.

    When the check waits for its turn, it continues on a line of standard input.

    Args:
        check: the check.
        setting: how the checks run.
        conditions: the conditions, printed first.
    """
    _tell({"conditions": conditions})

    def wait() -> None:
        _tell({"ready": check.name})
        sys.stdin.readline()

    for outcome in check.outcomes(setting, wait):
        _tell({"outcome": asdict(outcome)})
    _tell({"end": check.name})


def clean_up() -> None:
    """Drop compiled code and cached memory, and reset torch's settings."""
    import torch

    torch.cuda.synchronize()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


def _tell(event: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(event), flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """Parse an event that `serve` printed; prints any other line to standard error and returns None."""
    if not line.startswith(MARK):
        print(line, end="", file=sys.stderr)
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return event
