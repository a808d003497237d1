import pytest
from hypothesis import given, strategies

from optimum_memopt.errors import MemOptError
from optimum_memopt.sizes import gib_text, parse_budget, text_of_at_least


@pytest.mark.parametrize(
    "text, size",
    [
        *((text, 24 * 2**30) for text in ("24GiB", "24gib")),
        *((text, 24 * 10**9) for text in ("24GB", "24gb", "24Gb")),
        *(("1.5 GiB", 3 * 2**29), ("800MiB", 800 * 2**20), ("64kB", 64_000), ("0.1TiB", 2**40 // 10)),
    ],
)
def test_a_size_is_exact_and_a_lower_case_b_is_bytes(text, size):
    assert parse_budget(text).on_device(1, 2) == size


def test_shares_and_auto_depend_on_the_device():
    assert parse_budget("90%").on_device(1000, 700) == 900
    assert parse_budget("33.3%").on_device(10**12, 0) == 333 * 10**9
    assert parse_budget("auto").on_device(1000, 700) == 700


@pytest.mark.parametrize(
    "text, why",
    [
        ("24", "a number needs a unit, such as 24GiB or 24%"),
        ("1.5", "a number needs a unit, such as 1.5GiB or 1.5%"),
        ("lots", "shares of the device's memory such as 90%, and auto"),
        *((text, "allowed: sizes such as 24GiB") for text in ("24G", "24Gbit", "", "²GiB")),
        *((text, "a size is at least one byte and at most 1048576 TiB") for text in ("0GiB", "-1GiB", "2000000TiB")),
        *((text, "a share is more than 0% and at most 100%") for text in ("0%", "-5%", "101%")),
        ("-5", "a number needs a unit, such as 24GiB or 24%"),
        *((f"{number}GiB", "allowed: sizes") for number in ("9" * 400, "9" * 5000, "0." + "9" * 5000)),
        *((text, "allowed: sizes") for text in ("9" * 5000 + "%", "9" * 5000)),
    ],
)
def test_what_is_no_size_is_refused_in_one_line(text, why):
    with pytest.raises(MemOptError, match="--memory_opt_budget ") as error:
        parse_budget(text)
    assert why in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


def test_sizes_are_shown_in_units_of_1024():
    assert [gib_text(size) for size in (24 * 2**30, 800 * 2**20, 0)] == ["24.00 GiB", "800.0 MiB", "0.0 MiB"]


@given(strategies.integers(1, 2**40))
def test_a_size_rounded_up_is_a_budget_of_at_least_that(size):
    budget = parse_budget(text_of_at_least(size)).bytes
    assert size - 1 <= budget <= size * 1.01 + 2**17
