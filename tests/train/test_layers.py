"""Equal layers that are compiled once: plans that differ by layer, and their predictions. `test_matrix.py` tests the
gradients of all models."""

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import allocated

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.compile.capture.traced_forward import TracedForward
from optimum_memopt.engines.compile.options import AUTO, LAYER, MODEL
from optimum_memopt.engines.compile.predict.planner import Planner
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError, UnsupportedModelError
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import Budget
from tests.compiled import below_recompute, hold_still, selection
from tests.gradients import Batch, accumulate, assert_bitwise_same_step, assert_same_step
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_caveat import Output
from tests.train.test_step_memory import EXACT, measured
from tests.trainer_runs import log_lines

LAYERS = 5


class Perceptrons(torch.nn.Module):
    """Small layers for tests that do not depend on the kind of layer; takes a fifth of a transformer's time."""

    class Block(torch.nn.Module):
        def __init__(self, width: int, dropout: float) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
            self.drop = torch.nn.Dropout(dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))

    def __init__(self, layers: int = LAYERS, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block(width, dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Output:
        for layer in self.layers:
            x = layer(x)
        return Output(loss=x.square().mean())


def deep(name: str) -> torch.nn.Module:
    return ZOO[name].build(**ZOO[name].deep(LAYERS))


def attached(model: torch.nn.Module, chosen: Selection, unit: str = LAYER) -> CompileEngine:
    engine = CompileEngine(chosen, "aot_eager", loss="plain", unit=unit)
    engine.attach(model)
    return engine


@pytest.fixture
def steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)


@in_turn
@pytest.mark.parametrize("count", nightly([1, 3, -1], but=[3]))
def test_a_count_is_of_layers(count: int) -> None:
    model, batch = deep("roberta-mlm"), ZOO["roberta-mlm"].batch()
    plain = copy.deepcopy(model)
    engine = attached(model, selection(f"Softmax+:1:{count}"))
    assert_bitwise_same_step(model, plain, batch)
    (row,) = engine.plans().enabled
    assert (row.frequency, row.applied_count) == (LAYERS, LAYERS if count < 0 else count)
    saved, peak = measured(model, batch)
    assert engine.predictor.saved() == pytest.approx(saved, **EXACT)
    assert engine.predictor.activations() == pytest.approx(peak, **EXACT)
    engine.detach()


@in_turn
def test_a_name_means_the_same_row_in_all_graphs() -> None:
    """A row's name means the same in all graphs, although the graph after GPT-2's layers has a similar norm."""
    model, batch = deep("gpt2"), ZOO["gpt2"].batch()
    engine = attached(model, selection("LayerNormalization+Reshape+:1:-1"))
    accumulate(model, [batch])
    assert [(row.config, row.applied_count) for row in engine.plans().enabled] == [
        ("LayerNormalization+Reshape+:1:-1", 2 * LAYERS)
    ]
    engine.detach()


def within(model: torch.nn.Module, batch: Batch, share: float) -> tuple[CompileEngine, int]:
    """Returns an engine, and its budget, with room for a share of the activations without a plan."""
    free = attached(model, Selection())
    accumulate(model, [batch])
    footprint = free.predictor.footprint()
    free.detach()
    budget = footprint.peak - int((1 - share) * footprint.activations)
    return attached(model, Selection(budget=Budget(f"{budget} bytes", budget))), budget


@pytest.mark.parametrize("name", nightly(["own", "roberta-mlm", "llama", "t5", "deberta-v2-mlm"], but=["own"]))
def test_a_budget_treats_layers_differently(name: str, steady_process: None, tmp_path: Path) -> None:
    if name == "own":
        model, batch, rounds = Perceptrons(), {"x": torch.randn(4000, 32)}, False
    else:
        model, batch, rounds = deep(name), ZOO[name].batch(8, 48), ZOO[name].rounds_by_layer
    plain = copy.deepcopy(model)
    check = assert_same_step if rounds else assert_bitwise_same_step
    # The operators' costs on this processor decide at which share layers have different plans.
    for share in (0.7, 0.6, 0.8, 0.5):
        engine, budget = within(model, batch, share)
        check(model, plain, batch)
        if any(len(graph.layers) > 1 for graph in engine.plan_file().graphs):
            break
        engine.detach()
    else:
        pytest.fail("all layers have one plan within each budget")
    predicted = engine.predictor.footprint()
    _, peak = measured(model, batch)
    assert predicted.peak <= budget and predicted.activations == pytest.approx(peak, **EXACT)
    plan = engine.plan_file()
    engine.detach()
    assert any(len(graph.layers) > 1 for graph in plan.graphs), "all layers have one plan"
    plan.save(tmp_path / "plan.json")
    engine = attached(model, Selection(plan=PlanFile.load(tmp_path / "plan.json")), AUTO)
    check(model, plain, batch)
    assert engine.predictor.footprint().activations == predicted.activations
    engine.detach()


@in_turn
@pytest.mark.parametrize("name", nightly(["own", "roberta-mlm", "llama", "t5"], but=["own"]))
def test_gradients_that_are_added_come_layer_by_layer(name: str) -> None:
    """Gradients accumulate layer by layer: a later micro-batch does not hold a second set of all of them."""
    model = Perceptrons() if name == "own" else deep(name)
    batch = {"x": torch.randn(16, 32)} if name == "own" else ZOO[name].batch(2, 8)
    added = {}
    for unit in (MODEL, LAYER):
        engine = attached(model, selection("level 1"), unit)
        accumulate(model, [batch])
        forward, saved, loss = allocated(lambda: model(**batch).loss)
        backward, _, _ = allocated(loss.backward)
        added[unit] = max(forward, saved + backward)
        assert engine.predictor.activations(frees_gradients=True) == pytest.approx(added[unit], **EXACT)
        engine.detach()
    assert added[LAYER] < 0.8 * added[MODEL]


class Counted(torch.nn.Module):
    """Layers that each scale by their own number, or all by the same."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Scaled(1 if same else 1 + n) for n in range(LAYERS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Scaled(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(16, 16), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x)) * self.scale


def stepped(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x=x)["loss"].backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_layers_with_other_fractions_are_in_other_groups() -> None:
    """A fraction is read by nearly every forward, a whole number may be a layer's index."""
    layers = [Scaled(scale) for scale in (0.1, 0.2, 1, 0.1, 0.2, 2)]
    for listed in (torch.nn.ModuleList(layers), torch.nn.Sequential(*layers)):
        groups = layer_groups(torch.nn.ModuleDict({"layers": listed}))
        assert [[path.removeprefix("layers.") for path in group] for group in groups] == [
            ["0", "3"],
            ["1", "4"],
            ["2", "5"],
        ]


def attached_as_a_whole(model: torch.nn.Module, x: torch.Tensor) -> tuple[CompileEngine, str]:
    """Check that a step is plain PyTorch's; returns the engine, and the line why it falls back to one graph."""
    expected = stepped(model, x)
    engine = attached(model, selection("level 1"), AUTO)
    with log_lines() as lines:
        assert all(map(torch.equal, stepped(model, x), expected))
    (line,) = [line for line in lines if "falling back to one graph" in line]
    return engine, line


def test_layers_that_need_too_many_graphs_go_with_the_model() -> None:
    model, x = Counted(same=False), torch.randn(4, 16)
    engine, line = attached_as_a_whole(model, x)
    assert "more than 3 graphs for Scaled; failed guard: self.scale ==" in line
    assert "layers" not in engine.plans().header[0]
    engine.detach()
    engine = attached(model, selection("level 1"), LAYER)
    with pytest.raises(
        UnsupportedModelError, match="--memory_opt_unit layer: the layers of Counted cannot be compiled"
    ):
        model(x=x)
    engine.detach()


class Breaking(torch.nn.Module):
    """Layers with a graph break after each computation."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x).relu()
            torch._dynamo.graph_break()
            x = self.linear(x).tanh()
            torch._dynamo.graph_break()
            x = self.linear(x).sin()
            torch._dynamo.graph_break()
            return self.linear(x).cos()

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def test_the_whole_is_traced_when_nothing_of_the_layers_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is traced outside the error handler, since the error's traceback holds the layers' tensors."""
    handled: list[BaseException | None] = []
    call = TracedForward._call

    def noted(traced: TracedForward, *given: object) -> object:
        handled.append(sys.exc_info()[1])
        return call(traced, *given)

    monkeypatch.setattr(TracedForward, "_call", noted)
    engine, _ = attached_as_a_whole(Counted(same=False), torch.randn(4, 16))
    assert handled == [None, None]
    engine.detach()


@pytest.mark.nightly
def test_the_line_about_too_many_graphs_is_of_this_model() -> None:
    """The line about too many graphs does not name a failed guard of another model."""
    engine, _ = attached_as_a_whole(Counted(same=False), x := torch.randn(4, 16))
    engine.detach()
    engine, line = attached_as_a_whole(Breaking(), x)
    assert "more than 3 graphs for Block" in line and "failed guard" not in line
    engine.detach()


@pytest.mark.parametrize(("of_layers", "of_whole"), [(1, 2), (2, 1)])
def test_a_budget_is_refused_with_what_the_better_attempt_takes(monkeypatch, of_layers: int, of_whole: int) -> None:
    """A budget is refused with the peak of the better attempt, by layers or as a whole."""
    errors = iter([DoesNotFitError("by layers", of_layers), DoesNotFitError("as a whole", of_whole)])

    handled: list[BaseException | None] = []

    def plan(*given: object) -> None:
        handled.append(sys.exc_info()[1])
        raise next(errors)

    monkeypatch.setattr(Planner, "plan", plan)
    model = deep("llama")
    engine = attached(model, Selection(budget=Budget("1GiB", 2**30)), AUTO)
    engine.outputs_read_by = lambda: "a metric"
    with pytest.raises(DoesNotFitError, match="by layers" if of_layers < of_whole else "as a whole"):
        model(**ZOO["llama"].batch())
    assert handled == [None, None]
    engine.detach()


def test_a_budget_below_what_is_held_beside_activations_is_refused_at_once() -> None:
    """One graph for all layers would not help if the optimizer alone exceeds the budget."""
    model = deep("llama")
    engine = attached(model, Selection(budget=Budget("1MiB", 2**20)), AUTO)
    with log_lines() as lines, pytest.raises(DoesNotFitError, match="infeasible: even with") as refused:
        model(**ZOO["llama"].batch())
    assert refused.value.is_final and "an optimizer with fewer states" in str(refused.value)
    assert sum(line.startswith("compiling") for line in lines) == 1 and not any("one graph" in line for line in lines)
    engine.detach()


class Indexed(Perceptrons):
    """Layers that hold tensors in a dict, like the indices of PEFT's FourierFT."""

    class Block(Perceptrons.Block):
        def __init__(self, width: int, dropout: float) -> None:
            super().__init__(width, dropout)
            self.indices = {"default": torch.randperm(width)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, self.indices["default"]])


