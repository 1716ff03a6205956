"""outcore estimate: predict whether the step of a script fits before it runs."""

from __future__ import annotations

import json
import logging
import sys
from itertools import pairwise
from logging.handlers import QueueHandler
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from outcore.preflight.advice import ON_CPU, advice_for
from outcore.preflight.forecast import Forecast, Prediction
from outcore.preflight.words import one_line, rows, what_to_do
from outcore.report import Counts
from outcore.units import parse_size

SCRIPT = """
import sys
from argparse import ArgumentParser

import torch
from torch import nn

print("imported")
LOADED = torch.arange(4.0)


class Net(nn.Module):
    def __init__(self, width=256, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, *, scale=1.0):
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x))) * scale
        return x


class Branching(Net):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return x


class Printing(Net):
    def forward(self, x):
        x = super().forward(x)
        print("a graph break")
        return {"loss": super().forward(x).mean(), "result": x}


class Traced(Net):
    def forward(self, x):
        print("a graph break")
        if not torch.compiler.is_compiling() and (x > 0).all():
            raise ValueError("no")
        return super().forward(x)


def square(found):
    return found.square().mean()


def triple():
    return Net(), (torch.empty(4096, 256),), square


def pair():
    return Net(), torch.empty(4096, 256)


def keywords():
    return Net(), {"x": torch.empty(4096, 256), "scale": 2.0}, square


def autocast():
    model = Net()

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return square(model(x))

    return forward, (torch.empty(4096, 256),)


def function():
    model = Net()
    return lambda x: square(model(x)), (torch.empty(4096, 256),)


def constant():
    return Net(4), LOADED.expand(4096, 4)


def huge():
    return Net(100_000, 8), torch.empty(1_000_000, 100_000), square


def branching():
    return Branching(), torch.empty(4096, 256)


def printing():
    return Printing(), torch.empty(4096, 256)


def traceable():
    return Traced(), torch.empty(4096, 256), square


def convolving():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), torch.empty(16, 3, 64, 64), square


def numpy():
    return Net(int(torch.full((2,), 256).numpy()[0])), torch.ones(4096, 256), square


def rates():
    layers = len([rate.item() for rate in torch.linspace(0, 0.1, 6)])
    return Net(layers=layers), torch.ones(4096, 256), square


def converted():
    model = nn.Sequential(Net(), nn.BatchNorm1d(256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, last = model[0].layers[0], model[0].layers[-1]
    last.weight = first.weight
    model.to("cpu").double()
    assert last.weight is first.weight is optimizer.param_groups[0]["params"][0]
    assert model[1].running_mean.dtype is first.weight.dtype is torch.float64
    assert isinstance(first.weight, nn.Parameter) and first.weight.requires_grad
    return model.bfloat16().float()[0], torch.empty(4096, 256), square


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))


def empty():
    with torch.device("meta"):
        model = Scaled()
    model.to_empty(device="cpu").bfloat16()
    assert model.layers[0].weight.device.type == "cpu"
    assert model.scale.exp().dtype is torch.bfloat16
    del model.scale
    return model.float(), torch.empty(4096, 256), square


def scaled():
    model = Scaled().bfloat16()
    assert model.scale.exp().dtype is torch.bfloat16
    del model.scale
    return model.float(), torch.empty(4096, 256), square


class Busy(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(256)

    def forward(self, x):
        return self.norm(super().forward(x))


class Idle(Busy):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(512, 512, bias=False)
        self.tied = nn.Linear(512, 512, bias=False)
        self.tied.weight = self.unused.weight
        self.register_buffer("table", torch.empty(512, 512))


class Breaking(Idle):
    def forward(self, x):
        print("a graph break")
        return super().forward(x)


class Sparse(Net):
    def __init__(self):
        super().__init__()
        where = torch.zeros(2, 1, dtype=torch.int64)
        edges = torch.sparse_coo_tensor(where, torch.ones(1), (4096, 4096), check_invariants=False)
        self.register_buffer("edges", edges)


class Adjacent(Sparse):
    def forward(self, x):
        return torch.sparse.mm(self.edges, super().forward(x))


def sparse():
    return Sparse(), torch.empty(4096, 256), square


def adjacent():
    return Adjacent(), torch.empty(4096, 256), square


def idle():
    return Idle(), torch.empty(4096, 256), square


def busy():
    return Busy(), torch.empty(4096, 256), square


def breaking():
    return Breaking(), torch.empty(4096, 256), square


def tied():
    model = Net()
    model.layers[-1].weight = model.layers[0].weight
    return model, torch.empty(4096, 256), square


def frozen():
    return Net().requires_grad_(False), torch.empty(4096, 256)


def nothing():
    pass


async def waiting():
    return Net(), torch.empty(4096, 256)


def text():
    return "model", torch.empty(1)


class Calling(Net):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x))


def calling(function):
    return lambda: (Calling(function), torch.empty(4096, 256), square)


pointer = calling(lambda x: x * x.data_ptr())
shapes = calling(lambda x: x @ torch.ones(3, 3))
elsewhere = calling(lambda x: x.cuda())


def opaque():
    @torch.library.custom_op("test_cli_estimate::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    return calling(unknown)()


def arguments():
    return Net(), (torch.empty(1), torch.empty(1)), square


def leaving():
    sys.exit(4)


def parsed():
    ArgumentParser().parse_args()
    return triple()


def failing():
    return Net(width=undefined)


def counting():
    return Net(layers=torch.ones(6).sum().int().item())
"""


