"""models: a table of the models whose results are compared with and without outcore.

Each case makes a module, its arguments and a loss from the global generator, so the caller's seed
determines them. A step takes well below a second on one core. Its activations have kilobytes to
megabytes each, and some MiB or tens of MiB in total. Nothing is downloaded: models of other
libraries are built from configurations, with random weights and dropout on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from monai.networks.nets import UNet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outcore.networks import network
from outcore.networks.transformer import TransformerShape

CLASSES = 10
VOCABULARY = 1000
SHAPE = TransformerShape(layers=3, heads=4, width=128)
ENCODER = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 128}


class Step(NamedTuple):
    """One training step: ``loss(module(*args)).backward()``."""

    module: nn.Module
    args: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """A model under test; `make` draws everything from the global generator."""

    name: str
    make: Callable[[], Step]


def _ours(name: str, n: int, build: Mapping[str, Any], sizes: Mapping[str, int]) -> Case:
    """One of outcore's networks."""

    def make() -> Step:
        spec = network(name)
        module = spec.build(**build)
        batch = spec.batch(n, int(torch.randint(2**31, ())), **sizes)
        return Step(module, batch.inputs, lambda outputs: spec.criterion(outputs, batch.targets))

    return Case(name, make)


def _reads(name: str, model: Callable[[], Any], n: int, length: int) -> Case:
    """A language model from transformers, on random tokens."""

    def make() -> Step:
        module = model().train()
        tokens, labels = torch.randint(VOCABULARY, (2, n, length))
        return Step(
            module, (tokens,), lambda out: cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        )

    return Case(name, make)


def _sees(name: str, model: Callable[[], Any], n: int, size: int) -> Case:
    """An image classifier from transformers, on noise."""

    def make() -> Step:
        module = model().train()
        labels = torch.randint(CLASSES, (n,))
        images = torch.randn(n, 3, size, size)
        return Step(module, (images,), lambda out: cross_entropy(out.logits, labels))

    return Case(name, make)


def gpt2(vocabulary: int = VOCABULARY, width: int = 128, layers: int = 3, **options: Any) -> Any:
    """A small GPT-2 for up to 128 tokens."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=128,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            use_cache=False,
            bos_token_id=None,  # the defaults are outside this vocabulary
            eos_token_id=None,
            **options,
        )
    )


def _bert() -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=VOCABULARY, intermediate_size=512, **ENCODER)
    )


def _vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=64,
            patch_size=8,
            intermediate_size=512,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            num_labels=CLASSES,
            **ENCODER,
        )
    )


def _resnet() -> Any:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES))


def _convnext() -> Any:
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 3, 2], num_labels=CLASSES
        )
    )


def _monai_unet() -> Step:
    """MONAI's residual 3-D U-Net with dropout, on noise."""
    module = UNet(3, 1, 2, channels=(8, 16, 32, 64), strides=(2,) * 3, num_res_units=2, dropout=0.1)
    labels = torch.randint(2, (1, 48, 48, 48))
    volume = torch.randn(1, 1, 48, 48, 48)
    return Step(module.train(), (volume,), lambda logits: cross_entropy(logits, labels))


CASES: tuple[Case, ...] = (
    _ours("resnet50", 2, {"classes": CLASSES}, {"size": 64, "classes": CLASSES}),
    _ours(
        "gpt2",
        2,
        {"shape": SHAPE, "vocabulary": VOCABULARY, "length": 128},
        {"vocabulary": VOCABULARY, "length": 128},
    ),
    _ours("unet3d", 1, {"width": 4}, {"size": 32}),
    _ours(
        "lstm",
        32,
        {"width": 128, "vocabulary": VOCABULARY},
        {"vocabulary": VOCABULARY, "length": 16},
    ),
    _ours("two-heads", 4, {"width": 32}, {"size": 64}),
    _ours("googlenet", 2, {"classes": CLASSES}, {"size": 64, "classes": CLASSES}),
    _reads("transformers-gpt2", gpt2, 2, 128),
    _reads("transformers-bert", _bert, 2, 128),
    _sees("transformers-vit", _vit, 4, 64),
    _sees("transformers-resnet50", _resnet, 2, 64),
    _sees("transformers-convnext", _convnext, 2, 96),
    Case("monai-unet", _monai_unet),
)