def test_layers_may_hold_tensors_that_are_no_buffers() -> None:
    model, batch = Indexed(), {"x": torch.randn(5, 32)}
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"))
    assert_bitwise_same_step(model, plain, batch)
    assert "equal layers share one" in engine.plans().header[0]
    engine.detach()


class Narrowing(torch.nn.Module):
    """Two groups of layers with the same operators; the second one is smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = (
            torch.nn.ModuleList(Perceptrons.Block(width, 0.0) for _ in range(3)) for width in (64, 16)
        )

    def forward(self, x: torch.Tensor) -> Output:
        for layer in self.wide:
            x = layer(x)
        x = x[..., :16]
        for layer in self.narrow:
            x = layer(x)
        return Output(loss=x.square().mean())


@in_turn
def test_a_budget_is_solved_for_the_sizes_of_each_stage(steady_process: None) -> None:
    model, batch = Narrowing(), {"x": torch.randn(400, 64)}
    with log_lines() as lines:
        engine, budget = within(model, batch, 0.6)
        accumulate(model, [batch])
    assert engine.predictor.footprint().peak <= budget
    assert "for 6 layers" in engine.plans().header[0]
    assert not any("solving again" in line for line in lines)
    engine.detach()


class Place:
    """An object that the code around layers and the layers share."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