def at(text):
    return f"my_script.py:{1 + SCRIPT[: SCRIPT.index(text)].count(chr(10))}"


MACHINE = ("--hardware", "titan-xp", "--policy", "pooch")


@pytest.fixture
def script(tmp_path):
    before, path = set(sys.modules), list(sys.path)
    file = tmp_path / "my_script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    yield file
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.endswith("my_script"):
            del sys.modules[name]


@pytest.fixture
def estimated(outcore, script):
    def run(function, *options):
        found = outcore("estimate", f"{script}:{function}", *MACHINE, *options, "--json")
        assert found.exit_code in (0, 1), found.output
        return found.exit_code, json.loads(found.stdout)

    return run


def test_what_fits_as_it_is(estimated):
    code, found = estimated("triple")
    assert code == 0
    assert found["fits"]
    assert found["fits_in_core"]
    assert found["slowdown"] == 1
    assert found["planned"]["counts"]["offload"] == 0
    assert found["smallest_budget_bytes"] < found["in_core_peak_bytes"] < found["budget_bytes"]
    weights = 6 * (256 * 256 + 256) * 4
    assert found["optimizer_bytes"] == weights
    assert found["source"] == "predicted"
    assert found["note"] == ""


def figures(estimated, function):
    """All but what names lines of the script."""
    _, found = estimated(function)
    return {k: v for k, v in found.items() if k not in {"target", "smallest_set_by"}}


@pytest.mark.parametrize(
    ("function", "alike"), [("converted", "tied"), ("empty", "triple"), ("scaled", "triple")]
)
def test_a_model_that_is_converted(estimated, function, alike):
    """As by `model.to(device)`."""
    assert figures(estimated, function) == figures(estimated, alike)
    assert nn.Module._apply.__module__ == nn.Module.__module__


def test_a_sparse_buffer_that_the_step_does_not_use(estimated):
    assert figures(estimated, "sparse") == figures(estimated, "triple")


@pytest.mark.parametrize("function", ["idle", "breaking"])
def test_what_the_step_does_not_use_is_counted(estimated, function):
    (_, idle), (_, busy) = estimated(function), estimated("busy")
    unused = 2 * 512 * 512 * 4
    assert idle["in_core_peak_bytes"] == busy["in_core_peak_bytes"] + unused
    assert idle["smallest_budget_bytes"] > busy["smallest_budget_bytes"] + unused
    assert idle["optimizer_bytes"] == busy["optimizer_bytes"]


