"""Whatever a config is made of, it is read or refused in one line of a bounded length."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.errors import QUOTED, excerpt
from optimum_memopt.plans.grammar import ConfigError, PlanConfig, parse
from optimum_memopt.plans.matching import match

GOOD = "Gelu+:1:-1,FusedMatMul+Add+:2:0,Softmax+:3:4"
LONG = "N" * 300

# Of all that is in an error's line no more than three things are quoted, of which two may have place and text.
LONGEST_LINE = 5 * QUOTED + 300


def line(error: ConfigError) -> str:
    text = str(error)
    assert text.isprintable() and len(text) < LONGEST_LINE, text
    return text


@pytest.mark.parametrize(
    "config, message",
    [
        ("\0", "column 1"),
        ("Ge\0lu+:1:-1", r'column 1: "Ge\x00lu+" is not a cluster id'),
        ("Gelu+:1:" + "9" * 5000, 'column 9: count "9999'),
        ("Gelu+:" + "1" * 5000 + ":-1", 'column 7: strategy "1111'),
        ("Gelu+:1:-" + "0" * 5000, 'column 9: count "-000'),
        (LONG, 'column 1: "NNN'),
        (f"/{LONG}", "File name too long"),
        (f"{LONG}:1:-1", 'column 1: "NNN'),
        ("Gelu+:1:-1," * 10_000 + "Add+:1:1", "column 12: Gelu+:1:-1 is a duplicate of Gelu+:1:-1 at column 1"),
        (f"{LONG}+:1:-1,{LONG}+:2:-1", "contradicts NNN"),
        ("\ud800", r'column 1: "\ud800" has 1 field instead of 3'),
        ("\ud800.json", r"config file \ud800.json: "),
        ("\0.json", r"config file \x00.json: embedded null byte"),
        ("a\nb:1:1", r'column 1: "a\nb" is not a cluster id'),
        ("/dev/zero", "config file /dev/zero: larger than 1 MiB"),
        ("/", "config file /: Is a directory"),
        ("Gelu+:1:-\u20281", r'count "-\u20281"'),
    ],
    ids=lambda value: excerpt(value)[:20],
)
def test_hostile_text(config, message):
    with pytest.raises(ConfigError) as caught:
        PlanConfig.load(config)
    assert message in line(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[" * 100_000, "expected a JSON list of strings"),
        (b"[" * 400_000 + b"]" * 400_000, "expected a JSON list of strings"),
        (b"[" + b"1" * 5000 + b"]", "expected a JSON list of strings"),
        (b'["' + b"[" * 2_000_000 + b'"]', "larger than 1 MiB"),
        (b'["\\ud800"]', r'"\ud800" has 1 field'),
        (b'["Gelu+:1:-1\\u0000"]', 'count "-1\\x00"'),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"null", "expected a JSON list of strings"),
        (b'["' + LONG.encode() + b'"]', "has 1 field"),
    ],
    ids=range(9),
)
def test_hostile_files(tmp_path, content, message):
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        PlanConfig.load(str(path))
    assert message in line(caught.value)


def test_long_names_are_cut_where_no_graph_has_them():
    for config in (f"{LONG}+:1:-1", f"{LONG}+:2:-1", f"{LONG}+:0:-1,{LONG}a+:1:1"):
        with pytest.raises(ConfigError) as caught:
            match(parse(config), ["Gelu+:1:-1"], here="engine").check()
        assert 'no plan "NNN' in line(caught.value)
    with pytest.raises(ConfigError) as caught:
        match(parse(f"{LONG}+:2:-1"), [f"{LONG}+:1:-1"], here="engine").check()
    assert line(caught.value).endswith("this plan has strategy 1 only")


@pytest.mark.parametrize("around", [0, 79, 100, 150, 299])
def test_an_excerpt_holds_what_it_is_cut_around(around):
    text = "".join(chr(0x4E00 + index) for index in range(300))
    shown = excerpt(text, around)
    assert text[around] in shown and len(shown) == QUOTED
    assert excerpt("é" * QUOTED) == "é" * QUOTED
    assert len(excerpt("\0" * 300)) == QUOTED
    assert excerpt(10**5000) == "of type int"


MUTATION = st.tuples(st.integers(0, len(GOOD)), st.integers(0, 3), st.text(max_size=3))


def mutated(mutations):
    text = GOOD
    for at, cut, put in mutations:
        text = text[:at] + put + text[at + cut :]
    return text


SURROGATES = st.text(st.characters(codec=None), max_size=40)
CONFIG_CHARACTERS = st.text("GeluAdd+:,-0123456789/ .\0\n", max_size=60)
TEXTS = st.one_of(
    st.lists(MUTATION, min_size=1, max_size=3).map(mutated),
    CONFIG_CHARACTERS,
    SURROGATES,
    st.tuples(CONFIG_CHARACTERS, st.integers(2, 500)).map(lambda pair: pair[0] * pair[1]),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(SURROGATES, inner), max_leaves=6)
VALUES = st.one_of(JSON, st.lists(TEXTS, max_size=3), st.dictionaries(TEXTS, LEAVES, max_size=3), st.binary())


def read(source) -> None:
    """Reads it, or ends in a `ConfigError`; what was read says the same again."""
    with contextlib.suppress(ConfigError):
        try:
            config = PlanConfig.load(source)
        except ConfigError as error:
            line(error)
            raise
        assert parse(str(config)) == config


@given(TEXTS)
def test_any_text_is_read_or_refused(text):
    read(text)


@given(VALUES)
def test_any_value_is_read_or_refused(value):
    read(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            read(Path(value))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("configs") / "plans.json"


@given(content=st.one_of(JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=60)))
def test_any_file_is_read_or_refused(path, content):
    for part in (content, content[: len(content) // 2]):
        path.write_bytes(part)
        read(path)


def test_the_forms_of_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plans").write_text('["Gelu+:1:-1", "Add+:2:0"]')
    expected = parse("Gelu+:1:-1,Add+:2:0")
    for source in (
        expected,
        str(expected),
        ["Gelu+:1:-1", "Add+:2:0"],
        ("Gelu+:1:-1,Add+:2:0",),
        {"Gelu+": 1, "Add+": "2:0"},
        Path("plans"),
        "plans",
    ):
        assert PlanConfig.load(source) == expected, source


@pytest.mark.parametrize(
    "source, message",
    [
        (
            5,
            "memory-optimizer config 5: allowed are a string, a list of strings, a dict of ",
        ),
        ([], "the list is empty"),
        ({}, "the dict is empty"),
        (["Gelu+:1:-1", 3], 'item 2: expected a string such as "Gelu+:1:-1", not 3'),
        ({"Gelu+": True}, 'Gelu+: True: expected a cluster id and its strategy, for example {"Gelu+": 1}'),
        ({1: 1}, "1: 1: expected a cluster id and its strategy"),
        ({"Gelu+": 7}, 'column 7: strategy "7" is not one of'),
        ({"Gelu+": 10**5000}, "column 7: strategy"),
        (Path("a:b"), 'config file a:b: with ":" in it, its name must end in .json'),
        (Path("no-such-file"), "config file no-such-file: No such file"),
    ],
    ids=lambda value: excerpt(value)[:20],
)
def test_other_values_are_refused(source, message):
    with pytest.raises(ConfigError) as caught:
        PlanConfig.load(source)
    assert message in line(caught.value)
