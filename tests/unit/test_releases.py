"""Patches of other packages state their requirements and what is lost without them."""

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import masking_utils
from transformers.utils import output_capturing

from optimum_memopt.engines.shared.registry import factory
from optimum_memopt.engines.torch_compat import fully_shard, releases
from optimum_memopt.engines.torch_compat.attention import MASKS
from optimum_memopt.engines.torch_compat.patches import Name, Patch
from optimum_memopt.errors import UnsupportedModelError


@pytest.mark.parametrize("patch", releases.PATCHES, ids=lambda patch: patch.subject)
def test_the_installed_releases_take_every_patch(patch: Patch) -> None:
    assert patch.problem() == ""


def test_a_name_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(output_capturing, "_active_collector")
    (line,) = releases.what_is_less()
    assert line.startswith("a forward that collects hidden states or attentions breaks its graph")
    assert "has no transformers.utils.output_capturing._active_collector; tested with transformers 5.2" in line


def test_an_earlier_name_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either name suffices: transformers 5.18 calls `is_torchdynamo_exporting`, earlier releases call `is_tracing`."""
    monkeypatch.delattr(masking_utils, "is_torchdynamo_exporting")
    assert MASKS.problem() == ""
    monkeypatch.delattr(masking_utils, "is_tracing")
    assert "no transformers.masking_utils.is_torchdynamo_exporting" in MASKS.problem()


def test_before_the_code_there_is_nothing_to_patch() -> None:
    assert dataclasses.replace(MASKS, since="99.0", names=(Name("transformers", "gone"),)).problem() == ""
    assert dataclasses.replace(MASKS, package="none-such", names=(Name("none", "such"),)).problem() == ""


def test_the_environment_report_has_every_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    abilities = {ability.what: ability for ability in factory("compile").environment_report().abilities}
    found = abilities[MASKS.subject]
    assert not found.works and found.why.startswith(MASKS.loss)
    assert all(abilities[patch.subject].works for patch in releases.PATCHES if patch is not MASKS)


def test_ranks_that_share_parameters_are_refused_where_their_code_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class FSDPParamGroup:
        """A class of a release that renames everything."""

    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(fully_shard, "is_sharded", lambda each: each is model)
    releases.check_for_ranks(model, by_zero3=False)
    monkeypatch.setattr(_fsdp_param_group, "FSDPParamGroup", FSDPParamGroup)
    with pytest.raises(UnsupportedModelError, match=r"no plan under FSDP2: torch .* without fsdp_params.*torch 2\.9"):
        releases.check_for_ranks(model, by_zero3=False)
    releases.check_for_ranks(torch.nn.Linear(2, 2), by_zero3=False)


def test_a_module_that_draws_while_it_is_imported_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawing.py").write_text("import random\nvalue = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    assert not Name("drawing", "value").problem()
    assert random.getstate() == before
    sys.modules.pop("drawing")