def test_what_fits_by_a_plan(estimated):
    code, found = estimated("triple", "--budget", "25MiB")
    assert (code, found["fits"], found["fits_in_core"]) == (0, True, False)
    assert found["slowdown"] > 1
    planned = found["planned"]
    assert planned["peak_bytes"] <= 25 << 20 < found["in_core_peak_bytes"]
    assert planned["offloaded_bytes"] > 0
    assert "my_script.py:" in planned["moved"][0]["site"]
    sizes = [each["nbytes"] for each in planned["moved"]]
    assert sizes == sorted(sizes, reverse=True)


def test_what_does_not_fit(estimated):
    code, found = estimated("triple", "--budget", "1MiB")
    assert (code, found["fits"], found["planned"]) == (1, False, None)
    assert "smallest feasible budget" in found["reason"]
    smallest = found["smallest_budget_bytes"]
    lean = "search{min_bytes=1B,effort=0.0}"
    assert estimated("triple", "--budget", f"{smallest}B", "--policy", lean)[0] == 0
    assert estimated("triple", "--budget", f"{smallest - 4096}B", "--policy", lean)[0] == 1


def test_the_same_step_however_it_is_returned(estimated):
    _, triple = estimated("triple")
    _, function = estimated("function")
    assert function["in_core_peak_bytes"] == triple["in_core_peak_bytes"]
    _, pair = estimated("pair")
    assert pair["in_core_peak_bytes"] >= triple["in_core_peak_bytes"]
    _, keywords = estimated("keywords")
    assert keywords["in_core_peak_bytes"] >= triple["in_core_peak_bytes"]


def test_the_optimizer_is_counted_as_said(estimated):
    peaks = [estimated("triple", "--states", str(n))[1]["in_core_peak_bytes"] for n in range(3)]
    weights = 6 * (256 * 256 + 256) * 4
    assert [b - a for a, b in pairwise(peaks)] == [weights, weights]


def test_a_model_larger_than_any_memory_costs_none(estimated):
    code, found = estimated("huge", "--hardware", "h200")
    assert code == 1
    assert found["in_core_peak_bytes"] > 500 << 30


def test_a_script_does_not_see_the_arguments_of_this_command(estimated, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["outcore", "estimate", "--json"])
    code, found = estimated("parsed")
    assert (code, found | {"target": ""}) == (0, estimated("triple")[1] | {"target": ""})


def test_real_tensors_made_elsewhere_are_taken_along(estimated):
    assert estimated("constant")[0] == 0


def test_real_tensors_where_numbers_are_needed(estimated, outcore, script):
    refused = outcore("estimate", f"{script}:numpy", *MACHINE)
    assert refused.exit_code == 2
    assert (
        f"{at('numpy()[0]')}: return Net(int(torch.full((2,), 256).numpy()[0]))" in refused.stderr
    )
    assert "--real makes the model" in refused.stderr
    assert refused.stderr.count("error:") == 1
    _, rates = estimated("rates")
    _, real = estimated("numpy", "--real")
    _, fake = estimated("triple")
    assert real["in_core_peak_bytes"] == fake["in_core_peak_bytes"]
    assert rates["in_core_peak_bytes"] == fake["in_core_peak_bytes"]


def test_a_step_that_needs_numbers_cannot_be_traced(outcore, script):
    found = outcore("estimate", f"{script}:branching", *MACHINE)
    assert found.exit_code == 2
    assert f"{at('if x.sum() > 0')}: if x.sum() > 0:" in found.stderr
    assert "move code that reads tensor values out of the step" in found.stderr


def test_a_step_that_torch_compiles_in_parts_is_traced_as_a_whole(estimated, outcore, script):
    code, found = estimated("printing", "--budget", "40MiB")
    assert code == 0
    assert 'print("a graph break")' in found["note"]
    assert estimated("traceable")[1]["note"]
    told = outcore("estimate", f"{script}:printing", *MACHINE)
    assert "torch.compile splits the step (graph break) at my_script.py:" in told.stdout


