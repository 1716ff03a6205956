"""Mode: a way to train a model, by outcore or by one of its peers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from outcore import Backend
from outcore.capture import aot_autograd, as_kernels, boxed, by_cudnn, default_partition
from outcore.execute import folders
from outcore.networks.resnet import Bottleneck
from outcore.networks.resnext3d import Bottleneck3d
from outcore.networks.transformer import PreNormBlock
from outcore.networks.unet3d import UNet3d
from outcore.policies import POLICIES
from outcore.runtime.settings.options import DEFAULT_POLICY

Call: TypeAlias = Callable[..., Any]

BLOCKS = (Bottleneck, Bottleneck3d, PreNormBlock)

EVERY_POLICY = tuple(dict.fromkeys((*POLICIES, DEFAULT_POLICY)))
"""All policies by name, and the default policy with its options."""


class Mode(Protocol):
    """A way to train a model. Instances are plain data, and can be sent to a worker."""

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    def apply(self, module: nn.Module) -> tuple[Call, Backend | None]:
        """The module in the form to call, and outcore's Backend if there is one."""
        ...


def spill_folder() -> Path:
    """Where any mode spills bytes: OUTCORE_SPILL_DIR, or outcore's choice."""
    return Path(os.environ.get("OUTCORE_SPILL_DIR") or folders.spill_folder())


@dataclass(frozen=True, slots=True)
class Eager:
    """Plain PyTorch."""

    name: str = "eager"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module itself."""
        return module, None


@dataclass(frozen=True, slots=True)
class AotEager:
    """The graph that AOTAutograd makes, run by torch op by op."""

    name: str = "aot_eager"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module, compiled by torch's `aot_eager`."""
        return torch.compile(module, backend="aot_eager"), None


@dataclass(frozen=True, slots=True)
class SameGraph:
    """The graph that outcore gets, run by torch without a plan: the same kernels."""

    name: str = "the same graph"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module, compiled as by `aot_eager`, with the ops that outcore inserts."""
        return torch.compile(module, backend=same_graph), None


def same_graph(module: GraphModule, inputs: Sequence[Any]) -> Call:
    """The backend of `torch.compile` for `SameGraph`."""

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
        by_cudnn(joint)
        return default_partition(joint, *args, **kwargs)

    def run(graph: GraphModule, _: Any) -> Call:
        return boxed(graph)

    compiler = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    with as_kernels():
        compiled: Call = compiler(module, inputs)
    return compiled


@dataclass(frozen=True, slots=True)
class Inductor:
    """torch's own compiler. `memory_budget` is the fraction of saved activations that it keeps."""

    memory_budget: float = 1.0

    @property
    def name(self) -> str:
        """The name, with the memory budget if there is one."""
        limited = f", activation_memory_budget {self.memory_budget:g}"
        return "inductor" + limited * (self.memory_budget < 1)

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module, compiled. This sets the memory budget for the whole process."""
        torch._functorch.config.activation_memory_budget = self.memory_budget  # noqa: SLF001 - where torch documents it
        return torch.compile(module), None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """torch.utils.checkpoint around every block that a network is made of."""

    name: str = "checkpoint per block"

    def apply(self, module: nn.Module) -> tuple[Call, None]:
        """The module, with its blocks changed in place. Raises ValueError if it has none."""
        blocks = [block for block in module.modules() if isinstance(block, BLOCKS)]
        if isinstance(module, UNet3d):
            blocks = [*module.down, *module.up]
        if not blocks:
            raise ValueError("this network is not made of blocks")
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]  # this replaces the block's forward on purpose
        return module, None


@dataclass(frozen=True, slots=True)
class Outcore:
    """outcore under a policy."""

    policy: str
    budget: int | str = "100%"
    link_limit: str | None = None
    host_budget: int | None = None
    plan: str | None = None
    """A file of plans that the policy made before."""
    label: str = ""
    """A label that distinguishes it from other modes with the same policy."""
    fuse: bool = False

    @property
    def name(self) -> str:
        """The policy, with what distinguishes this mode from others."""
        fused = ", fused" * self.fuse
        return f"outcore {self.policy}{fused}" + f", {self.label}" * bool(self.label)

    def apply(self, module: nn.Module) -> tuple[Call, Backend]:
        """The module, compiled by a Backend."""
        backend = Backend(
            budget=self.budget,
            policy=self.policy,
            link_limit=self.link_limit,
            host_budget=self.host_budget,
            plan=self.plan,
            spill_dir=spill_folder(),
            fuse=self.fuse,
            drift="off",  # judge the plan as made, with its prediction
        )
        return torch.compile(module, backend=backend), backend
