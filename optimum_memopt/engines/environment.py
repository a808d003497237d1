"""What `optimum-cli memopt env` asks each engine's package for: `environment.report() -> Report`."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ability:
    """Something a user may want: whether it works here, why (not), and the shell command that gets it ("" if none)."""

    what: str
    works: bool
    why: str
    command: str = ""


@dataclass(frozen=True)
class Report:
    """What an engine finds on this machine.

    Attributes:
        installed: versions of what the engine stands on, None for what is not there.
        abilities: the engine itself first.
        advice: when to take it; empty when it does not work here.
        built: paths of what the package has built for itself, by name.
    """

    installed: Mapping[str, str | None]
    abilities: tuple[Ability, ...]
    advice: str = ""
    built: Mapping[str, str] = field(default_factory=dict)
