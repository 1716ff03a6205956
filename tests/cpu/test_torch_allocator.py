"""Settings of torch's allocator, with a stand-in for the part of torch that needs a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from outcore.execute import torch_allocator
from outcore.execute.segments import EXPANDABLE, VARIABLES
from outcore.execute.torch_allocator import expand, expands_well, settings

GPU = torch.device("cuda", 0)
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
OFF = "expandable_segments:False"


class Allocator:
    """Keeps what is set, and refuses allocations by raising `error`, if that is set."""

    def __init__(self) -> None:
        self.text, self.error = "", None
        self.calls: list[str] = []

    error: Exception | None

    def set(self, text: str) -> None:
        self.calls.append(text)
        self.text = text

    def allocate(self, *_: Any) -> None:
        if self.error is not None and EXPANDABLE in self.text:
            raise self.error


@pytest.fixture(params=["with a way to ask", "without"])
def allocator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """`request`: with torch 2.13 and later, the present settings can be asked for."""
    made = Allocator()
    asks = (lambda: made.text) if request.param == "with a way to ask" else None
    monkeypatch.setattr(torch_allocator, "_ask", asks)
    monkeypatch.setattr(torch_allocator, "_made", [])
    monkeypatch.setattr(torch_allocator, "set_allocator", made.set)
    monkeypatch.setattr(torch_allocator, "counts", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", made.allocate)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return made


def expanded() -> str:
    """Expand twice, as the settings and the driver do; returns the only warning, or nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expand(GPU)
        expand(GPU)
    assert len(caught) < 2
    return "".join(str(each.message) for each in caught)


def test_segments_expand_if_nobody_says_otherwise(allocator: Allocator) -> None:
    assert expands_well()
    assert not expanded()
    assert allocator.calls == [EXPANDABLE]
    assert settings()[1] == EXPANDABLE
    assert expands_well()


def test_a_full_device_refuses_nothing(allocator: Allocator) -> None:
    allocator.error = torch.OutOfMemoryError("no memory")
    assert not expanded()
    assert allocator.text == EXPANDABLE


def test_a_driver_that_cannot_map_memory(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for virtual GPUs without virtual memory: every later allocation would fail, too."""
    monkeypatch.setenv(VARIABLE, "max_split_size_mb:512")
    allocator.error = RuntimeError("CUDA driver error: operation not supported\nat cuMemCreate")
    message = expanded()
    assert "refuses expandable_segments:True (CUDA driver error: operation not supp" in message
    assert "cuMemCreate" not in message
    assert allocator.calls == [EXPANDABLE, f"max_split_size_mb:512,{OFF}"]
    assert not expands_well()


def test_what_stands_in_the_way_is_left_out(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "max_split_size_mb:512,garbage_collection_threshold:0.8")
    assert expands_well()
    assert not expanded()
    assert allocator.calls == [f"garbage_collection_threshold:0.8,{EXPANDABLE}"]


@pytest.mark.parametrize(
    ("text", "warning", "well"),
    [
        (EXPANDABLE, "", True),
        (OFF, "without expandable_segments:True", False),
        (f"max_split_size_mb:512,{EXPANDABLE}", "large free blocks serve no small", False),
        (f"roundup_power2_divisions:4,{EXPANDABLE}", "blocks are larger than tensors", True),
    ],
)
def test_what_the_user_chose_stays(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, text: str, warning: str, *, well: bool
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    message = expanded()
    assert (warning in message) if warning else not message
    assert not allocator.calls
    assert expands_well() is well


def test_what_was_chosen_while_the_process_ran_stays(allocator: Allocator) -> None:
    if torch_allocator._ask is None:
        pytest.skip("torch 2.11 and 2.12 do not tell")
    allocator.text = OFF
    assert "without expandable_segments:True" in expanded()
    assert not allocator.calls
    assert not expands_well()


def test_other_allocators_are_left_alone(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_allocator, "counts", lambda: False)
    assert not expanded()
    assert not allocator.calls
