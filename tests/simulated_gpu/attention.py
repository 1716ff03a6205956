"""attention: compute CUDA's fused attention by CPU ops, with the same layouts and devices.

Dropout draws from the generator that the kernel is given; backward gets that generator's seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LSE_ROWS = 32
"""The memory-efficient kernel pads its sums to a multiple of so many rows."""


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
    """`value` laid out in the order batch, row, head, as these kernels write it."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: Any,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    shared = query.size(-3) // key.size(-3)
    if shared > 1:  # several query heads share one key head
        key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    scores = _scores(query, key, bias, causal, scale)
    shares = scores.softmax(-1)
    if dropout:
        generator = None if shares.is_meta else torch.Generator().manual_seed(seed)
        kept = torch.empty_like(shares).bernoulli_(1 - dropout, generator=generator)
        shares = shares * kept / (1 - dropout)
    result = (shares @ value.float()).to(query.dtype)
    return _as_kept(result), scores.logsumexp(-1)


def _backward(
    gradient: Tensor,
    given: tuple[Tensor, ...],
    bias: Tensor | None,
    causal: bool,
    scale: Any,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    *,
    of_bias: bool = False,
) -> tuple[Tensor, ...]:
    if gradient.is_meta:
        made = tuple(_as_kept(torch.empty_like(each)) for each in given)
        return (*made, _padded(bias)) if of_bias and bias is not None else made
    with torch.inference_mode(False), torch.enable_grad():
        wanted = [*given, bias] if of_bias and bias is not None else [*given]
        leaves = [each.clone().detach().requires_grad_() for each in wanted]
        query, key, value = leaves[:3]
        added = leaves[3] if len(leaves) > 3 else None if bias is None else bias.clone()
        number = int(seed) if dropout and seed is not None else 0
        result, _ = _forward(query, key, value, added, causal, scale, dropout, number)
        found = torch.autograd.grad(result, leaves, gradient.clone())
        made = tuple(map(_as_kept, found[:3]))
        return (*made, _padded(found[3]).copy_(found[3])) if len(found) > 3 else made


def _padded(bias: Tensor) -> Tensor:
    """An empty tensor for the gradient of a bias; its rows are padded to multiples of 16."""
    columns = bias.size(-1)
    rows = bias.new_empty((*bias.shape[:-1], -(-columns // 16) * 16))
    return rows[..., :columns]


def _seed(generator: torch.Generator | None) -> int:
    return 0 if generator is None else generator.initial_seed()


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
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_efficient_attention`."""
    seed = _seed(generator)
    result, lse = _forward(query, key, value, bias, is_causal, scale, dropout, seed)
    rows = -(-query.size(2) // LSE_ROWS) * LSE_ROWS if sums else 0
    padded = lse.new_zeros((*lse.shape[:2], rows))
    if sums:
        padded[..., : lse.size(2)] = lse
    return result, padded, torch.tensor(seed), torch.tensor(0)


def efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    _result: Tensor,
    _sums: Tensor,
    seed: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """`_scaled_dot_product_efficient_attention_backward`."""
    _offset, dropout, wanted, is_causal = (*rest, False)[:4]
    how = bias, is_causal, scale, dropout, seed
    made = _backward(gradient, (query, key, value), *how, of_bias=wanted[3])
    return made if wanted[3] else (*made, None)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    _debug: bool = False,
    *,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Any, ...]:
    """`_scaled_dot_product_flash_attention`."""
    seed = _seed(generator)
    result, lse = _forward(query, key, value, None, is_causal, scale, dropout, seed)
    drawn = torch.tensor([seed, 0], dtype=torch.uint64, device=query.device)
    seeds = drawn, query.new_zeros((), dtype=torch.uint64)
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
    state: Tensor,
    _offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_flash_attention_backward`."""
    seed = None if state.is_meta else state[0]
    return _backward(gradient, (query, key, value), None, is_causal, scale, dropout, seed)


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sums: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    _debug: bool = False,
    *,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Any, ...]:
    """`_scaled_dot_product_cudnn_attention`: query's layout, and a seed on the device."""
    seed = _seed(generator)
    result, lse = _forward(query, key, value, bias, is_causal, scale, dropout, seed)
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    laid = result.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    drawn = torch.tensor(seed, device=query.device), torch.tensor(0, device=query.device)
    lengths = query.size(2), key.size(2)
    return laid, lse.unsqueeze(-1) if sums else None, None, None, *lengths, *drawn, None


def cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _result: Tensor,
    _sums: Tensor,
    seed: Tensor,
    _offset: Tensor,
    bias: Tensor | None,
    _cumulated_query: Tensor | None,
    _cumulated_key: Tensor | None,
    _most_query: int,
    _most_key: int,
    dropout: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """`_scaled_dot_product_cudnn_attention_backward`: gradients in the layouts of the arguments."""
    given = query, key, value
    made = _backward(gradient, given, bias, is_causal, scale, dropout, seed)
    like = map(torch.empty_like, given)
    return tuple(empty.copy_(each) for empty, each in zip(like, made, strict=True))


ATTENTION: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
}

DRAWING = (cudnn, efficient, flash)
"""The functions that draw random numbers if they have dropout."""
