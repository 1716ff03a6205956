"""Gradients of cross-entropy: computed by blocks of rows, bitwise equal to PyTorch's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from outcore import Backend, aten
from outcore.capture.offline import trace_network
from outcore.capture.rewrites import cross_entropy
from outcore.capture.rewrites.cross_entropy import GRADIENT, by_rows
from outcore.capture.rewrites.metadata_only import LargeInputs
from outcore.errors import InfeasibleError
from outcore.ir.program import Copy, Run
from outcore.measure import metered
from outcore.networks import NETWORKS
from outcore.runtime.settings.options import Keywords
from tests.cpu.donating import DTYPES, bits
from tests.cpu.models import gpt2
from tests.cpu.scores import ATEN, by_torch, cases, given
from tests.cpu.training import inside, same, tight_budget, train

MIB = 1 << 20
OVER = aten.in_place(aten.CROSS_ENTROPY)
STEPS = 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_torch_s(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LEAST_BLOCK_BYTES", 0)
    for args, kind in cases(dtype, "cpu"):
        expected = by_torch(*args)
        found = GRADIENT(*args)
        assert torch.equal(bits(found), bits(expected)), kind
        assert found.stride() == expected.stride(), kind
        over = args[1].clone()
        assert OVER(args[0], over, *args[2:], out=over) is over
        assert torch.equal(bits(over), bits(expected)), kind


def test_blocks_begin_where_vectors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = cross_entropy._rows_at_once
    assert at_once(torch.empty(8192, 50257, device="meta")) == 512, "a sixteenth of all"
    assert at_once(torch.empty(1000, 50257, device="meta")) == 64, "no more blocks than that"
    assert at_once(torch.empty(160, 50257, device="meta")) == 16, "no fewer rows than that"
    assert at_once(torch.empty(1024, 256, device="meta")) == 1024, "no fewer bytes than that"
    monkeypatch.setattr(cross_entropy, "LEAST_BLOCK_BYTES", 0)
    for rows in range(500):
        block = at_once(torch.empty(rows, 3, device="meta"))
        assert block % cross_entropy.ROWS_ALIKE == 0
        assert block * cross_entropy.MOST_BLOCKS >= rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_the_result_or_a_block(dtype: torch.dtype) -> None:
    args = given((1024, 8192), dtype, "cpu")
    expected, output = by_torch(*args), args[1]
    found, meter = metered(lambda: GRADIENT(*args))
    assert torch.equal(found, expected)
    assert meter.peak_bytes(0, 1 << 62) < output.nbytes + MIB
    assert cross_entropy.block_bytes(output) == output.nbytes // 16
    over, meter = metered(lambda: OVER(*args, out=output))
    assert torch.equal(over, expected)
    assert meter.peak_bytes(0, 1 << 62) < output.nbytes // 16 + MIB


def test_what_is_not_in_order_is_made_as_torch_makes_it() -> None:
    gradient, output, *rest = given((50, 40), torch.float32, "cpu")
    turned = output.t().contiguous().t()
    expected = by_torch(gradient, turned, *rest)
    found = GRADIENT(gradient, turned, *rest)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_its_effects_are_those_of_torch_s_ops() -> None:
    assert not aten.effects(GRADIENT)
    with FakeTensorMode():
        made = torch.empty(4, 4, device="cuda")
    for op in (GRADIENT, ATEN.nll_loss_backward.default, ATEN._log_softmax_backward_data.default):
        assert not aten.effects_on_cuda(op, (), made)


# ---- steps --------------------------------------------------------------------------------------


class Words(nn.Module):
    """Scores of 8 MiB over a vocabulary; no other tensor is as large."""

    def __init__(self, reduction: str = "mean", *, weighted: bool = False) -> None:
        super().__init__()
        self.reduction = reduction
        self.words, self.scores = nn.Embedding(2048, 32), nn.Linear(32, 2048)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.weight = nn.Buffer(torch.linspace(0, 1, 2048)) if weighted else None

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words.clamp_min(0))
        for layer in self.layers:
            x = x + torch.dropout(torch.tanh(layer(x)), 0.1, True)
        scores = self.scores(x).flatten(0, 1)
        loss = F.cross_entropy(scores, words.flatten(), self.weight, reduction=self.reduction)
        return loss.mean()


class Read(nn.Module):
    """GPT-2 from transformers, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2(2048, width=32, layers=2, attn_implementation="eager")

    def forward(self, words: Tensor) -> Tensor:
        scores = self.model(words.clamp_min(0)).logits
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def words() -> Tensor:
    """A batch of words, some of which the loss ignores."""
    drawn = torch.arange(8 * 128).view(8, 128) * 7 % 2048
    return drawn.where(drawn % 5 != 0, -100)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def trained(module: nn.Module, backend: Any) -> list[list[Tensor]]:
    torch._dynamo.reset()
    module.compile(backend=backend, dynamic=False)
    return train(module, module, [words()], lambda loss: loss, STEPS)


