"""outcore run: the same as Python, and a report of what would fit if memory ran out."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from outcore.errors import CaptureError
from outcore.measure import causes, ran_out
from outcore.preflight import out_of_memory
from outcore.preflight.optimizers import OptimizerState, held_for
from outcore.preflight.room import let_go
from outcore.preflight.script import WatchThread
from outcore.preflight.step import Step, _note, no_memory, traced
from outcore.preflight.watch import CallWatch, again

OUTCORE = [sys.executable, "-c", "from outcore.cli import main; main()"]
SCRIPTS = {
    "arguments": "import sys; print(sys.argv, sys.path[0], __name__, __file__)",
    "exits": "import sys; sys.exit(3)",
    "says": "import sys; sys.exit('that will not do')",
    "fails": (
        "def f():\n    raise OSError('no')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()\n"
    ),
    "interrupted": "import atexit; atexit.register(print, 'bye'); raise KeyboardInterrupt",
    "hooked": "import sys; sys.excepthook = lambda *e: print('hook', e[1]); raise OSError('gone')",
    "wrong": "def f(:\n",
    "environment": (
        "import os, sys, threading\n"
        "print(sorted(os.environ), sys.excepthook, 'torch' in sys.modules)\n"
        "print(len(threading.enumerate()))"
    ),
    "pickled": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)"
    ),
    "late": (
        "import atexit, pickle, threading, time\nclass A: pass\n"
        "def late():\n    time.sleep(0.2)\n    print(len(pickle.dumps(A())))\n"
        "atexit.register(late)\nthreading.Thread(target=late).start()"
    ),
    "globals": (
        "print(sorted((k, str(v)) for k, v in globals().items()"
        " if k not in ('__annotations__', '__loader__')))"
    ),
}


def python(*arguments, folder=None):
    command = [*map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def told(done):
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does(name, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPTS[name], encoding="utf-8")
    plain = told(python(sys.executable, script, "a", "--help"))
    assert told(python(*OUTCORE, "run", script, "--", "a", "--help")) == plain
    if name == "arguments":
        assert told(python(*OUTCORE, "run", script, "a", "--help")) == plain
        alone = told(python(sys.executable, script))
        assert told(python(*OUTCORE, "run", script)) == alone
    if name == "interrupted":
        assert plain[:2] == (-signal.SIGINT, "bye\n")


def test_a_script_by_a_relative_path_does_what_it_does(tmp_path):
    text = "import os, pathlib\nos.chdir('/')\nprint(pathlib.Path(__file__).exists())\n1 / 0\n"
    (tmp_path / "moves.py").write_text(text, encoding="utf-8")
    plain = python(sys.executable, "moves.py", folder=tmp_path)
    assert plain.stdout == "True\n"
    assert told(python(*OUTCORE, "run", "moves.py", folder=tmp_path)) == told(plain)


def test_a_folder_does_what_it_does(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(SCRIPTS["arguments"], encoding="utf-8")
    plain = python(sys.executable, "folder", "a", folder=tmp_path)
    assert plain.returncode == 0
    assert told(python(*OUTCORE, "run", "folder", "a", folder=tmp_path)) == told(plain)


def test_a_module_does_what_it_does(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SCRIPTS["arguments"], encoding="utf-8")
    plain = python(sys.executable, "-m", "package", "a", "-b", folder=tmp_path)
    assert plain.returncode == 0
    done = python(*OUTCORE, "run", "-m", "package", "--", "a", "-b", folder=tmp_path)
    assert told(done) == told(plain)
    missing = python(sys.executable, "-m", "package.none", folder=tmp_path)
    assert told(python(*OUTCORE, "run", "-m", "package.none", folder=tmp_path)) == told(missing)


@pytest.mark.parametrize("arguments", [(), ("",), ("nowhere.py",)])
def test_nothing_to_run(arguments, outcore):
    done = outcore("run", *arguments)
    assert done.exit_code == 2
    assert "SCRIPT" in done.stderr


# ---- memory that runs out ------------------------------------------------------------------------

TRAINING = """
import resource, sys
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return torch.tanh(x * self.weight)

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))

    def forward(self, x, *, mask=None):
        return self.layers(x * mask)

def limit(nbytes):
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + nbytes,) * 2)

