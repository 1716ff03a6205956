"""Modules whose calling code torch does not compile: compiled separately, or named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses import FakeTensorMode

import outcore
from outcore.errors import CaptureError, InfeasibleError, NotEngagedError
from outcore.measure import resident_bytes
from outcore.wrapping.call_wrapper import CALLS_TO_WAIT
from outcore.wrapping.looking import UnseenModules
from outcore.wrapping.outside_graphs import own, pieces
from tests.cpu.training import PROFILED_STEPS, Away, away, back, inside, mean_square, same

STEPS = PROFILED_STEPS + 4
BUDGET = "1GiB"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Blocks(nn.Module):
    """torch's own modules in a loop; `what` is called with each result."""

    def __init__(self, what: Callable[[Tensor], Any] | None = None, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1)
            )
            for _ in range(5)
        )
        self.head = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
            if self.what is not None:
                self.what(x)
        result: Tensor = self.head(x)
        return result


def breaks(_: Tensor) -> None:
    torch._dynamo.graph_break()


def looks(x: Tensor) -> None:
    x.mean().item()


def hooked_within() -> Blocks:
    module = Blocks()
    child: Any = module.blocks[2]
    child[0].register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
    return module


def hooked() -> Blocks:
    module = Blocks()
    module.blocks[2].register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
    return module


MAKERS: dict[str, Callable[[], Blocks]] = {
    "a break in a loop": lambda: Blocks(breaks),
    "a number that is read": lambda: Blocks(looks),
    "a hook": hooked,
}


def train(module: nn.Module, steps: int = STEPS, rows: int = 1024) -> list[Away]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        module.zero_grad()
        loss = mean_square(module(torch.randn(rows, 64)))
        loss.backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append(away([loss.detach(), *gradients, *module.buffers()]))
    return found


def alike(first: list[Away], second: list[Away]) -> bool:
    return same(list(map(back, first)), list(map(back, second)))


