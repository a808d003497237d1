import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.plans.grammar import ConfigError, PlanConfig, PlanRequest, Strategy, parse, parse_file

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


@pytest.mark.parametrize("path", ["plans.txt", "plans", "sub/plans"])
def test_a_file_is_recognised_without_its_ending(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / path).write_text('["Gelu+:1:-1"]')
    assert str(PlanConfig.load(path)) == "Gelu+:1:-1"


def test_ort_s_own_files_are_lists_of_joined_strings(tmp_path):
    path = write(tmp_path, ["Gelu+:1:-1,Add+Gelu+:2:0", "Softmax+:1:-1"])
    assert str(parse_file(path)) == "Gelu+:1:-1,Add+Gelu+:2:0,Softmax+:1:-1"


def test_on_and_off():
    on = {str(request): request.is_on for request in parse("A+:1:-1,B+:2:3,C+:0:-1,D+:1:0").requests}
    assert on == {"A+:1:-1": True, "B+:2:3": True, "C+:0:-1": False, "D+:1:0": False}


# How one place of a valid request is spoilt, and where in the request the error has to point (from 0).
def spoil_strategy(draw, request):
    bad = draw(st.sampled_from(["", "4", "9", "-1", "x", "1.0", " 1", "²", "①"]))
    return f"{request.cluster_id}:{bad}:{request.count}", len(request.cluster_id) + 1


def spoil_count(draw, request):
    bad = draw(st.sampled_from(["", "-2", "-10", "all", "1.5", "--1", " 1", "١"]))
    return f"{request.cluster_id}:{int(request.strategy)}:{bad}", len(request.cluster_id) + 3


def spoil_character(draw, request):
    # Any operator name but its first letter may be followed by a character that no name may have.
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
        ("Gelu+:7:-1", "0 (none), 1 (recompute), 2 (recompute with compromised saving) or 3 (offload to host)"),
        ("Gelu+:1:-2", "-1 (all), 0 (off) or a number of occurrences"),
        ("Gelu+", "has 1 field instead of 3; expected cluster_id:strategy:count"),
        ("Gelu+:1", "has 2 fields instead of 3"),
        ("", "nothing here"),
        ("Gelu+:1:-1,", "nothing here"),
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
        ("", "not JSON, line 1 column 1"),
        ('["Gelu+:1:-1",\n ]', "not JSON, line 2 column 2"),
        ("Gelu+:1:-1", "not JSON, line 1 column 1"),
        ("[]", "the list is empty"),
        ("{}", "expected a JSON list of strings"),
        ('"Gelu+:1:-1"', "expected a JSON list of strings"),
        ("[1]", "expected a JSON list of strings"),
        ('["Gelu+:1:-1", null]', "expected a JSON list of strings"),
        ('[["Gelu+:1:-1"]]', "expected a JSON list of strings"),
        ('[""]', "string 1, column 1: nothing here"),
    ],
)
def test_bad_files(tmp_path, content, reason):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as error:
        PlanConfig.load(str(path))
    assert reason in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    missing, folder, latin = tmp_path / "missing.json", tmp_path / "folder.json", tmp_path / "latin.json"
    folder.mkdir()
    latin.write_bytes('["Gélu+:1:-1"]'.encode("latin-1"))
    for path, reason in ((missing, "No such file"), (folder, "Is a directory"), (latin, "not UTF-8")):
        with pytest.raises(ConfigError, match=reason) as error:
            PlanConfig.load(str(path))
        assert str(path) in str(error.value)


def test_a_bom_is_named_as_what_is_wrong(tmp_path):
    path = tmp_path / "bom.json"
    path.write_bytes('["Gelu+:1:-1"]'.encode("utf-8-sig"))
    with pytest.raises(ConfigError, match="BOM"):
        PlanConfig.load(str(path))


def test_a_missing_file_without_ending_is_told_as_a_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        PlanConfig.load(str(tmp_path / "plans"))


def test_config_errors_are_the_package_s():
    assert issubclass(ConfigError, MemOptError)
