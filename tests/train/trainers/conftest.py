from collections.abc import Callable

import pytest

from tests.train.trainers.harness import Outcome, Script, run


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Script], Outcome]:
    """Returns `stock(name, script)`, which runs a script once without this package and returns the outcome."""
    done: dict[str, Outcome] = {}

    def baseline(name: str, script: Script) -> Outcome:
        if name not in done:
            done[name] = run(script, tmp_path_factory.mktemp(name), "none")
        return done[name]

    return baseline