@pytest.mark.parametrize("made", MAKERS)
def test_parts_that_torch_compiles_nothing_around_are_planned(made: str) -> None:
    expected = train(MAKERS[made]())
    roomy = outcore.wrap(MAKERS[made](), BUDGET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        assert alike(train(roomy), expected)
    report = outcore.handle(roomy).report()
    assert report.state == "in-core"
    assert report.graphs >= len(roomy.blocks)
    assert [note for note in report.notes if "compiled separately" in note]
    assert report.measured_peak_bytes is not None
    torch._dynamo.reset()
    tight = outcore.wrap(MAKERS[made](), report.measured_peak_bytes * 7 // 8, policy="swap-all")
    assert alike(train(tight), expected)
    report = outcore.handle(tight).report()
    assert report.state == "planned"
    inside(report)


def test_parts_are_planned_from_the_step_on_that_ends_their_graph() -> None:
    """A loop is one graph until a step looks at a number in it; then torch compiles none of it."""

    def trained(module: Blocks) -> list[Away]:
        whole = train(module)
        module.what = looks
        return [*whole, *train(module)]

    expected = trained(Blocks())
    module = outcore.wrap(Blocks(), BUDGET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        assert alike(trained(module), expected)
    report = outcore.handle(module).report()
    assert report.graphs > 1
    assert any("compiled separately" in note for note in report.notes)


@pytest.mark.parametrize("strict", [False, True])
def test_parts_that_are_unfrozen_late_are_planned(*, strict: bool) -> None:
    """At first the head alone is trained."""

    def trained(module: Blocks) -> list[Away]:
        module.blocks.requires_grad_(False)
        head = train(module)
        module.blocks.requires_grad_()
        return [*head, *train(module)]

    expected = trained(Blocks(breaks))
    module = outcore.wrap(Blocks(breaks), BUDGET, strict=strict)
    assert alike(trained(module), expected)
    assert outcore.handle(module).report().graphs == 1 + len(module.blocks)


def test_a_step_that_has_no_room_for_what_was_unfrozen_can_be_run_again() -> None:
    """In the first such step these parts run as plain PyTorch, and the head's graph begins last."""
    expected = train(Blocks(breaks))
    module = Blocks(breaks)
    module.blocks.requires_grad_(False)
    held = resident_bytes(torch.device("cpu")) - sum(p.nbytes for p in module.parameters())
    outcore.wrap(module, held + (4 << 20), policy="swap-all")
    train(module)
    module.blocks.requires_grad_()
    module.load_state_dict(Blocks().state_dict())
    with pytest.raises(InfeasibleError) as caught:
        train(module)
    (note,) = [note for note in caught.value.__notes__ if "so far" in note]
    assert "blocks.0, blocks.1, blocks.2 and 3 more" in note
    del caught
    module.load_state_dict(Blocks().state_dict())
    assert alike(train(module), expected)
    report = outcore.handle(module).report()
    assert report.state == "planned"
    inside(report)


def test_what_has_a_hook_itself_is_named_and_the_rest_is_planned() -> None:
    expected = train(hooked_within())
    module = outcore.wrap(hooked_within(), BUDGET)
    with pytest.warns(UserWarning, match="that calls blocks.2.0: they run as plain PyTorch"):
        found = train(module)
    assert alike(found, expected)
    assert outcore.handle(module).report().graphs > len(module.blocks)


def test_an_error_names_what_runs_as_plain_pytorch() -> None:
    """Its memory is held outside the graph that finds too little room."""
    module = outcore.wrap(hooked_within(), "16MiB")
    with pytest.warns(UserWarning, match="that calls blocks.2.0: they run as plain PyTorch"):
        train(module)
    with pytest.raises(InfeasibleError) as caught:
        train(module, rows=1 << 15)
    assert [note for note in caught.value.__notes__ if "that calls blocks.2.0" in note]


def test_an_error_names_batch_norms_at_which_graphs_end() -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Conv2d(8, 8, 3)
    module: Any = outcore.wrap(nn.Sequential(*layers), "64KiB")

    def steps() -> None:
        for _ in range(3):
            module(torch.rand(4, 3, 32, 32)).sum().backward()

    for momentum, named in ((None, True), (0.1, False)):
        module[1].momentum = momentum
        with pytest.raises(InfeasibleError) as caught:
            steps()
        notes = [note for note in getattr(caught.value, "__notes__", ()) if "ends graphs" in note]
        assert ["at 1, which have momentum=None" in note for note in notes] == [True] * named
        del caught


def test_strict_asks_for_no_more_than_that() -> None:
    module = outcore.wrap(Blocks(breaks), BUDGET, strict=True)
    train(module)
    assert outcore.handle(module).report().state == "in-core"


def test_whole_models_have_no_parts() -> None:
    module = outcore.wrap(Blocks(), BUDGET, strict=True)
    train(module)
    report = outcore.handle(module).report()
    assert (report.graphs, report.notes) == (1, ())
    assert not [m for m in module.modules() if m is not module and m._compiled_call_impl]


class Mixed(nn.Module):
    """One part that torch compiles, and one in code that it must leave uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.left = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alone(torch.tanh(self.seen(x))))

    @torch.compiler.disable
    def alone(self, x: Tensor) -> Tensor:
        result: Tensor = self.left(x)
        return result


def test_what_is_left_alone_on_purpose_is_named() -> None:
    module = outcore.wrap(Mixed(), BUDGET)
    with pytest.warns(UserWarning, match="that calls left: they run as plain PyTorch") as caught:
        train(module)
    assert [each for each in caught if each.filename == __file__]
    assert outcore.handle(module).report().graphs == 2
    assert not module.left._compiled_call_impl
    strict = outcore.wrap(Mixed(), BUDGET, strict=True)
    with pytest.raises(NotEngagedError, match="that calls left"):
        train(strict)


def test_a_part_with_a_budget_of_its_own_is_not_taken_from_it() -> None:
    module = Blocks(breaks)
    first: Any = outcore.wrap(module.blocks[0], BUDGET)
    outcore.wrap(module, BUDGET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        train(module)
    assert outcore.handle(first) is not outcore.handle(module)
    assert {outcore.handle(first).report().graphs, outcore.handle(module).report().graphs} == {1, 5}


def test_parameters_that_are_used_around_the_model_are_no_part_of_it() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 64)
            self.scale = nn.Parameter(torch.ones(()))

    module = outcore.wrap(Scaled(), BUDGET, strict=True)
    for _ in range(STEPS):
        mean_square(module(torch.randn(8, 64)) * module.scale.exp()).backward()
    assert outcore.handle(module).report().notes == ()


def test_a_call_before_training_that_torch_gave_up_in_counts() -> None:
    module = outcore.wrap(Blocks(breaks).eval(), BUDGET, strict=True)
    module(torch.randn(8, 64))
    train(module.train())
    assert outcore.handle(module).report().graphs >= len(module.blocks)


def test_parts_of_a_model_that_trains_in_eval_mode_are_planned() -> None:
    """Some libraries return models in eval mode, and it freezes batch norms."""
    expected = train(Blocks(breaks).eval())
    module = outcore.wrap(Blocks(breaks).eval(), BUDGET, strict=True)
    for _ in range(3):
        module(torch.randn(8, 64))  # no training: nothing is said, and nothing compiled
    assert not outcore.handle(module).notes
    assert alike(train(module), expected)
    assert outcore.handle(module).report().graphs >= len(module.blocks)
    outcore.unwrap(module)
    assert not [p for p in module.parameters() if p._post_accumulate_grad_hooks]


def test_parts_go_with_the_whole() -> None:
    module = Blocks(breaks)
    inner: Any = module.blocks[0]
    outcore.wrap(module, BUDGET)
    train(module)
    assert outcore.handle(inner) is outcore.handle(module)
    twin = copy.deepcopy(module)
    assert not [each for each in twin.modules() if each._compiled_call_impl]
    outcore.wrap(module, "2GiB")
    assert inner._compiled_call_impl is None
    train(module)
    assert outcore.handle(inner).options.budget == "2GiB"
    outcore.unwrap(module)
    assert not [each for each in module.modules() if each._compiled_call_impl]
    with outcore.session(BUDGET) as session:
        session.wrap(module)
        train(module)
        assert inner._compiled_call_impl is not None
    assert not [each for each in module.modules() if each._compiled_call_impl]


def pending(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p._post_accumulate_grad_hooks]


def test_no_hooks_are_left() -> None:
    module = outcore.wrap(Blocks(breaks), BUDGET)
    train(module, 1)
    assert pending(module)
    outcore.unwrap(module)
    assert not pending(module)


def test_several_calls_before_the_first_backward() -> None:
    module = outcore.wrap(Blocks(breaks), BUDGET, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        module(torch.randn(8, 64))  # without a backward
        for _ in range(STEPS):
            first, second = (mean_square(module(torch.randn(64, 64))) for _ in range(2))
            (first + second).backward()
    assert outcore.handle(module).report().state == "in-core"


def test_what_never_comes_to_a_backward_is_told_in_the_end() -> None:
    module = outcore.wrap(Blocks(breaks), BUDGET)
    for _ in range(CALLS_TO_WAIT + 1):
        module(torch.randn(8, 64))
    with pytest.warns(UserWarning, match="reached no graph"):
        module(torch.randn(8, 64))


class Switch(nn.Module):
    """Runs one of its parts at a time; those that have not run are in no graph yet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.parts[self.which](x))
        return result


def test_parts_that_come_to_a_graph_later_are_not_named() -> None:
    plain, module = Switch(), outcore.wrap(Switch(), BUDGET, strict=True)
    for which in (0, 1, 2):
        plain.which = module.which = which
        assert alike(train(module), train(plain))
    report = outcore.handle(module).report()
    assert (report.state, report.notes) == ("in-core", ())
    assert not pending(module)


def test_what_others_have_compiled_is_left_to_them() -> None:
    module = Blocks(breaks)
    for block in module.blocks:
        block.compile(backend="eager")
    theirs = [block._compiled_call_impl for block in module.blocks]
    outcore.wrap(module, BUDGET)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        train(module)
    assert [block._compiled_call_impl for block in module.blocks] == theirs
    outcore.unwrap(module)
    assert [block._compiled_call_impl for block in module.blocks] == theirs


def test_nothing_is_said_where_torch_does_not_tell_parameters() -> None:
    """As when DistributedDataParallel splits graphs."""
    backend = outcore.Backend(BUDGET)
    with FakeTensorMode():
        fake = nn.Parameter(torch.ones(2))
    backend.parameters.take([fake])
    assert backend.parameters.ids is None
    module = outcore.wrap(Mixed(), BUDGET, strict=True)
    outcore.handle(module).parameters._given = None
    train(module)


class Alike(nn.Module):
    """Layers that share two compiled frames: one before a graph break, one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"a": linear(), "b": linear()}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + broken(x, layer)
        return x


def linear() -> nn.Module:
    return nn.Linear(64, 64)


def broken(x: Tensor, layer: Any) -> Tensor:
    x = torch.relu(layer["a"](x))
    torch._dynamo.graph_break()
    return torch.tanh(layer["b"](x))


def test_what_torch_compiled_of_one_layer_it_runs_for_those_alike() -> None:
    torch.manual_seed(0)
    module = outcore.wrap(Alike(), BUDGET, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="outcore")
        train(module)
    backend = outcore.handle(module)
    assert backend.parameters.ids == {id(p) for p in module.parameters()}
    assert not backend.parameters.lookers
    assert len(backend.engine.graphs) < len(list(module.parameters()))


class Loops(nn.Module):
    """torch's compiler takes in a `while_loop`, but AOTAutograd cannot trace this one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Any:
        count = torch.tensor(0)
        _, y = while_loop(
            lambda i, _: i < 3,
            lambda i, y: (i + 1, (y * 1.1).sin()),
            (count, torch.tanh(self.first(x))),
        )
        return self.last(torch.tanh(y))


def test_parts_of_a_graph_that_cannot_be_traced_are_planned() -> None:
    """Its parameters were given to the backend before tracing failed."""
    x = torch.randn(256, 16)
    torch.manual_seed(0)
    model = Loops()
    plain = copy.deepcopy(model)
    outcore.wrap(model, budget="1GiB")
    for _ in range(STEPS):
        for each in model, plain:
            each.zero_grad()
            mean_square(each(x)).backward()
    report = outcore.handle(model).report()
    assert report.graphs == 2
    assert "first, last" in " ".join(report.notes)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad, its.grad)


class Encoder(nn.Module):
    """torch's encoder looks at what a mask holds, which ends the graph, unless it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.encoder(x.view(-1, 32, 64), mask=self.mask)
        return result


class Looks(nn.Module):
    """Reads a number, between modules of torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        looks(x)
        return x.relu()


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Looks(), nn.Linear(64, 64))
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), inner)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (Encoder, ["encoder.layers.0, encoder.layers.1."]),
        (Within, ["layers.", "layers.0, layers.1.", "layers.1.0, layers.1.3."]),
    ],
)
def test_parts_of_torch_s_own_code_that_ends_a_graph_are_planned(
    made: type[nn.Module], names: list[str]
) -> None:
    """Nobody asked that their caller be left uncompiled."""
    expected = train(made(), STEPS + 4)
    module = outcore.wrap(made(), BUDGET, strict=True)
    assert alike(train(module, STEPS + 4), expected)
    report = outcore.handle(module).report()
    assert report.state == "in-core"
    assert [note.partition("calls them: ")[2].partition(" TORCH")[0] for note in report.notes][
        : len(names)
    ] == names


