import pytest

from optimum_memopt.engines.shared.registry import engine_names


@pytest.fixture(params=engine_names())
def engine(request):
    return request.param
