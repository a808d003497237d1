"""A check of gpu/acceptance.py, and the process that runs it."""

import gc
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
# Begins each line of the process that is for the one that started it.
MARK = "@gpu "


@dataclass(frozen=True)
class Setting:
    """How the checks run.

    Attributes:
        quick: tiny models and few rounds, without cuDNN and NCCL: does it run?
    """

    quick: bool = False

    def compiler(self, model: str) -> str:
        """inductor, which takes minutes for each model on a machine with few cores: of --quick for one of them."""
        return "aot_eager" if self.quick and model != "roberta" else "inductor"


class Turn:
    """Yielded by a check that is prepared, before what it times: it goes on when nothing else runs on the device."""


ALONE = Turn()


@dataclass(frozen=True)
class Figure:
    """One thing that was found.

    Attributes:
        name: what it is, below the name of its check.
        is_right: within its limit.
        figure: as it is shown.
        limit: as it is shown; empty where there is none.
        data: the numbers behind it.
    """

    name: str
    is_right: bool
    figure: str
    limit: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A figure, or what kept a check from having one.

    Attributes:
        check: its name.
        status: `PASS`, `FAIL` or `SKIP`.
        name: see `Figure`.
        figure: see `Figure`; the error's line, or why it was left out.
        limit: see `Figure`.
        crashed: there is no figure, since the check ended in an error.
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
    """Something to find out.

    Attributes:
        name: in the report, and for `--only`.
        run: yields what it finds, and `ALONE` before what it times.
        seconds: it may take, and once more when it is alone.
        needs: modules beyond torch, transformers and accelerate.
    """

    name: str
    run: Callable[[Setting], Iterator[Figure | Turn]]
    seconds: int = 120
    needs: tuple[str, ...] = ()

    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""
        lacking = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacking)} not installed" if lacking else ""

    def outcomes(self, setting: Setting, wait: Callable[[], object] = lambda: None) -> Iterator[Outcome]:
        """Run it; an error is an outcome.

        Args:
            wait: returns when nothing else runs on the device.
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
    """The outcome of a check that ended in an error."""
    return Outcome(name, FAIL, "", why, crashed=True)


def error_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:200]


def within(name: str, value: float, limit: float, text: str = "{:.2e}", **data: Any) -> Figure:
    """A figure that must not pass its limit; NaN passes none."""
    return Figure(name, value <= limit, text.format(value), text.format(limit), {"value": value, **data})


def serve(check: Check, setting: Setting, conditions: str) -> None:
    """Run a check in this process, and print a line for each outcome and for its end; a line of the input is its turn.

    Args:
        conditions: told first.
    """
    _tell({"conditions": conditions})

    def wait() -> None:
        _tell({"ready": check.name})
        sys.stdin.readline()

    for outcome in check.outcomes(setting, wait):
        _tell({"outcome": asdict(outcome)})
    _tell({"end": check.name})


def clean_up() -> None:
    """Forget all that was compiled and allocated."""
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
    """The event that `serve` told in a line, None where it is somebody else's."""
    if not line.startswith(MARK):
        print(line, end="", file=sys.stderr)
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return event
