"""table: the networks known by name, for the command line, benchmarks and tests."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from outcore.errors import OptionValueError, did_you_mean
from outcore.networks import synthetic
from outcore.networks.alexnet import AlexNet
from outcore.networks.bert import BERT
from outcore.networks.deeplabv3plus import DeepLabV3Plus
from outcore.networks.densenet import DenseNet
from outcore.networks.googlenet import GoogLeNet
from outcore.networks.gpt import GPT
from outcore.networks.inception_v4 import InceptionV4
from outcore.networks.lstm import LSTM
from outcore.networks.pix2pixhd import Pix2PixHD
from outcore.networks.resnet import Blocks, ResNet
from outcore.networks.resnext3d import ResNeXt3d
from outcore.networks.spec import NetworkSpec
from outcore.networks.transformer import TransformerShape
from outcore.networks.two_heads import TwoHeads
from outcore.networks.unet3d import UNet3d
from outcore.networks.vgg import VGG
from outcore.networks.vit import ViT

_TINY = TransformerShape(layers=2, heads=4, width=64)
_LARGE = TransformerShape(layers=36, heads=20, width=1280)
_SMALL_IMAGES = {"size": 64, "classes": 10}
_SMALL_TEXT = {"length": 64, "vocabulary": 500}


def _resnet(name: str, summary: str, blocks: Blocks, **options: bool) -> NetworkSpec:
    return NetworkSpec(
        name=name,
        summary=summary,
        build=partial(ResNet, blocks=blocks, **options),
        make_batch=synthetic.images,
        criterion=synthetic.classify,
        small_build={"blocks": (1, 2, 1, 1), "width": 16, "classes": 10},
        small_batch=_SMALL_IMAGES,
    )


def _superneurons(name: str, summary: str, n3: int) -> NetworkSpec:
    """One of SuperNeurons' ResNets, with 3 * (6 + 32 + n3 + 6) + 2 layers.

    Wang et al., "SuperNeurons", 2018 (Table 4), vary n3 only. Strides are as in the authors'
    program, whose deepest network has n3 = 788. Section 4.2 mentions 2500 residual units. With that
    many units the weights alone would need 11 of the paper's 12 GB, so it must mean layers.
    """
    return _resnet(name, summary, (6, 32, n3, 6), stride_in_1x1=True)


def _gpt(name: str, summary: str, shape: TransformerShape) -> NetworkSpec:
    return NetworkSpec(
        name=name,
        summary=summary,
        build=partial(GPT, shape=shape),
        make_batch=synthetic.next_tokens,
        criterion=synthetic.own_loss,
        small_build={"shape": _TINY, **_SMALL_TEXT},
        small_batch=_SMALL_TEXT,
    )


_ROWS = (
    NetworkSpec(
        name="alexnet",
        summary="AlexNet, one group, local response normalization, 227x227",
        build=AlexNet,
        make_batch=partial(synthetic.images, size=227),
        criterion=synthetic.classify,
        small_build={"size": 67, "width": 64, "classes": 10},
        small_batch={"size": 67, "classes": 10},
    ),
    NetworkSpec(
        name="bert",
        summary="BERT base with its masked-language head, 512 tokens",
        build=BERT,
        make_batch=synthetic.masked_tokens,
        criterion=synthetic.classify_tokens,
        small_build={"shape": _TINY, **_SMALL_TEXT},
        small_batch=_SMALL_TEXT,
    ),
    NetworkSpec(
        name="deeplabv3plus",
        summary="DeepLabv3+ on ResNet-101, output stride 16, 513x513",
        build=DeepLabV3Plus,
        make_batch=synthetic.scenes,
        criterion=synthetic.classify,
        small_build={"blocks": (1, 1, 1, 2), "width": 8, "classes": 5},
        small_batch={"size": 65, "classes": 5},
        fewest=2,  # one value per image is normalized over the batch
    ),
    NetworkSpec(
        name="densenet121",
        summary="DenseNet-121, growth 32, 224x224",
        build=DenseNet,
        make_batch=synthetic.images,
        criterion=synthetic.classify,
        small_build={"blocks": (2, 2, 2, 2), "width": 16, "growth": 8, "classes": 10},
        small_batch=_SMALL_IMAGES,
    ),
    NetworkSpec(
        name="googlenet",
        summary="GoogLeNet, batch norm, two auxiliary losses, 224x224",
        build=GoogLeNet,
        make_batch=synthetic.images,
        criterion=synthetic.classify_with_auxiliaries,
        small_build={"classes": 10},
        small_batch=_SMALL_IMAGES,
    ),
    _gpt("gpt2", "GPT-2, 12 layers, dropout, 1024 tokens", TransformerShape()),
    _gpt("gpt2-large", "GPT-2 large, 36 layers, dropout, 1024 tokens", _LARGE),
    NetworkSpec(
        name="inception-v4",
        summary="Inception-v4, dropout, 299x299",
        build=InceptionV4,
        make_batch=partial(synthetic.images, size=299),
        criterion=synthetic.classify,
        small_build={"modules": (1, 1, 1), "width": 4, "classes": 10},
        small_batch={"size": 107, "classes": 10},
    ),
    NetworkSpec(
        name="lstm",
        summary="LSTM language model, two layers, unrolled over 35 tokens, dropout",
        build=LSTM,
        make_batch=synthetic.shifted_tokens,
        criterion=synthetic.classify_tokens,
        small_build={"width": 64, "vocabulary": 500},
        small_batch={"length": 8, "vocabulary": 500},
    ),
    NetworkSpec(
        name="pix2pixhd",
        summary="the global generator of pix2pixHD, 36 label maps of 512x1024, L1 loss",
        build=Pix2PixHD,
        make_batch=synthetic.label_maps,
        criterion=synthetic.reconstruct,
        small_build={"channels": 6, "width": 8, "levels": 2, "blocks": 2},
        small_batch={"size": 32, "labels": 5},
    ),
    _resnet("resnet50", "ResNet-50, stride in the 3x3, 224x224", (3, 4, 6, 3)),
    _resnet(
        "resnet50-v1",
        "ResNet-50 as first published and in Chainer, stride in the first 1x1, 224x224",
        (3, 4, 6, 3),
        stride_in_1x1=True,
    ),
    _resnet("resnet101", "ResNet-101, stride in the 3x3, 224x224", (3, 4, 23, 3)),
    _resnet("resnet152", "ResNet-152, stride in the 3x3, 224x224", (3, 8, 36, 3)),
    _superneurons(
        "resnet1920",
        "ResNet of SuperNeurons, 639 bottlenecks: 1919 layers, the nearest to 1920, 224x224",
        n3=595,
    ),
    _superneurons(
        "resnet2500",
        "ResNet of SuperNeurons, 832 bottlenecks: 2498 layers, 224x224",
        n3=788,
    ),
    NetworkSpec(
        name="resnext101-3d",
        summary="ResNeXt-101 for volumes and video, 32 groups, 16 frames of 112x112",
        build=ResNeXt3d,
        make_batch=synthetic.clips,
        criterion=synthetic.classify,
        small_build={"blocks": (1, 1, 1, 1), "width": 8, "groups": 4, "classes": 10},
        small_batch={"frames": 8, "size": 32, "classes": 10},
    ),
    NetworkSpec(
        name="two-heads",
        summary="a small trunk with two outputs, a class and a reconstruction, 224x224",
        build=TwoHeads,
        make_batch=synthetic.images_twice,
        criterion=synthetic.classify_and_reconstruct,
        small_build={"width": 16},
        small_batch={"size": 32},
    ),
    NetworkSpec(
        name="unet3d",
        summary="3-D U-Net, four levels, 128x128x128",
        build=UNet3d,
        make_batch=synthetic.volumes,
        criterion=synthetic.classify,
        small_build={"width": 4, "levels": 3},
        small_batch={"size": 16},
    ),
    NetworkSpec(
        name="vgg16",
        summary="VGG-16, no batch norm, 224x224",
        build=VGG,
        make_batch=synthetic.images,
        criterion=synthetic.classify,
        small_build={"width": 8, "hidden": 64, "classes": 10},
        small_batch=_SMALL_IMAGES,
    ),
    NetworkSpec(
        name="vit",
        summary="vision transformer ViT-B/16, dropout, 224x224",
        build=ViT,
        make_batch=synthetic.images,
        criterion=synthetic.classify,
        small_build={"shape": _TINY, "patch": 8, **_SMALL_IMAGES},
        small_batch=_SMALL_IMAGES,
    ),
)

NETWORKS: Mapping[str, NetworkSpec] = MappingProxyType({row.name: row for row in _ROWS})


def network(name: str) -> NetworkSpec:
    """The row called `name`. Raises OptionValueError, with the nearest name, if there is none."""
    if name not in NETWORKS:
        reason = f"there is no network of this name: {did_you_mean(name, NETWORKS)}"
        raise OptionValueError(option="network", value=name, reason=reason)
    return NETWORKS[name]
