"""`optimum-cli memopt env`: what is installed, what works here, what is missing and the command to get it.

Nothing heavy is imported before `run()`: optimum imports this module whenever any of its commands starts.
"""

import json
import platform
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from optimum.commands.base import BaseOptimumCLICommand

if TYPE_CHECKING:
    from optimum_memopt.engines.api.factory import Report

LIBRARIES = ("torch", "transformers", "accelerate", "optimum", "deepspeed")


class EnvCommand(BaseOptimumCLICommand):
    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument(
            "--build",
            action="store_true",
            help="Build the C++ extensions that engines can use into the user's cache (1 to 3 minutes).",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")

    def run(self) -> None:
        from optimum_memopt.engines.shared.registry import engine_names, factory
        from optimum_memopt.errors import MemOptError

        factories = [factory(name) for name in engine_names()]
        if self.args.build:
            try:
                for engine in factories:
                    engine.build()
            except MemOptError as error:
                sys.exit(f"error: {error}")
        reports = [engine.environment_report() for engine in factories]
        versions = installed(reports)
        if self.args.json:
            report = {
                "installed": versions,
                "works": [asdict(ability) for report in reports for ability in report.abilities],
                "extensions": {name: path for report in reports for name, path in report.built.items()},
                "advice": advice(reports),
            }
            print(json.dumps(report, indent=2))
        else:
            print(to_text(versions, reports))


def installed(reports: "Sequence[Report]") -> dict[str, str | None]:
    """Versions by name, None for what is not installed."""
    from optimum_memopt.installed import installed_version

    versions = {name: version and version[1] for name in LIBRARIES for version in [installed_version((name,))]}
    own = {name: version for report in reports for name, version in report.installed.items()}
    return {"python": platform.python_version(), **versions, "CUDA (of torch)": _cuda(), **own}


def _cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return None
    return f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)"


def advice(reports: "Sequence[Report]") -> list[str]:
    """When to take which engine, and what `auto` takes."""
    from optimum_memopt.engines.api.options import AUTO
    from optimum_memopt.engines.shared.registry import choose_engines
    from optimum_memopt.errors import MemOptError

    try:
        (name, *_), reason = choose_engines(AUTO)
        default = f"--memory_opt_engine auto takes {name} ({reason})"
    except MemOptError as error:
        default = str(error)
    given = (report.advice for report in reports if report.advice)
    # A recommendation of the engine itself comes first.
    return [*sorted(given, key=lambda line: not line.startswith("recommended")), default]


def to_text(versions: Mapping[str, str | None], reports: "Sequence[Report]") -> str:
    """The reports for a terminal."""
    from tabulate import tabulate

    abilities = [ability for report in reports for ability in report.abilities]
    extension_paths = {name: path for report in reports for name, path in report.built.items()}

    parts = [
        tabulate([(name, version or "-") for name, version in versions.items()], headers=("installed", "version")),
        tabulate(
            [(a.what, "yes" if a.works else "no", a.why) for a in abilities],
            headers=("what", "works", "why"),
            maxcolwidths=(None, None, 70),
        ),
    ]
    if extension_paths:
        parts.append("\n".join(("torch extensions:", *(f"  {path}" for path in extension_paths.values()))))
    if missing := [a for a in abilities if a.command]:
        parts.append("\n".join(("to get what is missing:", *(f"  {a.what}: {a.command}" for a in missing))))
    parts.append("\n".join(("which engine:", *(f"  {line}" for line in advice(reports)))))
    return "\n\n".join(parts)
