"""Fused attention of CUDA by plain ops of the CPU: its results, their layouts and their devices.

Without dropout: how many random numbers CUDA's kernels draw is theirs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LSE_ROWS = 32
"""Sums of the memory-efficient kernel come in multiples of so many rows."""


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: Any) -> Tensor:
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = query.float() @ key.float().mT * factor
    if bias is not None:
        scores = scores + bias
    if causal:
        allowed = torch.ones_like(scores, dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def _as_kept(value: Tensor) -> Tensor:
    """In the order of batch, row, head, as those kernels have it."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: Any
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, bias, causal, scale)
    result = (scores.softmax(-1) @ value.float()).to(query.dtype)
    return _as_kept(result), scores.logsumexp(-1)


def _backward(
    gradient: Tensor, given: tuple[Tensor, ...], bias: Tensor | None, causal: bool, scale: Any
) -> tuple[Tensor, ...]:
    if gradient.is_meta:
        return tuple(_as_kept(torch.empty_like(each)) for each in given)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [each.clone().detach().requires_grad_() for each in given]
        query, key, value = leaves
        result, _ = _forward(query, key, value, bias, causal, scale)
        return tuple(map(_as_kept, torch.autograd.grad(result, leaves, gradient)))


def _check(query: Tensor, dropout: float) -> None:
    if dropout and not query.is_meta:  # what it describes is the same
        raise NotImplementedError("the simulated GPU has no dropout in fused attention")


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_efficient_attention`."""
    _check(query, dropout)
    result, lse = _forward(query, key, value, bias, is_causal, scale)
    rows = -(-query.size(2) // LSE_ROWS) * LSE_ROWS if sums else 0
    padded = lse.new_zeros((*lse.shape[:2], rows))
    if sums:
        padded[..., : lse.size(2)] = lse
    return result, padded, *(torch.zeros((), dtype=torch.int64) for _ in range(2))


def efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _result: Tensor,
    _sums: Tensor,
    _seed: Tensor,
    _offset: Tensor,
    dropout: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """`_scaled_dot_product_efficient_attention_backward`; none for a bias."""
    _check(query, dropout)
    if wanted[3]:
        raise NotImplementedError("the simulated GPU has no gradient of a bias of attention")
    return *_backward(gradient, (query, key, value), bias, is_causal, scale), None


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    _debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`_scaled_dot_product_flash_attention`."""
    _check(query, dropout)
    result, lse = _forward(query, key, value, None, is_causal, scale)
    seeds = query.new_zeros(2, dtype=torch.uint64), query.new_zeros((), dtype=torch.uint64)
    lengths = query.size(2), key.size(2)
    return result, lse, None, None, *lengths, *seeds, query.new_empty(0)


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _result: Tensor,
    _sums: Tensor,
    _cumulated_query: Tensor | None,
    _cumulated_key: Tensor | None,
    _most_query: int,
    _most_key: int,
    dropout: float,
    is_causal: bool,
    _seed: Tensor,
    _offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_flash_attention_backward`."""
    _check(query, dropout)
    return _backward(gradient, (query, key, value), None, is_causal, scale)


ATTENTION: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
}
