"""The built torch extensions, for whichever test asks for them."""

import os

import pytest

from optimum_memopt.engines.ort import extensions
from optimum_memopt.errors import MemOptError


@pytest.fixture(scope="session")
def environment_with_extensions() -> dict[str, str]:
    """The environment of a process that finds the built extensions: those of the named cache, else of the user's own,
    where they are built if need be."""
    if not extensions.onnxruntime_dir():
        pytest.skip("no onnxruntime-training")
    with pytest.MonkeyPatch.context() as environment:
        if extensions.find() is None:
            environment.delenv(extensions.CACHE_VARIABLE, raising=False)
        if extensions.find() is None:
            try:
                extensions.check_compiler()
            except MemOptError as error:
                pytest.skip(str(error))
            extensions.build()
        return dict(os.environ)
