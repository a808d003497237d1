"""Writes test durations into the tables of docs/testing.md: `make test-times`, on a quiet machine."""

import collections
import os
import platform
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "testing.md"
SLOWEST = 20
_began = time.time()


def folder(name: str) -> str:
    """Returns the tier of a test from its name."""
    return name.split("/")[1] if name.count("/") > 1 else "others"


def tables(reports: list[pytest.TestReport], wall: float) -> dict[str, str]:
    from shared import to_markdown

    seconds: collections.Counter[str] = collections.Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration
    passed = {report.nodeid for report in reports if report.when == "call" and report.passed}
    tiers = collections.defaultdict(list)
    for name in seconds:
        tiers[folder(name)].append(name)
    rows = [
        {"folder": f"`tests/{tier}`", "tests": float(len(names)), "seconds": sum(seconds[name] for name in names)}
        for tier, names in sorted(tiers.items())
    ]
    slowest = [
        {"seconds": value, "test": f"`{name.removeprefix('tests/')}`"} for name, value in seconds.most_common(SLOWEST)
    ]
    where = f"Python {platform.python_version()}, {os.cpu_count()} processors of {platform.machine()}"
    head = f"{len(passed)} tests passed in {wall / 60:.1f} minutes ({where}); seconds of one worker:"
    return {"times": f"{head}\n\n{to_markdown(rows, {})}", "slowest": to_markdown(slowest, {})}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from shared import fill

    reports = [
        report
        for kind in ("passed", "failed", "")
        for report in terminalreporter.stats.get(kind, [])
        if isinstance(report, pytest.TestReport)
    ]
    fill(PAGE, tables(reports, time.time() - _began))
    terminalreporter.write_line(f"==> {PAGE} has the times of this run")