def test_torch_s_own_code_that_is_left_alone_on_purpose_is_named() -> None:
    module = Mixed()
    module.left = nn.Sequential(nn.Linear(64, 64), nn.Tanh())  # type: ignore[assignment]  # a part
    outcore.wrap(module, BUDGET)
    with pytest.warns(UserWarning, match="that calls left.0: they run as plain PyTorch"):
        train(module)
    assert not [m for m in module.left.modules() if m._compiled_call_impl]


class Bags(nn.Module):
    """AOTAutograd fails to trace the gradient of these weights, with an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(64, 16, mode="sum", sparse=True)
        self.last = nn.Linear(16, 16)

    def forward(self, indices: Tensor, weights: Tensor) -> Any:
        return self.last(torch.tanh(self.bag(indices, per_sample_weights=weights)))


@pytest.mark.filterwarnings("ignore:Error detected in EmbeddingBagBackward0")
def test_parts_of_a_graph_whose_tracing_fails_are_planned() -> None:
    indices, weights = torch.randint(64, (32, 4)), torch.rand(32, 4)
    torch.manual_seed(0)
    model = Bags()
    plain = copy.deepcopy(model)

    def train(module: nn.Module) -> None:
        for _ in range(STEPS):
            module.zero_grad()
            mean_square(module(indices, weights)).backward()

    train(plain)
    outcore.wrap(model, budget="1GiB")
    with pytest.warns(UserWarning, match="the code that calls bag: they run as plain PyTorch"):
        train(model)
    report = outcore.handle(model).report()
    assert report.graphs == 1
    assert any("torch fails to trace its gradients" in note for note in report.notes)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert torch.equal(mine.grad.to_dense(), its.grad.to_dense())


@pytest.mark.filterwarnings("ignore:Error detected in EmbeddingBagBackward0")
def test_strict_asks_that_all_can_be_traced() -> None:
    model = outcore.wrap(Bags(), "1GiB", strict=True)
    with pytest.raises(CaptureError, match="its gradients: RuntimeError: Attempting to broadcast"):
        model(torch.randint(64, (32, 4)), torch.rand(32, 4))


def test_scripted_parts_run_as_plain_pytorch() -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), part, nn.Linear(64, 16))
    outcore.wrap(model, budget="1GiB")

    def train() -> None:
        for _ in range(STEPS):
            mean_square(model(torch.ones(4, 16))).backward()

    with pytest.warns(UserWarning, match="that calls 2.0: they run as plain PyTorch"):
        train()
    assert all(p.grad is not None for p in model.parameters())
    assert outcore.handle(model).report().graphs == 2, "the other parts are planned"


class TestAside:
    def test_autograd_tells(self) -> None:
        module = Blocks()
        known = {id(p) for p in module.head.parameters()}
        unseen = UnseenModules(module, known)
        assert not unseen.used
        mean_square(module(torch.randn(8, 64))).backward()
        assert unseen.used
        known |= {id(p) for p in module.blocks[0].parameters()}
        found = unseen.end(module, known)
        assert found == [f"blocks.{i}.{j}" for i in range(1, 5) for j in (0, 1)]
        assert not [p for p in module.parameters() if p._post_accumulate_grad_hooks]

    def test_recurrent_layers_run_between_graphs_anyway(self) -> None:
        layer = nn.Sequential(nn.LSTM(4, 4))
        unseen = UnseenModules(layer, ())
        layer(torch.randn(2, 4))[0].sum().backward()
        assert not unseen.used
        assert not pieces(nn.ModuleList([layer]), ["0.0"])

    def test_pieces_are_as_large_as_torch_s_own_code_goes(self) -> None:
        module = hooked()
        assert not {"", "blocks"} & {*own(module)}
        found = pieces(module, ["blocks.0.0", "blocks.0.1", "blocks.2.0", "head"])
        assert list(found) == ["blocks.0", "blocks.2.0", "head"]
        assert found["blocks.0"] is module.blocks[0]
        smaller = pieces(module, ["blocks.0.0", "head"], [module.blocks[0], module.head])
        assert list(smaller) == ["blocks.0.0"]


class Coded(nn.Module):
    """Its training loop may call methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 4), nn.Linear(4, 16)

    def encode(self, x: Tensor) -> Tensor:
        code: Tensor = self.encoder(x)
        return code

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encode(x))
        return result