def main():
    model = Net(40)
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.MSELoss()
    x, mask = torch.ones(8192, 1024), torch.ones(1024)
    limit(int(sys.argv[1]) << 20)
    for _ in range(2):
        loss = criterion(model(x, mask=mask), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""


def said(stderr: str) -> list[str]:
    """Its lines, without the one that torch logs if there is a CUDA compiler but no GPU."""
    return [line for line in stderr.splitlines() if "No CUDA runtime is found" not in line]


def test_what_would_fit_is_told_where_memory_ran_out(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTCORE_POLICY", "pooch{early=true}")
    script = tmp_path / "train.py"
    script.write_text(TRAINING, encoding="utf-8")
    done = python(*OUTCORE, "run", script, "--", 1200)
    assert done.returncode == 1
    error, _, rest = done.stderr.partition("\noutcore: ")
    assert error.startswith("Traceback (most recent call last):\n  File")
    *_, last = said(error)
    assert "can't allocate memory" in last
    assert "outcore/" not in error
    assert rest.startswith("a training step of Net needs "), done.stderr
    lines = {line[:17].strip(): line[17:] for line in rest.splitlines()[2:]}
    assert "(8192, 1024) float32, (1024,) float32" in lines["counted"]
    assert "AdamW 320 KiB" in lines["counted"]
    assert lines["planned"].endswith("by pooch{early=true}")
    assert "times in-core" in lines["planned"]
    assert "set by" in lines["smallest budget"]
    assert lines["add one line"].startswith("import outcore; outcore.wrap(model, budget=")
    plain = python(sys.executable, script, 1200)
    assert said(plain.stderr)[-1].split(":")[0] == last.split(":")[0]


def test_what_a_variable_keeps_for_backward_is_let_go():
    """A script without functions keeps its loss in a global variable."""
    weight = torch.ones(8, requires_grad=True)
    loss = torch.sigmoid(weight).square().sum()
    let_go(RuntimeError("out of memory"))
    assert loss.grad_fn is None
    assert weight.requires_grad


def test_nothing_is_told_of_another_error_or_none(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace("8192", "16") + "raise ValueError('no')", encoding="utf-8")
    done = python(*OUTCORE, "run", script, "--", 4096)
    assert done.returncode == 1
    assert said(done.stderr)[-1] == "ValueError: no"


def test_what_cannot_be_told_is_one_line(tmp_path):
    script = tmp_path / "train.py"
    plain = "return self.layers(x * mask)"
    source = TRAINING.replace(plain, f"{plain} if x[0, 0] > 0 else x")
    script.write_text(source, encoding="utf-8")
    done = python(*OUTCORE, "run", script, "--", 1200)
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("outcore: could not estimate what would fit: ")


def test_out_of_memory_is_known_by_many_names():
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert ran_out(MemoryError())
    assert ran_out(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"))
    assert not ran_out(RuntimeError("shapes differ"))
    assert not ran_out(KeyError("out of memory"))
    wrapped = RuntimeError("a worker failed")
    wrapped.__cause__ = MemoryError()
    assert ran_out(wrapped)
    apart = RuntimeError("shapes differ")
    apart.__context__, apart.__suppress_context__ = MemoryError(), True
    assert not ran_out(apart)


def test_errors_that_cause_each_other_have_an_end():
    first, second = RuntimeError("one"), ValueError("another")
    first.__cause__, second.__cause__ = second, first
    assert list(causes(first)) == [first, second]
    assert not ran_out(first)


def after(model, x, monkeypatch, capsys):
    """What is printed if a call of `model` runs out of memory on an unmeasured machine."""

    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def unmeasured():
        raise MemoryError

    monkeypatch.setattr(out_of_memory, "this_machine", unmeasured)
    monkeypatch.setattr(out_of_memory, "room_bytes", lambda *_: 3 << 19)
    monkeypatch.setenv("OUTCORE_POLICY", "swap-all{min_bytes=1B}")
    inner = model.module if isinstance(model, nn.DataParallel) else model
    hook = inner.register_forward_hook(run_out)
    error = failed(lambda: model(x))
    hook.remove()
    out_of_memory.tell(error, CallWatch())
    assert error.__traceback__ is None, "its frames hold memory"
    return capsys.readouterr().err


@pytest.mark.parametrize("around", [nn.Identity, nn.DataParallel])
def test_without_a_measured_machine_memory_alone_is_told(around, monkeypatch, capsys):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    model = net if around is nn.Identity else nn.DataParallel(net)
    told = after(model, torch.ones(512, 64), monkeypatch, capsys)
    assert told.startswith("\noutcore: a training step of Sequential needs ")
    verdict = "It does not fit in 1.50 MiB as it is. With outcore it does."
    assert f"and this process has 1.50 MiB available (all predicted)\n{verdict}\n" in told
    assert "planned          " in told
    assert " times " not in told
    assert " a step" not in told


def test_nothing_that_trains_is_one_line(capsys):
    out_of_memory.tell(MemoryError(), CallWatch())
    assert capsys.readouterr().err == "\noutcore: no module was being trained\n"
    out_of_memory.tell(ValueError(), CallWatch())
    assert not capsys.readouterr().err


# ---- watching ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x, times=1, *, more=None):
        return self.inner(x) * times + more["y"]

    def watched(self, watch, *args, **kwargs):
        """Call it; inside the call, `watch` looks at the frame of the inner module."""
        handle = self.inner.register_forward_pre_hook(lambda *_: watch.look(sys._getframe()))
        try:
            return self(*args, **kwargs)
        finally:
            handle.remove()


def test_the_outermost_module_that_is_trained_is_remembered():
    watch, model, loss = CallWatch(), Net(), nn.MSELoss()
    x, y = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8).T.contiguous().T
    loss(model.watched(watch, x, 2, more={"y": y}), y).backward()
    assert watch.last.module() is model
    assert watch.called == {"Net": None}
    args, kwargs = again(watch.last.args), again(watch.last.kwargs)
    assert (args[0].shape, args[0].requires_grad, args[1]) == (x.shape, True, 2)
    assert kwargs["more"]["y"].stride() == y.stride()
    before = watch.last
    model.eval().watched(watch, x, more={"y": y})
    Net().requires_grad_(requires_grad=False).watched(watch, x, more={"y": y})
    assert watch.last is before


def test_nothing_is_kept_alive():
    watch, model, x = CallWatch(), Net(), torch.ones(4, 8)
    model.watched(watch, x, more={"y": x})
    assert watch.last.module() is model
    del model
    gc.collect()
    assert watch.last.module() is None


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        self.net(x, more={})


def failed(call):
    try:
        call()
    except (KeyError, ZeroDivisionError, torch.OutOfMemoryError) as error:
        return error
    raise AssertionError


def test_an_error_tells_by_the_frames_that_it_came_through():
    watch, model = CallWatch(), Failing()
    watch.look_back(failed(lambda: model(torch.ones(2, 8))).__traceback__)
    assert watch.last.module() is model
    assert again(watch.last.args)[0].shape == (2, 8)
    again_later = failed(lambda: model.net(torch.ones(3, 8), more={}))
    watch.look_back(again_later.__traceback__)
    assert watch.last.module() is model, "its part runs again in the backward pass"
    watch.look_back(failed(lambda: 1 / 0).__traceback__)
    assert watch.last.module() is model


@dataclass
class Extra:
    y: torch.Tensor


def test_an_argument_that_is_gone_cannot_be_recreated():
    class Odd(Net):
        def forward(self, x, times=None, *, more=None):
            return self.inner(x)

    watch, model, extra = CallWatch(), Odd(), Extra(torch.ones(2))
    model.watched(watch, torch.ones(4, 8), extra)
    assert again(watch.last.args)[1] is extra
    del extra
    gc.collect()
    with pytest.raises(LookupError, match="cannot be recreated"):
        again(watch.last.args)


def test_autocast_is_seen():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.net = nn.Linear(8, 8), Net()

        def forward(self, x, look):
            return self.net.watched(look, self.first(x), more={"y": x})

    watch, model, x = CallWatch(), Deep(), torch.ones(4, 8)
    model(x, watch)
    assert watch.last.module() is model
    assert watch.half is None
    with torch.autocast("cpu", torch.bfloat16):
        model(x, watch)
    assert watch.half == torch.bfloat16


def test_a_thread_looks_while_the_script_runs():
    with WatchThread() as looking:
        model, x = Net(), torch.ones(4, 8)
        until = time.monotonic() + 20
        while (looking.watch is None or looking.watch.last is None) and time.monotonic() < until:
            model(x, more={"y": x})
    assert looking.watch.last.module() is model
    assert looking.watch.last.kwargs["more"]["y"].sizes == (4, 8)


def test_who_looks_holds_nothing():
    """A function's objects are freed when it returns: on a GPU they may be most of the memory."""

    class Made:
        pass

    def made() -> weakref.ref[Made]:
        thing = Made()
        time.sleep(0.02)  # long enough to be looked at
        return weakref.ref(thing)

    with WatchThread() as looking:
        until = time.monotonic() + 20
        while looking.watch is None and time.monotonic() < until:
            time.sleep(0.01)
        assert [made()() for _ in range(20)] == [None] * 20


# ---- the step, traced again ----------------------------------------------------------------------


def layer() -> nn.Module:
    """Parameters with one and two dimensions, so large that step counts hardly matter."""
    return nn.Linear(64, 48)


MOMENTUM = {"lr": 1e-3, "momentum": 0.9}
OPTIMIZERS = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "lr": torch.tensor(1e-3)}),
    ("AdamW", {"foreach": True}),
    ("SGD", {"lr": 1e-3}),
    ("SGD", MOMENTUM),
    ("RMSprop", {"centered": True, **MOMENTUM}),
    *((name, {}) for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax")),
    *((name, {}) for name in ("LBFGS", "Muon", "NAdam", "RAdam", "Rprop", "SparseAdam")),
]