OBJECT, DICT = Place(inner=Place(condition=1.0)), {"inner": {"condition": 1.0}}


def set_condition(how: str, condition: torch.Tensor) -> None:
    if how == "an object has a condition":
        OBJECT.inner.condition = condition
    if how == "a dict has a condition":
        DICT["inner"]["condition"] = condition


def condition_of(how: str) -> Any:
    of_object = OBJECT.inner.condition if how == "an object has a condition" else 1
    return of_object * DICT["inner"]["condition"] if how == "a dict has a condition" else of_object


class Stateful(torch.nn.Module):
    """Blocks with side effects on attributes or inputs; `how` says which."""

    class Block(torch.nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.linear, self.how, self.calls = torch.nn.Linear(8, 8), how, 0
            self.loss = self.condition = torch.ones(())
            self.losses: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            writes = self.how == "it writes to its input"
            y = self.linear(x.clone() if writes else x).relu() * self.condition
            y = y * condition_of(self.how)
            model = self.model[0]
            if self.how == "the model has a condition" or (
                self.how == "the last layer has a condition" and self is model.layers[-1]
            ):
                y = y * model.condition
            if self.how == "the model's dict has a condition":
                y = y * vars(model)["condition"]
            if self.how == "its loss is read":
                self.loss = y.square().mean()
            if writes:
                x += y
                return x
            if self.how == "its losses are read":
                self.losses.append(y.square().mean())
            if self.how == "it counts":
                self.calls += 1
                y = y * self.calls
            return x + y

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.how = torch.nn.ModuleList(self.Block(how) for _ in range(4)), how
        self.condition = torch.ones(())
        for layer in self.layers:
            # A tuple, since a module as an attribute would be a part of the layer.
            layer.model = (self,)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.clone()
        for layer in self.layers:
            if self.how == "it is given a condition" or (self.how == "later" and len(x) > 4):
                layer.condition = x.mean()
            set_condition(self.how, x.mean())
            if self.how.startswith(("the model", "the last layer")):
                self.condition = x.mean()
            if self.how == "its weights are others":
                weights = {name: weight * 2 for name, weight in layer.named_parameters()}
                x = torch.func.functional_call(layer, weights, (x,))
            else:
                x = layer(x)
        losses = [loss for layer in self.layers for loss in (layer.loss, *layer.losses[-1:])]
        return {"loss": x.square().mean() + sum(losses)}


@pytest.mark.parametrize(
    ("how", "why"),
    nightly(
        [
            ("its loss is read", "the forward of Block sets loss"),
            ("its losses are read", "the forward of Block sets losses"),
            ("it writes to its input", "the forward of Block writes to its arguments"),
            ("it counts", "the forward of Block sets calls"),
            ("it is given a condition", "code before Block sets condition of "),
            ("its weights are others", "code before Block sets items of "),
            ("later", "code before Block sets condition of "),
            ("an object has a condition", "code before Block sets condition of "),
            ("a dict has a condition", "code before Block sets items of "),
            ("the model has a condition", "code before Block sets condition of L['self'], which the layer reads"),
            (
                "the model's dict has a condition",
                "code before Block sets condition of L['self'], which the layer reads",
            ),
            ("the last layer has a condition", "code before Block sets condition of L['self'], which the layer reads"),
        ],
        but=[
            "its loss is read",
            "it writes to its input",
            "later",
            "a dict has a condition",
            "the model has a condition",
        ],
    ),
)
def test_layers_that_pass_on_attributes_go_with_the_model(how: str, why: str) -> None:
    model, xs = Stateful(how), [torch.randn(rows, 8) for rows in (4, 6)]
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"), AUTO)
    with log_lines() as lines:
        for x in xs:
            assert all(map(torch.equal, stepped(model, x), stepped(plain, x)))
    assert [layer.calls for layer in model.layers] == [layer.calls for layer in plain.layers]
    assert [len(layer.losses) for layer in model.layers] == [len(layer.losses) for layer in plain.layers]
    assert [line for line in lines if "falling back to one graph" in line and why in line]
    engine.detach()


class Auxiliary(torch.nn.Module):
    """One of the equal layers appends a loss to the list that all get; an attribute says which, by its kind."""

    class Block(torch.nn.Module):
        def __init__(self, kind: str, at: int, is_one: bool) -> None:
            super().__init__()
            self.linear, self.kind = torch.nn.Linear(8, 8), kind
            self.option: Any = {
                "a dict": {"adds": is_one},
                "a tuple": (is_one,),
                "an object": SimpleNamespace(adds=is_one),
                "a function": functools.partial(torch.add, alpha=int(is_one)),
                "a number": at,
            }[kind]

        @property
        def adds(self) -> bool:
            if self.kind == "a dict":
                return self.option["adds"]
            if self.kind == "a tuple":
                return self.option[0]
            if self.kind == "an object":
                return self.option.adds
            return self.option == 1 if self.kind == "a number" else self.option.keywords["alpha"] == 1

        def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
            if self.adds:
                losses.append(x.square().mean())
            return x + self.linear(x).relu()

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block(kind, at, at == 1) for at in range(layers))

    def forward(self, x: torch.Tensor) -> Output:
        losses: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, losses)
        return Output(loss=x.square().mean() + sum(losses))


