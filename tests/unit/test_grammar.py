"""Configs: reading and writing, errors with columns, hostile text, and matching with a graph's ids."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.errors import QUOTED, excerpt
from optimum_memopt.plans.grammar import ConfigError, PlanConfig, PlanRequest, Strategy, parse, parse_file
from optimum_memopt.plans.matching import UNFUSED, is_fused, match, operators, translate, unfused

NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,7}", fullmatch=True)
CLUSTER_ID = st.lists(NAME, min_size=1, max_size=3).map(lambda names: "".join(f"{name}+" for name in names))
COUNT = st.integers(-1, 10**6)
REQUEST = st.builds(PlanRequest, CLUSTER_ID, st.sampled_from(Strategy), COUNT)
CONFIG = st.lists(REQUEST, min_size=1, max_size=4, unique_by=lambda request: request.cluster_id).map(
    lambda requests: PlanConfig(tuple(requests))
)
SPACES = st.text(" \t", max_size=2)


def column(error):
    return int(re.search(r"column (\d+)", str(error.value))[1])


def write(tmp_path, content):
    path = tmp_path / "plans.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@given(CONFIG)
def test_text_round_trip(config):
    assert parse(str(config)) == config


@given(config=CONFIG, data=st.data())
def test_spaces_around_requests_do_not_matter(config, data):
    spaced = ",".join(data.draw(SPACES) + str(request) + data.draw(SPACES) for request in config.requests)
    assert parse(spaced) == config


@given(config=CONFIG)
def test_json_round_trip(tmp_path_factory, config):
    path = write(tmp_path_factory.mktemp("grammar"), config.to_json())
    assert PlanConfig.load(str(path)) == parse_file(path) == config


def test_ort_s_own_files_are_lists_of_joined_strings(tmp_path):
    path = write(tmp_path, ["Gelu+:1:-1,Add+Gelu+:2:0", "Softmax+:1:-1"])
    assert str(parse_file(path)) == "Gelu+:1:-1,Add+Gelu+:2:0,Softmax+:1:-1"


def test_on_and_off():
    on = {str(request): request.is_on for request in parse("A+:1:-1,B+:2:3,C+:0:-1,D+:1:0").requests}
    assert on == {"A+:1:-1": True, "B+:2:3": True, "C+:0:-1": False, "D+:1:0": False}


# Each spoiler breaks one part of a valid request; returns it and the offset of the error within it (from 0).
def spoil_strategy(draw, request):
    bad = draw(st.sampled_from(["", "5", "9", "-1", "x", "1.0", " 1", "²", "①"]))
    return f"{request.cluster_id}:{bad}:{request.count}", len(request.cluster_id) + 1


def spoil_count(draw, request):
    bad = draw(st.sampled_from(["", "-2", "-10", "all", "1.5", "--1", " 1", "١"]))
    return f"{request.cluster_id}:{int(request.strategy)}:{bad}", len(request.cluster_id) + 3


def spoil_character(draw, request):
    # Any position after the first letter, to insert a character that is not allowed in names.
    at = draw(st.integers(1, len(request.cluster_id) - 1))
    bad = draw(st.sampled_from("-. /*é"))
    begin = request.cluster_id.rfind("+", 0, at) + 1
    spoilt = request.cluster_id[:at] + bad + request.cluster_id[at:]
    return f"{spoilt}:{int(request.strategy)}:{request.count}", begin


def drop_last_plus(draw, request):
    begin = request.cluster_id.rfind("+", 0, -1) + 1
    return f"{request.cluster_id[:-1]}:{int(request.strategy)}:{request.count}", begin


def change_fields(draw, request):
    return draw(st.sampled_from([request.cluster_id, f"{request.cluster_id}:1", f"{request}:1", f"{request}:"])), 0


def empty(draw, request):
    return "", 0


SPOILERS = (spoil_strategy, spoil_count, spoil_character, drop_last_plus, change_fields, empty)


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
@given(data=st.data(), config=CONFIG)
def test_an_error_points_at_its_column(tmp_path_factory, spoil, data, config):
    victim = data.draw(st.integers(0, len(config.requests) - 1))
    pieces = [str(request) for request in config.requests]
    spoilt, offset = spoil(data.draw, config.requests[victim])
    lead = data.draw(SPACES) if spoilt else ""
    text = ",".join([*pieces[:victim], lead + spoilt, *pieces[victim + 1 :]])
    expected = len(",".join([*pieces[:victim], ""])) + len(lead) + offset + 1
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert column(error) == expected
    assert str(error.value).endswith(f'in "{excerpt(text, around=expected - 1)}"')
    assert "\n" not in str(error.value)

    path = write(tmp_path_factory.mktemp("grammar"), ["Never+Used+Elsewhere+Than+Here+:1:-1", text])
    with pytest.raises(ConfigError) as error:
        parse_file(path)
    assert f"{path}, string 2, column {expected}:" in str(error.value)


@pytest.mark.parametrize(
    "text, hint",
    [
        ("Gelu:1:-1", 'did you mean "Gelu+"?'),
        ("Add+Gelu:1:-1", 'did you mean "Add+Gelu+"?'),
        ("Gelu+:7:-1", "0 (none), 1 (recompute), 2 (recompute with compromised saving), 3 (offload to host) or 4"),
        ("Gelu+:1:-2", "-1 (all), 0 (off) or a number of occurrences"),
        ("Gelu+", "has 1 field instead of 3; expected cluster_id:strategy:count"),
        ("Gelu+:1", "has 2 fields instead of 3"),
        ("", "empty item"),
        ("Gelu+:1:-1,", "empty item"),
    ],
)
def test_an_error_says_what_is_allowed(text, hint):
    with pytest.raises(ConfigError, match=re.escape(hint)):
        parse(text)


@given(config=CONFIG, data=st.data())
def test_an_id_twice_is_a_duplicate_or_a_contradiction(config, data):
    first = data.draw(st.integers(0, len(config.requests) - 1))
    again = data.draw(REQUEST)
    again = PlanRequest(config.requests[first].cluster_id, again.strategy, again.count)
    text = f"{config},{again}"
    with pytest.raises(ConfigError) as error:
        parse(text)
    same = again == config.requests[first]
    assert ("is a duplicate of" in str(error.value)) is same
    assert ("contradicts" in str(error.value)) is not same
    assert column(error) == len(str(config)) + 2
    before = "".join(f"{request}," for request in config.requests[:first])
    assert str(error.value).endswith(f"{config.requests[first]} at column {len(before) + 1}")


def test_an_id_in_two_strings_of_a_file_names_both_places(tmp_path):
    path = write(tmp_path, ["Gelu+:1:-1", "Add+:1:-1,Gelu+:2:-1"])
    with pytest.raises(ConfigError) as error:
        parse_file(path)
    assert f"{path}, string 2, column 11: Gelu+:2:-1 contradicts Gelu+:1:-1" in str(error.value)
    assert f"{path}, string 1, column 1" in str(error.value)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "not JSON, line 1 column 1"),
        (b'["Gelu+:1:-1",\n ]', "not JSON, line 2 column 2"),
        (b"Gelu+:1:-1", "not JSON, line 1 column 1"),
        (b"[]", "the list is empty"),
        *((text, "expected a JSON list of strings") for text in (b"{}", b'"Gelu+:1:-1"', b"[1]", b"null")),
        *((text, "expected a JSON list of strings") for text in (b'["Gelu+:1:-1", null]', b'[["Gelu+:1:-1"]]')),
        *((text, "expected a JSON list of strings") for text in (b"[" * 100_000, b"[" * 400_000 + b"]" * 400_000)),
        (b"[" + b"1" * 5000 + b"]", "expected a JSON list of strings"),
        (b'[""]', "string 1, column 1: empty item"),
        (b'["' + b"[" * 2_000_000 + b'"]', "larger than 1 MiB"),
        (b'["\\ud800"]', r'"\ud800" has 1 field'),
        (b'["Gelu+:1:-1\\u0000"]', 'count "-1\\x00"'),
        (b'["' + b"N" * 300 + b'"]', "has 1 field"),
        (b"\xff\xfe", "not UTF-8 text"),
        ('["Gélu+:1:-1"]'.encode("latin-1"), "not UTF-8"),
        ('["Gelu+:1:-1"]'.encode("utf-8-sig"), "BOM"),
    ],
    ids=lambda value: excerpt(str(value))[:20],
)
def test_bad_files(tmp_path, content, reason):
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        PlanConfig.load(str(path))
    assert reason in line(error.value) and str(path) in str(error.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name, reason in (("missing.json", "No such file"), ("plans", "No such file"), ("folder.json", "directory")):
        with pytest.raises(ConfigError, match=reason) as error:
            PlanConfig.load(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value)


GOOD = "Gelu+:1:-1,FusedMatMul+Add+:2:0,Softmax+:3:4"
LONG = "N" * 300

# An error line quotes at most three things, two of which may have a place and a text.
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


def test_long_names_are_cut_where_no_graph_has_them():
    for config in (f"{LONG}+:1:-1", f"{LONG}+:2:-1", f"{LONG}+:0:-1,{LONG}a+:1:1"):
        with pytest.raises(ConfigError) as caught:
            match(parse(config), ["Gelu+:1:-1"], here="engine").check()
        assert 'no plan "NNN' in line(caught.value)
    with pytest.raises(ConfigError) as caught:
        match(parse(f"{LONG}+:2:-1"), [f"{LONG}+:1:-1"], here="engine").check()
    assert line(caught.value).endswith("this plan supports only strategy 1")


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
    """Read a config that round-trips, or end with a one-line `ConfigError`."""
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
    Path("sub").mkdir()
    for path in ("plans.txt", "plans", "sub/plans"):
        Path(path).write_text('["Gelu+:1:-1", "Add+:2:0"]')
    expected = parse("Gelu+:1:-1,Add+:2:0")
    values = (expected, str(expected), ["Gelu+:1:-1", "Add+:2:0"], ("Gelu+:1:-1,Add+:2:0",))
    for source in (*values, {"Gelu+": 1, "Add+": "2:0"}, Path("plans"), "plans", "plans.txt", "sub/plans"):
        assert PlanConfig.load(source) == expected, source


@pytest.mark.parametrize(
    "source, message",
    [
        (5, "memory-optimizer config 5: allowed: a string, a list of strings, a dict of "),
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


# Ids seen in one graph of RoBERTa: with the CUDA provider's fusions (upstream's docs) and on the CPU provider.
CUDA = {"BiasGelu+", "BiasSoftmax+", "BitmaskDropout+", "BitmaskBiasDropout+", "FusedMatMul+", "LayerNormalization+"}
CPU = {"Gelu+", "Softmax+", "Dropout+", "FusedMatMul+Add+", "FusedMatMul+Add+Dropout+", "LayerNormalization+", "Add+"}


def test_operators_of_an_id():
    assert operators("FusedMatMul+Add+Gelu+") == ("FusedMatMul", "Add", "Gelu")
    assert operators("Gelu+") == ("Gelu",)


@pytest.mark.parametrize(
    "requested, existing_id",
    [
        ("BiasGelu+", "Gelu+"),
        ("BiasSoftmax+", "Softmax+"),
        ("BitmaskDropout+", "Dropout+"),
        ("FusedMatMul+BiasDropout+", "FusedMatMul+Add+Dropout+"),
        ("FusedMatMul+BitmaskBiasDropout+", "FusedMatMul+Add+Dropout+"),
    ],
)
def test_recipes_for_cuda_are_understood_on_the_cpu(requested, existing_id):
    assert is_fused(requested) and not is_fused(existing_id)
    assert translate(requested, CPU) == existing_id


def test_recipes_for_the_cpu_are_understood_on_cuda():
    meant = {"Gelu+": "BiasGelu+", "Softmax+": "BiasSoftmax+", "Dropout+": "BitmaskDropout+"}
    assert {requested: translate(requested, CUDA) for requested in meant} == meant


@pytest.mark.parametrize("existing", [CPU, CUDA, CPU | CUDA])
def test_an_id_that_exists_is_itself(existing):
    assert {translate(cluster_id, existing) for cluster_id in existing} == existing
    assert all(translate(cluster_id, existing) == cluster_id for cluster_id in existing)


def test_an_id_of_another_activation_is_not_found():
    assert translate("Tanh+", CPU) is None
    assert translate("BiasGelu+", {"Softmax+", "Add+"}) is None
    assert translate("Gelu+Add+", CPU) is None
    assert translate("Gelu+", set()) is None


def test_the_nearest_spelling_wins_and_the_order_of_the_set_does_not_matter():
    assert translate("BiasGelu+", {"Add+Gelu+", "Gelu+"}) == "Gelu+"
    assert translate("BiasGelu+", {"Add+Gelu+"}) == "Add+Gelu+"
    fused = ["BiasDropout+", "BitmaskDropout+", "BiasSoftmaxDropout+"]
    assert len({translate("Dropout+", order) for order in (fused, fused[::-1])}) == 1


def test_several_fused_operators_are_spelled_in_every_combination():
    assert unfused("Gelu+") == ("Gelu+",)
    spelled = unfused("BiasGelu+BiasSoftmax+")
    assert len(spelled) == len(set(spelled)) == len(UNFUSED["BiasGelu"]) * len(UNFUSED["BiasSoftmax"])
    assert {"Gelu+Softmax+", "Add+Gelu+Add+Softmax+"} <= set(spelled)
    assert not any(is_fused(cluster_id) for cluster_id in spelled)