def test_all_optimizers_of_torch_are_among_those_tested():
    made = {name for name, each in vars(torch.optim).items() if isinstance(each, type)}
    assert made - {"Optimizer"} == {name for name, _ in OPTIMIZERS}


def case(name):
    """A model that the optimizer supports, and its input."""
    if name == "SparseAdam":
        return nn.Embedding(48, 64, sparse=True), torch.arange(48)
    if name == "Muon":
        return nn.Linear(64, 48, bias=False), torch.ones(1, 64)
    return layer(), torch.ones(1, 64)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_an_optimizer_of_torch_is_counted_as_it_will_be(name, options):
    model, x = case(name)
    if name == "LBFGS":
        options = {"history_size": 2, "max_iter": 6, "tolerance_grad": 0.0, "tolerance_change": 0.0}
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    before = held_for(model)
    assert (before.names, before.unknown) == ((name,), ())

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    states = optimizer.state.values()
    held = sum(t.nbytes for t in tree_leaves([*map(dict, states)]) if isinstance(t, torch.Tensor))
    numbers = 64  # counts of steps, step sizes and the like
    assert held - numbers <= before.nbytes <= held
    assert held_for(model) == before
    assert (before.nbytes > 0) is (options != {"lr": 1e-3})


class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"m": torch.zeros_like(parameter)}