def in_steps(backend: Backend) -> tuple[list[str], bool, bool]:
    """The loss's gradient ops; whether one overwrites log-softmax; whether tensors are moved."""
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    trace, planned = graph.captured.trace, graph.planned
    assert planned is not None
    actions = [i.action for i in planned.program.body]
    runs = [a for a in actions if isinstance(a, Run)]
    over = any(trace.ops[r.op].target == aten.CROSS_ENTROPY and r.donate for r in runs)
    found = [op.target for op in trace.ops if "_backward" in op.target]
    moved = any(isinstance(a, Copy) for a in actions)
    return [t for t in found if "loss" in t or "log_softmax" in t or "cross" in t], over, moved


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "words": Words,
    "sum": lambda: Words("sum"),
    "none": lambda: Words("none"),
    "weighted": lambda: Words(weighted=True),
    "gpt2": Read,
}


@pytest.mark.parametrize("policy", ["recompute-all", "swap-all"])
@pytest.mark.parametrize("name", MAKERS)
def test_steps_inside_a_budget(name: str, policy: str) -> None:
    """Tensors copied back from disk have larger storages, so no result is written over them."""
    make, moving = MAKERS[name], policy == "swap-all"
    options: Keywords = {"policy": policy, "strict": True}
    if not moving:
        options["disk_budget"] = 0
    share = 0.8 if moving else 0.3
    budget = tight_budget(made(make), [words()], lambda loss: loss, share, **options)
    module, backend = made(make), Backend(budget=budget, **options)
    found = trained(module, backend)
    gradients, over, moved = in_steps(backend)
    assert gradients == [aten.CROSS_ENTROPY]
    assert (over, moved) == (not moving, moving)
    inside(backend.report())
    assert same(found, trained(made(make), "aot_eager"))


def test_a_budget_is_enough_that_has_no_room_for_two_of_the_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend(budget="14MiB", disk_budget=0, strict=True)
    assert same(trained(made(Words), backend), trained(made(Words), "aot_eager"))
    inside(backend.report())
    monkeypatch.setattr(cross_entropy, "LEAST_BLOCK_BYTES", 1 << 60)
    with pytest.raises(InfeasibleError, match="nll_loss_backward"):
        trained(made(Words), Backend(budget="14MiB", disk_budget=0))


class Cast(Words):
    """In half precision, except for the loss."""

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(words)


