"""Complex numbers: planned, also with conjugate views, and bitwise equal to plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore import Backend
from outcore.capture import trace
from outcore.ir.store import digest
from tests.cpu.training import PROFILED_STEPS, mean_square, same, tight_budget, train

STEPS = PROFILED_STEPS + 2
ROWS, WIDTH = 512, 64


class Stack(nn.Module):
    """Layers with a complex function after each."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x)) + x
        return x


def turned(x: Tensor) -> Tensor:
    """Rotary position embeddings, as in the first Llama."""
    angles = torch.outer(torch.arange(ROWS), 0.1 ** torch.arange(WIDTH // 2))
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.view(ROWS, WIDTH // 2, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


def filtered(x: Tensor) -> Tensor:
    """A long convolution, computed in the frequency domain."""
    spectrum = torch.fft.rfft(x)
    result: Tensor = torch.fft.irfft(spectrum * torch.fft.rfft(x.roll(1, 0)), n=WIDTH)
    return result / WIDTH


def waves(x: Tensor) -> Tensor:
    return torch.exp(x * 1j).imag


def mirrored(x: Tensor) -> Tensor:
    """Views of views: a negative one is the imaginary part of a conjugate."""
    z = torch.complex(x, x.sin())
    mirror = torch.conj(z).t()
    return (mirror.imag * mirror.real).t().tanh() + (mirror @ z).abs().mean().tanh()


class Complex(nn.Module):
    """Layers with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        wide = torch.complex64
        self.first = nn.Linear(WIDTH, WIDTH // 2, dtype=wide)
        self.last = nn.Linear(WIDTH // 2, WIDTH, dtype=wide)

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x.to(torch.complex64))))
        power: Tensor = (z * z.conj()).real
        return power


def images() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def trained(make: Callable[[], nn.Module], backend: Any) -> list[list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = make()
    call = module if backend is None else torch.compile(module, backend=backend)
    return train(module, call, [images()], mean_square, STEPS)


BETWEEN = (turned, filtered, waves, mirrored)
MODELS: list[Callable[[], nn.Module]] = [Complex, *(partial(Stack, each) for each in BETWEEN)]


@pytest.mark.parametrize("make", MODELS, ids=["layers", *(each.__name__ for each in BETWEEN)])
def test_it_is_planned(make: Callable[[], nn.Module]) -> None:
    budget = tight_budget(make(), [images()], mean_square, share=0.8)
    backend = Backend(budget=budget, strict=True)
    found = trained(make, backend)  # first: what the other run leaves behind would count
    assert same(found, trained(make, None))
    report = backend.report()
    assert report.state == "planned"
    assert report.counts.offload + report.counts.recompute
    assert report.measured_peak_bytes
    assert report.predicted_peak_bytes
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= report.budget_bytes


def test_a_gradient_that_is_read_as_a_conjugate() -> None:
    """A move copies only its bytes, not its conjugate bit, and real views use these bytes."""

    def spectrum(weight: Tensor, x: Tensor) -> Tensor:
        return torch.view_as_complex((x @ weight).view(ROWS, WIDTH // 2, 2))

    def gradients(call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        weight = torch.eye(WIDTH).requires_grad_()
        for seed in range(STEPS):
            torch.manual_seed(seed)
            tangent = torch.randn(ROWS, WIDTH // 2, dtype=torch.complex64)
            result = call(weight, images())
            found += torch.autograd.grad(result, weight, tangent.conj() if seed % 2 else tangent)
        return found

    expected = gradients(spectrum)
    backend = Backend(budget="1GiB", strict=True)
    assert same([gradients(torch.compile(spectrum, backend=backend))], [expected])
    assert backend.report().state == "in-core", "all of it fits"


def complex_images() -> Tensor:
    return torch.complex(images(), images().sin())


def turn(z: Tensor) -> Tensor:
    return z.conj()


def turn_back(z: Tensor) -> Tensor:
    return z.conj().imag


@pytest.mark.parametrize("of_input", [torch.clone, turn])
@pytest.mark.parametrize("of_output", [torch.clone, turn, turn_back])
def test_inputs_and_outputs_that_are_read_as_conjugates(
    of_input: Callable[[Tensor], Tensor], of_output: Callable[[Tensor], Tensor]
) -> None:
    """As at a graph break after such a view."""

    def product(weight: Tensor, z: Tensor) -> Tensor:
        return of_output(torch.tanh(z @ weight))

    def gradients(call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        weight = torch.eye(WIDTH, dtype=torch.complex64).requires_grad_()
        for step in range(STEPS + 2):
            if step == STEPS:
                backend.close()  # what follows runs in-core
            result = call(weight, of_input(complex_images()))
            loss = (torch.view_as_real(result) if result.is_complex() else result).square().mean()
            found += [result.detach(), *torch.autograd.grad(loss, weight)]
        return found

    def resolved(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda weight, z: call(weight, z).resolve_conj()

    torch._dynamo.reset()
    backend = Backend(budget="1GiB", strict=True)
    found = gradients(resolved(torch.compile(product, backend=backend)))
    assert same([found], [gradients(resolved(product))])


def test_a_trace_made_beforehand_is_that_of_training() -> None:
    torch._dynamo.reset()
    module, x = Stack(waves), images()
    backend = Backend(budget="1GiB")
    mean_square(torch.compile(module, backend=backend)(x)).backward()
    assert backend.engine is not None
    (graph,) = backend.engine.graphs
    assert digest(trace(module, x)) == graph.identity.digest
