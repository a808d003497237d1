"""The page in a browser, if one is installed: no text overlaps or is cut off; a screenshot of each page is kept."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from optimum_memopt.report.page import render
from tests.browser import Browser, find
from tests.unit.made import FULL, MIB, timeline

pytestmark = pytest.mark.skipif(find() is None, reason="needs Chromium or Chrome: python tests/browser.py")

# Returns the boxes of each picture and its texts, and how much wider the page is than the window.
MEASURE = """
(() => {
  const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
  const pictures = [...document.querySelectorAll("svg")].map((svg) => ({
    box: box(svg),
    texts: [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim()).map((text) => ({
      text: text.textContent.trim(), box: box(text)
    }))
  }));
  return {pictures, wide: document.documentElement.scrollWidth - document.documentElement.clientWidth};
})()
"""
# Pixels; a text's box has room above and below its letters.
ROOM = 3

CASES = {
    "full": FULL,
    "many-layers": replace(FULL, timeline=timeline(layers=48)),
    "large": replace(FULL, timeline=timeline(layers=96, per_layer=40)),
    "one-layer": replace(FULL, timeline=timeline(layers=1)),
    "large-process": replace(FULL, timeline=timeline(other=4096 * MIB)),
    "long-runs": replace(
        FULL, densities={f"input_{n}": [(step, step % 100) for step in range(512)] for n in range(4)}
    ),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def overlap(one: list[float], other: list[float]) -> bool:
    left, right = max(one[0], other[0]), min(one[2], other[2])
    top, bottom = max(one[1], other[1]), min(one[3], other[3])
    return right - left > ROOM and bottom - top > ROOM


def measure(browser: Browser, path: Path, text: str, width: int) -> dict[str, Any]:
    path.write_text(text)
    browser.open(path, width)
    return browser.evaluate(MEASURE)


def cut(picture: dict[str, Any]) -> list[str]:
    left, top, right, bottom = picture["box"]
    outside = [
        (text, (left - text["box"][0], top - text["box"][1], text["box"][2] - right, text["box"][3] - bottom))
        for text in picture["texts"]
    ]
    return [text["text"] for text, beyond in outside if max(beyond) > ROOM]


def overlapping(picture: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = combinations(picture["texts"], 2)
    return [(one["text"], other["text"]) for one, other in pairs if overlap(one["box"], other["box"])]


@pytest.mark.parametrize("width", [1200, 700], ids=["wide", "narrow"])
@pytest.mark.parametrize("name", CASES)
def test_texts_of_pictures_neither_overlap_nor_are_cut(
    browser: Browser, tmp_path: Path, name: str, width: int
) -> None:
    measured = measure(browser, tmp_path / "report.html", render(CASES[name]).html, width)
    assert measured["wide"] <= 0, "the page has to be scrolled sideways"
    assert len(measured["pictures"]) >= 3
    for picture in measured["pictures"]:
        assert not cut(picture)
        assert not overlapping(picture)
    if name == "full":
        (tmp_path / "report.png").write_bytes(browser.screenshot())
        assert (tmp_path / "report.png").stat().st_size > 10_000


def test_what_is_wrong_is_found(browser: Browser, tmp_path: Path) -> None:
    texts = '<text x="10" y="50">one</text><text x="20" y="52">two</text><text x="150" y="90">beyond</text>'
    page = (
        f'<html><body><svg width="160" height="100">{texts}</svg><div style="width: 2000px">wide</div></body></html>'
    )
    measured = measure(browser, tmp_path / "wrong.html", page, 700)
    (picture,) = measured["pictures"]
    assert measured["wide"] > 0
    assert cut(picture) == ["beyond"]
    assert overlapping(picture) == [("one", "two")]