class Pictures(nn.Module):
    """One class per pixel: PyTorch has other ops for this loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(2048, 512)

    def forward(self, words: Tensor) -> Tensor:
        scores = self.scores(words.clamp_min(0)).view(8, 8, 16, 512).movedim(-1, 1)
        return F.cross_entropy(scores, words.view(8, 8, 16).clamp(0, 511))


class Smoothed(Words):
    """With label smoothing, another gradient is added to the one of the loss."""

    def forward(self, words: Tensor) -> Tensor:
        scores = self.scores(self.words(words.clamp_min(0))).flatten(0, 1)
        return F.cross_entropy(scores, words.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize(
    ("make", "ours"), [(Cast, True), (Pictures, False), (Smoothed, False)], ids=str
)
def test_other_steps(make: Callable[[], nn.Module], ours: bool) -> None:
    module, backend = made(make), Backend(budget="1GiB")
    found = trained(module, backend)
    assert same(found, trained(made(make), "aot_eager"))
    inside(backend.report())
    assert (aten.CROSS_ENTROPY in in_steps(backend)[0]) == ours


# ---- what PyTorch's ops still compute -----------------------------------------------------------


def plain(gradient: Tensor, output: Tensor, *rest: Any, **told: Any) -> list[Tensor]:
    """Results of PyTorch's two gradient ops; the second op reads the result of the first."""
    dim, dtype = told.get("dim", 1), told.get("dtype", output.dtype)
    of_loss = ATEN.nll_loss_backward(gradient.detach(), output.detach(), *rest)
    of_loss = of_loss.detach()
    made = ATEN._log_softmax_backward_data(of_loss, output.detach(), dim, dtype)
    return [of_loss, made]


Step = Callable[..., Any]

OTHERS: dict[str, tuple[Step, bool]] = {
    "torch's": (lambda g, s, *r: plain(g, s.log_softmax(1), *r)[1], True),
    "the last side": (lambda g, s, *r: plain(g, s.log_softmax(1), *r, dim=-1)[1], True),
    "another side": (lambda g, s, *r: plain(g, s.log_softmax(0), *r, dim=0)[1], False),
    "half": (lambda g, s, *r: plain(g, s.log_softmax(1), *r, dtype=torch.half)[1], False),
    "given": (lambda g, s, *r: plain(g, s, *r)[1], False),
    "turned": (lambda g, s, *r: plain(g, s.t().neg().t(), *r)[1], False),
    "used twice": (lambda g, s, *r: plain(g, s.log_softmax(1), *r), False),
    "of another": (
        lambda g, s, *r: ATEN._log_softmax_backward_data(
            ATEN.nll_loss_backward(g, s.log_softmax(1), *r), s.exp(), 1, s.dtype
        ),
        False,
    ),
}


def read_later(g: Tensor, s: Tensor, *rest: Any) -> Any:
    """Log-softmax is still read after its gradient is computed."""
    output = s.log_softmax(1)
    made = plain(g, output, *rest)[1]
    return made, output.view(-1).exp()


OTHERS["read later"] = (read_later, False)
OTHERS["returned"] = (lambda g, s, *r: (o := s.log_softmax(1), plain(g, o, *r)[1]), False)


@pytest.mark.parametrize("name", OTHERS)
def test_which_calls_it_stands_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LEAST_BLOCK_BYTES", 0)
    step, ours = OTHERS[name]
    with FakeTensorMode(), torch.no_grad():
        args = torch.empty(()), torch.empty(64, 64), torch.empty(64, dtype=torch.long)
        total = torch.empty(())
        joint = make_fx(lambda g, s, t, n: step(g, s, t, None, 1, -100, n))(*args, total)
    by_rows(joint, LargeInputs().sites(joint, anywhere=False))
    targets = [str(n.target) for n in joint.graph.nodes]
    assert (aten.CROSS_ENTROPY in targets) == ours
    assert ("aten.nll_loss_backward.default" in targets) == (not ours)


def test_small_scores_are_torch_s() -> None:
    with FakeTensorMode(), torch.no_grad():
        args = torch.empty(()), torch.empty(64, 64), torch.empty(64, dtype=torch.long)
        step = OTHERS["torch's"][0]
        joint = make_fx(lambda g, s, t, n: step(g, s, t, None, 1, -100, n))(*args, torch.empty(()))
    by_rows(joint, LargeInputs().sites(joint, anywhere=False))
    assert "aten.nll_loss_backward.default" in [str(n.target) for n in joint.graph.nodes]


@pytest.mark.parametrize("samples", [1, 3])
def test_networks_have_it_by_their_vocabulary(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_it() -> bool:
        trace = trace_network(NETWORKS["gpt2"].small, samples)
        return aten.CROSS_ENTROPY in [op.target for op in trace.ops]

    assert not has_it()
    monkeypatch.setattr(cross_entropy, "LEAST_ROW_BYTES", 2000)
    assert has_it()
