import pytest

from optimum_memopt.plans.matching import UNFUSED, is_fused, operators, translate, unfused

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


@pytest.mark.parametrize(
    "requested, existing_id", [("Gelu+", "BiasGelu+"), ("Softmax+", "BiasSoftmax+"), ("Dropout+", "BitmaskDropout+")]
)
def test_recipes_for_the_cpu_are_understood_on_cuda(requested, existing_id):
    assert translate(requested, CUDA) == existing_id


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