@pytest.mark.parametrize(
    ("kind", "layers"),
    nightly(
        [("a dict", 4), ("a tuple", 4), ("an object", 4), ("a function", 4), ("a number", 3), ("a number", 5)],
        but=[("a dict", 4), ("a function", 4), ("a number", 3)],
    ),
)
def test_a_layer_that_adds_to_a_list_that_all_get(kind: str, layers: int) -> None:
    model, xs = Auxiliary(kind, layers), [torch.randn(rows, 8) for rows in (4, 6)]
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"), AUTO)
    for x in xs:
        assert all(map(torch.equal, stepped(model, x), stepped(plain, x)))
    engine.detach()


class KeywordArguments(torch.nn.Module):
    """A forward that changes the dict of its keyword arguments, as TRL's and PEFT's do; its layers get the dict."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            return x + self.linear(x).relu() * given["scale"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, **given: Any) -> Output:
        x = given.pop("x")
        for layer in self.layers:
            given["scale"] = x.mean()
            x = layer(x, given)
        return Output(loss=x.square().mean())


def test_layers_may_get_keyword_arguments_that_the_forward_changes() -> None:
    model = KeywordArguments()
    plain, engine = copy.deepcopy(model), attached(model, selection("level 1"))
    assert_bitwise_same_step(model, plain, *({"x": torch.randn(rows, 8)} for rows in (4, 6)))
    assert "for 4 layers, equal layers share one" in engine.plans().header[0]
    engine.detach()


class Biased(torch.nn.Module):
    """Blocks whose bias by position comes from a cache that their first forward fills."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        @staticmethod
        @functools.lru_cache
        def bias() -> tuple[torch.Tensor, int]:
            return torch.arange(8) / 8, 8

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x + self.bias()[0]).relu()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def test_a_cache_that_layers_fill_keeps_no_tensor_without_data() -> None:
    model, x = Biased(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"), AUTO)
    for each in (x, torch.randn(6, 8)):
        Biased.Block.bias.cache_clear()
        assert all(map(torch.equal, stepped(model, each), stepped(plain, each)))
        with torch.no_grad():
            assert torch.equal(model(each)["loss"], plain(each)["loss"])
    assert "for 4 layers" in engine.plans().header[0]
    engine.detach()
    assert all(map(torch.equal, stepped(model, x), stepped(plain, x)))


class Optional(torch.nn.Module):
    """Blocks that return hidden states and a loss or None, depending on a flag or on their place."""

    class Block(torch.nn.Module):
        def __init__(self, index: int, by_place: bool) -> None:
            super().__init__()
            self.linear, self.drop = torch.nn.Linear(8, 8), torch.nn.Dropout(0.2)
            self.index, self.by_place, self.has_loss = index, by_place, index % 2 == 1 and not by_place

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            x = x + self.drop(self.linear(x).relu())
            has_loss = self.index % 2 == 1 if self.by_place else self.has_loss
            return x, x.square().mean() if has_loss else None

    def __init__(self, by_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block(index, by_place) for index in range(5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses += [loss] if loss is not None else []
        return {"loss": x.square().mean() + sum(losses)}


# Layers whose flags are changed after the forward was traced, or changed and restored.
@pytest.mark.parametrize("changes", nightly([((None, 2, 3),), ((None, 1, 1),), ((None, 2, 2),)], but=[(None, 2, 3)]))
def test_layers_of_one_structure_may_return_different_things(changes: tuple[int | None, ...]) -> None:
    model, x = Optional(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"))
    for changed in changes:
        for either in (model, plain):
            if changed is not None:
                either.layers[changed].has_loss = not either.layers[changed].has_loss
        states = []
        for either in (plain, model):
            torch.manual_seed(0)
            states.append((stepped(either, x), torch.get_rng_state()))
        (expected, state), (ours, our_state) = states
        assert all(map(torch.equal, ours, expected)) and torch.equal(our_state, state)
    engine.detach()


@in_turn
def test_layers_that_return_different_things_by_their_place_go_with_the_model() -> None:
    model, x = Optional(by_place=True), torch.randn(4, 8)
    for layer in model.layers:
        layer.drop.p = 0.0
    engine, line = attached_as_a_whole(model, x)
    assert "the outputs of layers.2 no longer match those of equal layers" in line
    engine.detach()


@in_turn
def test_layers_may_begin_to_train_one_after_another() -> None:
    model, x = Counted(same=True), torch.randn(4, 16)
    model.requires_grad_(False)
    model.layers[4].requires_grad_(True)
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"))
    for count in (1, 2, 3):
        for either in (model, plain):
            either.layers[-count:].requires_grad_(True)
            either.zero_grad(set_to_none=True)
            either(x=x)["loss"].backward()
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (expected.grad is None)
            assert expected.grad is None or torch.equal(ours.grad, expected.grad)
    engine.detach()


class Stages(torch.nn.Module):
    """Two stages of layers, each of which passes on half of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = torch.nn.ModuleList(torch.nn.ModuleList(Scaled(1.0) for _ in range(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Output:
        for layers in self.stages:
            for layer in layers:
                x = layer(x)
            x = x[:, : x.shape[1] // 2]
        return Output(loss=x.square().mean())


@in_turn
@pytest.mark.parametrize("asked", nightly(["", "level 1"], but=["level 1"]))
def test_a_part_of_a_layers_result_is_computed_behind_it(asked: str) -> None:
    model, x = Stages(), torch.randn(8, 64, 16)
    expected = stepped(model, x)
    engine = attached(model, selection(asked))
    assert all(map(torch.equal, stepped(model, x), expected))
    assert "in 5 graphs for 8 layers" in engine.plans().header[0]
    saved, peak = measured(model, {"x": x})
    assert engine.predictor.saved() == pytest.approx(saved, **EXACT)
    assert engine.predictor.activations() == pytest.approx(peak, **EXACT)
    engine.detach()


class Streams(torch.nn.Module):
    """Layers that add their input to a second stream; the loss adds both streams, so that these share one gradient."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, streams: list[torch.Tensor]) -> list[torch.Tensor]:
            one, other = streams
            return [one + self.down(torch.nn.functional.gelu(self.up(one))), other + one]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> Output:
        streams = [x, torch.zeros_like(x)]
        for layer in self.layers:
            streams = layer(streams)
        return Output(loss=(streams[0] + streams[1]).square().mean())


@in_turn
def test_a_gradient_of_two_results_is_held_until_both_are_done_with() -> None:
    model, x = Streams(), torch.randn(500, 16)
    expected = stepped(model, x)
    engine = attached(model, selection("level 1"))
    assert all(map(torch.equal, stepped(model, x), expected))
    saved, peak = measured(model, {"x": x})
    assert engine.predictor.saved() == pytest.approx(saved, **EXACT)
    assert engine.predictor.activations() == pytest.approx(peak, **EXACT)
    engine.detach()


class Pooling(torch.nn.Module):
    """Layers, followed by a different operator for many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Scaled(1.0) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Output:
        for layer in self.layers:
            x = layer(x)
        return Output(loss=(x.square() if len(x) > 300 else x.exp()).mean())


@in_turn
def test_what_is_traced_anew_behind_layers_says_nothing_of_these() -> None:
    model = Pooling()
    engine = attached(model, selection("level 1"))
    stepped(model, torch.randn(500, 16))
    assert engine.plans().enabled
    with log_lines() as lines:
        stepped(model, torch.randn(200, 16))
    (line,) = lines
    assert line.startswith("recompiled the training graph; failed guard: ")
    engine.detach()


def test_a_budget_is_solved_for_what_trains(steady_process: None) -> None:
    """A budget is solved once for each set of trained layers, as when a callback unfreezes layers in turn."""
    model, x = Counted(same=True), torch.randn(512, 16)
    plain = copy.deepcopy(model)
    free = attached(model, Selection())
    model(x=x)["loss"].backward()
    footprint = free.predictor.footprint()
    free.detach()
    budget = footprint.peak - footprint.activations // 4
    engine = attached(model, Selection(budget=Budget(f"{budget} bytes", budget)))
    peaks = []
    with log_lines() as lines:
        for trains in (False, True, False):
            for either in (model, plain):
                either.layers[0].requires_grad_(trains)
                either.zero_grad(set_to_none=True)
                either(x=x)["loss"].backward()
            for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad is expected.grad is None or torch.equal(ours.grad, expected.grad)
            peaks.append(engine.predictor.footprint().peak)
    assert max(peaks) <= budget and peaks[0] == peaks[2]
    assert not any("was not solved for" in line for line in lines), lines
    assert sum("solving for the budget again" in line for line in lines) == 1
    engine.detach()


def _in_turn(layers: torch.nn.ModuleList) -> None:
    layers[0], layers[1] = layers[1], layers[0]


def _twice(layers: torch.nn.ModuleList) -> None:
    layers[2] = layers[1]


@pytest.mark.parametrize("change", [_in_turn, _twice])
@pytest.mark.parametrize("name", nightly(["own", "llama"], but=["own"]))
def test_layers_may_change_places(name: str, change: Callable[[torch.nn.ModuleList], None]) -> None:
    """Layers may be swapped or repeated during training, as by a callback."""
    if name == "own":
        model, batch = Perceptrons(), {"x": torch.randn(16, 32)}
    else:
        model, batch = deep(name), ZOO[name].batch()
        # A repeated layer would append to the same key-value cache twice.
        model.config.use_cache = False
    plain = copy.deepcopy(model)
    engine = attached(model, selection("level 1"))
    with log_lines() as lines:
        assert_bitwise_same_step(model, plain, batch)
        for either in (model, plain):
            change(either.layers if name == "own" else either.model.layers)
        assert_bitwise_same_step(model, plain, batch)
    assert not any("nothing in a layer" in line for line in lines), lines
    engine.detach()


class Averaging(torch.nn.Module):
    """Keeps averages and counts in attributes and in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Scaled(1.0) for _ in range(LAYERS))
        self.average, self.total, self.calls = torch.zeros(16), torch.zeros(()), 0
        self.history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        self.calls += 1
        self.average = 0.9 * self.average + x.detach().mean(0)
        self.total.add_(1)
        self.history.append(self.average)
        return {"loss": (x * self.average).sum()}


@in_turn
def test_a_forward_that_is_planned_again_leaves_attributes_as_one_does(steady_process: None) -> None:
    model, x = Averaging(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(budget=Budget("1 GiB", 2**30)))
    with below_recompute(0):
        for _ in range(2):
            assert all(map(torch.equal, stepped(model, x), stepped(plain, x)))
            assert model.calls == plain.calls and torch.equal(model.total, plain.total)
            assert torch.equal(torch.stack(model.history), torch.stack(plain.history))
    engine.detach()


@pytest.mark.parametrize("inside", [False, True])
def test_a_hook_is_called_whatever_is_compiled(inside: bool) -> None:
    """Hooks are called once per step: on a layer outside its graph, on a module in a layer within one whole graph."""
    model, x = Counted(same=True), torch.randn(4, 16)
    seen: list[float] = []
    hooked = model.layers[2].linear if inside else model.layers[2]
    hooked.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().sum())))
    expected = stepped(model, x)
    engine = attached(model, selection("level 1"), AUTO)
    for _ in range(2):
        assert all(map(torch.equal, stepped(model, x), expected))
    assert len(seen) == 3 and seen[1:] == seen[:1] * 2
    engine.detach()


def test_models_without_equal_layers_are_refused_where_they_are_asked_for() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    engine = attached(model, Selection(), LAYER)
    with pytest.raises(UnsupportedModelError, match="no module list in Sequential has two equal layers"):
        model(torch.randn(2, 4))
    engine.detach()
