"""The baselines: each script without an engine, once."""

from collections.abc import Callable

import pytest

from tests.train.trainers.harness import Outcome, Script, run


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Script], Outcome]:
    """`stock(name, script)`: what the script leaves without this package."""
    done: dict[str, Outcome] = {}

    def baseline(name: str, script: Script) -> Outcome:
        if name not in done:
            done[name] = run(script, tmp_path_factory.mktemp(name), "none")
        return done[name]

    return baseline