def test_for_people(outcore, script):
    found = outcore("estimate", f"{script}:triple", *MACHINE, "--budget", "25MiB")
    assert found.exit_code == 0, found.output
    first, second, *rest = found.stdout.splitlines()
    assert first.endswith("my_script.py:triple on titan-xp (all predicted)")
    assert second.startswith("It does not fit in 25.0 MiB as it is. With outcore it does")
    assert [line.split("  ")[0] for line in rest if line[0] != " "] == [
        "in-core",
        "planned",
        "moved",
        "the largest",
        "smallest budget",
        "optimizer",
        "add one line",
    ]
    line = 'import outcore; outcore.wrap(model, budget="25.00MiB", policy="pooch")'
    assert rest[-1].endswith(line)
    assert "imported" not in found.stdout
    small = outcore("estimate", f"{script}:triple", *MACHINE, "--budget", "1MiB")
    assert small.exit_code == 1
    assert "no plan makes it fit: the smallest budget that works is" in small.stdout
    advised = small.stdout.splitlines()[-1].partition("budget=")[2]
    budget = advised.split('"')[1]
    assert advised == f'"{budget}", policy="search")'
    assert f"smallest budget  {budget} (" in small.stdout
    default = outcore("estimate", f"{script}:triple", *MACHINE[:2], "--budget", budget)
    assert default.exit_code == 0, "what is advised does not fit"
    assert default.stdout.endswith(f'budget="{budget}")\n')
    assert (
        "It fits in 11.9 GiB without outcore"
        in outcore("estimate", f"{script}:pair", *MACHINE).stdout
    )


def test_what_is_not_counted_is_said(outcore, script, estimated):
    assert "not counted" not in outcore("estimate", f"{script}:pair", *MACHINE).stdout
    said = outcore("estimate", f"{script}:convolving", *MACHINE).stdout
    # two forward; backward: one for the first convolution, one per gradient of the second
    count = estimated("convolving")[1]["convolutions"]
    assert count >= 4
    assert f"not counted      workspaces of {count} convolution ops" in said


@pytest.mark.parametrize(
    ("budget", "peak", "smallest", "line"),
    [
        (8 << 30, 7 << 30, 6 << 30, 'budget="8.00GiB"'),
        ((8 << 30) - 1, 7 << 30, 6 << 30, 'budget="7.99GiB"'),
        ((8 << 30) - 1, (8 << 30) - 2, 6 << 30, f'budget="{(8 << 30) - 1}B"'),
        (1 << 30, None, (6 << 30) + 1, 'budget="6.01GiB"'),
        ((6 << 30) + 2, None, (6 << 30) + 1, f'budget="{(6 << 30) + 2}B"'),
    ],
)
@pytest.mark.parametrize("policy", ["search", "pooch{early=true}"])
def test_the_advised_budget_can_be_met(policy, budget, peak, smallest, line):
    planned = peak and Prediction(
        peak_bytes=peak,
        seconds=1.0,
        counts=Counts(),
        held=0,
        offloaded_bytes=0,
        recompute_seconds=0.0,
        moved=(),
    )
    found = Forecast(
        hardware="h100",
        policy=policy,
        budget_bytes=budget,
        in_core_peak_bytes=9 << 30,
        in_core_seconds=1.0,
        smallest_budget_bytes=smallest,
        smallest_set_by="op 1",
        optimizer_bytes=0,
        planned=planned,
    )
    if policy != "search":
        line += f', policy="{policy if planned else "search"}"'
    assert one_line(found) == f"import outcore; outcore.wrap(model, {line})"
    (said,) = (text for name, text in rows(found) if name == "smallest budget")
    assert parse_size(said.split(" (")[0], None) >= smallest
    assert what_to_do(found, smallest) == ("add one line", one_line(found))
    assert what_to_do(found, smallest - 1)[0] == "what to do", "the device has less"


def test_the_verdict_does_not_promise_room_for_workspaces(outcore, script):
    found = outcore("estimate", f"{script}:convolving", *MACHINE, "--budget", "6.5MiB")
    assert found.exit_code == 0, found.output
    assert "With outcore it does: a step takes " in found.stdout
    assert "times as long, if the workspaces of convolutions fit, too." in found.stdout
    assert "workspaces of 5 convolution ops" in found.stdout


def test_a_module_by_name(outcore, script, monkeypatch):
    monkeypatch.chdir(script.parent)
    assert outcore("estimate", "my_script:pair", *MACHINE).exit_code == 0