def test_an_optimizer_of_others_that_is_not_counted_is_named(monkeypatch, capsys):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    made = Own(model.parameters(), {})
    told = after(model, torch.ones(512, 64), monkeypatch, capsys)
    assert "optimizer: Own 0 B, and more not known yet\n" in told
    assert "not counted      the state of Own, memory of the loss itself, and" in told
    made.step()
    told = after(model, torch.ones(512, 64), monkeypatch, capsys)
    assert "optimizer: Own 195 KiB\n" in told
    assert "not counted      memory of the loss itself, and" in told


def test_an_optimizer_of_others_is_counted_once_it_has_stepped():
    model = layer()
    made = Own(model.parameters(), {})
    assert held_for(model) == OptimizerState(("Own",), 0, ("Own",))
    made.step()
    assert held_for(model) == OptimizerState(("Own",), sum(p.nbytes for p in model.parameters()))


def test_a_kind_of_a_torch_optimizer_is_counted_as_that():
    class Mine(torch.optim.AdamW):
        def __init__(self, model):
            super().__init__(model.parameters(), lr=1.0)

    model = layer()
    made = [Mine(model)]
    nbytes = sum(p.nbytes for p in model.parameters())
    assert held_for(model) == OptimizerState(("Mine",), 2 * nbytes)
    around = torch.optim.Adam(model.parameters())
    vars(around)["optimizer"] = made[0]
    assert held_for(model) == OptimizerState(("Mine",), 2 * nbytes)


def test_an_optimizer_of_something_else_is_not_counted():
    other = torch.optim.Adam(layer().parameters())
    assert held_for(layer()) == OptimizerState((), 0)
    assert not other.state


def test_a_graph_that_is_not_planned_in_training_is_told_from_several():
    def whole(x):
        print("a graph break")  # noqa: T201 - torch.compile breaks the graph here
        return model(x)

    model, mode = nn.Linear(8, 8), no_memory()
    apart = traced(Step(whole, (torch.ones(4, 8),)), mode)
    assert "splits the step (graph break) at test_cli_run.py:" in apart.note
    refused = CaptureError(reason="it is odd")
    assert _note(refused) == "outcore runs the step in-core: cannot plan this graph: it is odd"
    assert traced(Step(model, (torch.ones(4, 8),)), mode).note == ""


def test_the_model_is_as_it_was_after_tracing():
    model = Net()
    model.plain = torch.ones(8)
    before = {name: t for module in model.modules() for name, t in vars(module).items()}
    state = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    mode = no_memory()
    with mode:
        x = torch.empty(4, 8)
    trace = traced(Step(model, (x,), {"more": {"y": torch.ones(4, 8)}}), mode).trace
    assert sum(b.role.value == "param" for b in trace.buffers) == 4
    assert before.keys() == {name for module in model.modules() for name in vars(module)}
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == state[name][0]
        assert torch.equal(tensor, state[name][1])