def watched(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p._post_accumulate_grad_hooks]


def test_a_model_that_is_not_called_although_it_trains() -> None:
    model, x = outcore.wrap(Coded(), budget=BUDGET), torch.randn(8, 16)
    model.encode(x).sum().backward()  # once may be a penalty on parameters
    with pytest.warns(UserWarning, match="of Coded get gradients although Coded itself is not"):
        model.encode(x).sum().backward()
    (note,) = outcore.handle(model).report().notes
    assert "wrap the modules that these call" in note
    model.encode(x).sum().backward()
    assert not watched(model)
    strict = outcore.wrap(Coded(), budget=BUDGET, strict=True)
    strict.encode(x).sum().backward()
    with pytest.raises(NotEngagedError, match="other methods"):
        strict.encode(x).sum().backward()


def test_nobody_watches_for_gradients_of_a_model_that_is_called_or_unwrapped() -> None:
    model, x = outcore.wrap(Coded(), budget=BUDGET), torch.randn(8, 16)
    assert len(watched(model)) == 4
    model(x).sum().backward()
    outcore.handle(model).parameters.lookers.clear()
    for _ in range(STEPS):
        model(x).sum().backward()
    assert not watched(model)
    unwrapped = outcore.wrap(Coded(), budget=BUDGET)
    outcore.unwrap(unwrapped)
    assert not watched(unwrapped)


def test_a_model_inside_one_that_is_called_has_its_parameters_in_graphs() -> None:
    with outcore.session(budget=BUDGET) as ooc:
        inner = ooc.wrap(Coded())
        outer = ooc.wrap(nn.Sequential(inner, nn.Tanh()))
        for _ in range(3):
            outer(torch.randn(8, 16)).sum().backward()
        assert not ooc.report().notes