def test_on_this_machine_in_half_precision(outcore, script):
    found = outcore("estimate", f"{script}:autocast", "--budget", "25MiB", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["in_core_seconds"] > 0


def test_on_this_machine(outcore, script):
    options = ("--budget", "25MiB", "--policy", "pooch", "--json")
    found = outcore("estimate", f"{script}:triple", *options)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["hardware"] == "this-machine"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("tripl", "there is no function 'tripl'; did you mean 'triple'?"),
        ("LOADED", "LOADED is not a function"),
        ("nothing", "it returns nothing; let it return (model, inputs), (model, inputs, loss_fn)"),
        ("waiting", "it returns a coroutine"),
        ("text", "the first value that it returns is a str, not a function or a model"),
        ("failing", "the function raises NameError: name 'undefined' is not defined, at my_script"),
        ("counting", "the function cannot be called: the code reads tensor values, which do not"),
        ("frozen", "nothing in it needs a gradient"),
        ("leaving", f"the function ends the process (exit code 4), at {at('sys.exit(4)')}"),
    ],
)
def test_a_function_that_will_not_do(outcore, script, function, said):
    found = outcore("estimate", f"{script}:{function}", *MACHINE)
    assert found.exit_code == 2, found.output
    assert said in found.stderr
    assert "never awaited" not in found.stderr


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        ("branching", "a step is estimated without running it: move code that reads tensor values"),
        ("pointer", "a step is estimated without running it"),
        ("opaque", "describe what the op returns, with torch.library.register_fake"),
        ("adjacent", "a step with sparse tensors cannot be estimated. In training"),
        ("shapes", "the step itself raises this: check that it runs in plain PyTorch"),
        ("arguments", "the step itself raises this"),
        ("frozen", "in training, outcore runs in-core what it cannot plan"),
        pytest.param(
            "elsewhere",
            "make the model and its inputs on the CPU: --hardware names the machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it can be traced there"),
        ),
    ],
)
def test_a_step_that_cannot_be_traced_says_what_to_try(outcore, script, function, advice):
    found = outcore("estimate", f"{script}:{function}", *MACHINE)
    assert found.exit_code == 2, found.output
    assert f"; {advice}" in found.stderr
    assert found.stderr.count("; ") == 1


def test_torch_does_not_log_an_error_that_is_shown(outcore, script):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    logged: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(logged)
    log.addHandler(handler)
    try:
        assert outcore("estimate", f"{script}:shapes", *MACHINE).exit_code == 2
        assert logged.empty()
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize(
    "said",
    [
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "No CUDA GPUs are available",
    ],
)
def test_what_is_on_a_gpu_is_better_made_on_the_cpu(said):
    assert advice_for(RuntimeError(said)) == ON_CPU


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("script.py", "it names no function; write path/to/script.py:function"),
        ("nowhere.py:step", "there is no file nowhere.py"),
        ("./folder:step", "folder is a folder; write path/to/script.py:function"),
        ("nowhere.at.all:step", "importing it raises ModuleNotFoundError: No module named"),
        ("leaving.py:step", "importing it ends this process (exit code 3), at leaving.py:2"),
        ("wrong.py:step", "importing it raises SyntaxError"),
    ],
)
def test_a_target_that_is_none(outcore, tmp_path, monkeypatch, target, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "folder").mkdir()
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    (tmp_path / "wrong.py").write_text("def step(:\n", encoding="utf-8")
    found = outcore("estimate", target, *MACHINE)
    assert found.exit_code == 2, found.output
    assert said in found.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "10G"), "cannot read '10G' as a size"),
        (("--budget", "100GiB"), "the machine has 11.9 GiB"),
        (("--policy", "poch"), "did you mean 'pooch'"),
        (("--hardware", "titan"), "did you mean 'titan-x'"),
    ],
)
def test_wrong_options_are_told_before_anything_is_imported(outcore, options, said):
    found = outcore("estimate", "nowhere.py:step", *MACHINE, *options)
    assert found.exit_code == 2
    assert said in found.stderr
