"""The networks known by name, and their batches, against the literature and other libraries."""

import sys
from operator import mul
from unittest import mock

import pytest
import torch
import transformers
from sklearn.datasets import load_sample_images
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from outcore import capture
from outcore.errors import OptionValueError, PhotographsError
from outcore.networks import NETWORKS, network, photograph_batches
from outcore.networks.alexnet import AlexNet
from outcore.networks.bert import BERT
from outcore.networks.deeplabv3plus import enlarged
from outcore.networks.densenet import DenseNet
from outcore.networks.googlenet import GoogLeNet
from outcore.networks.gpt import GPT
from outcore.networks.lstm import LSTM
from outcore.networks.photographs import DEVIATION, MEAN
from outcore.networks.resnet import ResNet
from outcore.networks.transformer import TransformerShape
from outcore.networks.unet3d import UNet3d
from outcore.networks.vit import ViT
from tests.cpu.models import CASES

TINY = TransformerShape(layers=2, heads=4, width=32)

DEEP = {"resnet1920", "resnet2500"}  # a step of these has tens of thousands of ops

# One network of each class. The others differ only in options that the parameter counts below or
# the comparison with transformers cover.
SMALL = [
    NETWORKS[name].small
    for name in NETWORKS
    if name not in DEEP | {"gpt2-large", "resnet50-v1", "resnet101", "resnet152"}
]

# Parameters that one more bottleneck adds to a ResNet, by stage: weights of 1x1, 3x3 and 1x1
# (17 width²), and scales and shifts of three batch norms (12 width).
BOTTLENECKS = tuple(17 * width**2 + 12 * width for width in (64, 128, 256, 512))

# Parameter counts of the literature or of the reference implementation.
PARAMETERS = {
    "alexnet": 62_378_344,  # one group; 60,965,224 with the paper's two
    "bert": 109_514_298,  # bert-base-uncased with its masked-language head, without pooler
    # ResNet-101 without its classifier, the pyramid, the decoder: counted by hand from Figure 2
    "deeplabv3plus": 44_549_160 - 2_049_000 + 15_535_104 + 1_309_045,
    "densenet121": 7_978_856,  # torchvision's
    "googlenet": 13_004_888,  # torchvision's, with both auxiliary classifiers
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "inception-v4": 42_679_816,  # Keras's and pytorchcv's
    "lstm": 19_775_200,  # Zaremba et al., "medium"
    # Counted by hand: first convolution, halvings, 18 convolutions of 1024, doublings, last one
    "pix2pixhd": 112_960 + 6_268_800 + 18 * 9_438_208 + 6_267_840 + 9_411,
    "resnet50": 25_557_032,
    "resnet50-v1": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    # ResNet-50, plus the bottlenecks that (6, 32, n3, 6) has beyond (3, 4, 6, 3)
    "resnet1920": 25_557_032 + sum(map(mul, (3, 28, 589, 3), BOTTLENECKS)),
    "resnet2500": 25_557_032 + sum(map(mul, (3, 28, 782, 3), BOTTLENECKS)),
    "resnext101-3d": 48_340_816,
    "two-heads": 110_925,
    "unet3d": 19_069_955 + 2_336,  # the paper does not count the batch norms' scales
    "vgg16": 138_357_544,
    "vit": 86_567_656,
}

each_network = pytest.mark.parametrize("spec", NETWORKS.values(), ids=lambda spec: spec.name)
each_traceable = pytest.mark.parametrize(
    "spec",
    [spec for spec in NETWORKS.values() if spec.name not in DEEP],
    ids=lambda spec: spec.name,
)
each_small = pytest.mark.parametrize("spec", SMALL, ids=lambda spec: spec.name)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def parameters(model):
    return sum(each.numel() for each in model.parameters())


def on_meta(build, **options):
    """Build without memory and without initial values, which would take most of the time."""

    def keep(tensor, *_, **__):
        return tensor

    without_first_values = mock.patch.multiple(
        nn.init, kaiming_normal_=keep, kaiming_uniform_=keep, ones_=keep, zeros_=keep
    )
    with torch.device("meta"), without_first_values:
        return build(**options)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters()}


@each_network
def test_parameters_are_as_many_as_in_the_literature(spec):
    assert parameters(on_meta(spec.build)) == PARAMETERS[spec.name]


def test_parameters_of_the_other_variants():
    assert parameters(on_meta(AlexNet, groups=2)) == 60_965_224
    assert parameters(on_meta(DenseNet, blocks=(6, 12, 32, 32))) == 14_149_480  # torchvision's 169
    assert parameters(on_meta(DenseNet, blocks=(6, 12, 48, 32))) == 20_013_928  # and its 201
    assert parameters(on_meta(GoogLeNet, batch_norm=False)) == 13_378_280  # Caffe's, with 5x5


def test_rows_are_found_by_name():
    assert all(spec.name == name and spec.summary for name, spec in NETWORKS.items())


@each_traceable
def test_a_step_at_full_size_takes_no_memory_under_fake_tensors(spec):
    with FakeTensorMode():
        batch = spec.batch(3)
        assert all(len(each) == 3 for each in batch.inputs + batch.targets)
        assert spec.loss(spec.build(), batch).shape == ()


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("resnet50", [(2, 10)]),
        ("deeplabv3plus", [(2, 5, 65, 65)]),
        ("densenet121", [(2, 10)]),
        ("googlenet", [(2, 10)] * 3),
        ("gpt2", [(2, 64, 500), ()]),
        ("bert", [(2, 64, 500)]),
        ("inception-v4", [(2, 10)]),
        ("lstm", [(2, 8, 500)]),
        ("pix2pixhd", [(2, 3, 32, 64)]),
        ("two-heads", [(2, 10), (2, 3, 32, 32)]),
        ("resnext101-3d", [(2, 10)]),
        ("unet3d", [(2, 3, 16, 16, 16)]),
        ("vit", [(2, 10)]),
    ],
)
def test_outputs_have_the_documented_shapes(name, shapes):
    spec = network(name).small
    outputs = spec.build()(*spec.batch(2).inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [each.shape for each in outputs] == shapes


@each_small
def test_one_graph_gives_the_loss_and_gradients_of_eager(spec):
    model, batch = spec.build(), spec.batch(2)
    losses, grads = [], []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        loss = spec.loss(run, batch)
        losses.append(loss.detach())
        grads.append(gradients(model, loss))
    assert losses[0].isfinite()
    assert torch.equal(*losses)
    for name, grad in grads[0].items():
        assert grad.isfinite().all(), name
        assert torch.equal(grad, grads[1][name]), name


@each_small
def test_a_batch_is_made_from_its_seed_alone(spec):
    first, again, other = spec.batch(2, 5), spec.batch(2, 5), spec.batch(2, 6)
    same = [torch.equal(*pair) for pair in zip(first.inputs, again.inputs, strict=True)]
    assert all(same)
    assert not torch.equal(first.inputs[0], other.inputs[0])


def test_a_batch_goes_to_a_device_as_a_whole():
    batch = NETWORKS["two-heads"].small.batch(2).to("meta")
    assert {each.device.type for each in batch.inputs + batch.targets} == {"meta"}


def test_masked_tokens_are_the_only_targets():
    batch = NETWORKS["bert"].batch(4)
    asked = batch.targets[0] != -100
    assert 0.12 < asked.float().mean() < 0.18
    assert (batch.inputs[0][asked] == 103).all()


def test_googlenet_has_one_output_in_evaluation():
    spec = NETWORKS["googlenet"].small
    model, batch = spec.build().eval(), spec.batch(2)
    assert model(*batch.inputs).shape == (2, 10)
    assert spec.loss(model, batch).isfinite()


def test_in_place_relu_changes_no_number():
    images = torch.randn(2, 3, 32, 32)
    kept = ResNet((1, 1, 1, 1), width=8, inplace_relu=False)
    reused = ResNet((1, 1, 1, 1), width=8)
    reused.load_state_dict(kept.state_dict())
    outputs = [model(images) for model in (kept, reused)]
    assert torch.equal(*outputs)
    pairs = [
        gradients(model, out.sum()) for model, out in zip((kept, reused), outputs, strict=True)
    ]
    assert all(torch.equal(grad, pairs[1][name]) for name, grad in pairs[0].items())


@pytest.mark.parametrize("stride_in_1x1", [False, True])
def test_resnet_computes_what_transformers_does(stride_in_1x1):
    theirs = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[32, 64, 128, 256],
            depths=[2, 1, 2, 1],
            downsample_in_bottleneck=stride_in_1x1,
            num_labels=10,
        )
    )
    ours = ResNet((2, 1, 2, 1), width=8, classes=10, stride_in_1x1=stride_in_1x1)
    copy_in_order(sorted_by_depth(ours), sorted_by_depth(theirs))
    images = torch.randn(4, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images).logits)


def sorted_by_depth(model):
    """Convolutions, norms and linear layers, in the order of a forward pass with shortcuts last."""
    main: list[nn.Module] = []
    shortcuts: list[nn.Module] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            (shortcuts if "shortcut" in name or "downsample" in name else main).append(module)
    return main + shortcuts


def copy_in_order(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        mine.load_state_dict(other.state_dict())


def test_gpt_computes_what_transformers_does():
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=100,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    ours = GPT(TINY, vocabulary=100, length=16).eval()
    *body, head = weighted(theirs)
    assert head.weight is body[0].weight
    for mine, other in zip(weighted(ours), body, strict=True):
        transposed = type(other).__name__ == "Conv1D"
        mine.weight.data.copy_(other.weight.t() if transposed else other.weight)
        if getattr(other, "bias", None) is not None:
            mine.bias.data.copy_(other.bias)
    tokens = torch.randint(100, (2, 16))
    out = theirs(tokens, labels=tokens)
    logits, loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(logits, out.logits[:, :-1])
    torch.testing.assert_close(loss, out.loss)


def weighted(model):
    """The modules that have a weight, in the order of their definition."""
    return [each for each in model.modules() if hasattr(each, "weight")]


def test_bert_computes_what_transformers_does():
    theirs = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=16,
        )
    ).eval()
    ours = BERT(TINY, vocabulary=100, length=16).eval()
    ours.load_state_dict(bert_weights(theirs.state_dict(), layers=2))
    tokens, segments = torch.randint(100, (2, 16)), torch.randint(2, (2, 16))
    expected = theirs(tokens, token_type_ids=segments).logits
    torch.testing.assert_close(ours(tokens, segments), expected)


def bert_weights(theirs, layers):
    """Convert a state of transformers' BertForMaskedLM: rename, and join query, key and value."""
    names = {
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
        "norm": "bert.embeddings.LayerNorm",
        "head.0": "cls.predictions.transform.dense",
        "head.2": "cls.predictions.transform.LayerNorm",
    }
    for layer in range(layers):
        mine, other = f"blocks.{layer}", f"bert.encoder.layer.{layer}"
        names |= {
            f"{mine}.attention.out": f"{other}.attention.output.dense",
            f"{mine}.norm1": f"{other}.attention.output.LayerNorm",
            f"{mine}.feed_forward.0": f"{other}.intermediate.dense",
            f"{mine}.feed_forward.2": f"{other}.output.dense",
            f"{mine}.norm2": f"{other}.output.LayerNorm",
        }
    ours = {"bias": theirs["cls.predictions.bias"]}
    for kind in ("weight", "bias"):
        ours |= {
            f"{mine}.{kind}": theirs[f"{other}.{kind}"]
            for mine, other in names.items()
            if f"{other}.{kind}" in theirs
        }
        for layer in range(layers):
            attention = f"bert.encoder.layer.{layer}.attention.self"
            ours[f"blocks.{layer}.attention.qkv.{kind}"] = torch.cat(
                [theirs[f"{attention}.{each}.{kind}"] for each in ("query", "key", "value")]
            )
    return ours


def test_lstm_computes_what_torch_does():
    ours = LSTM(vocabulary=50, width=16, dropout=0.0)
    theirs = nn.LSTM(16, 16, num_layers=2, batch_first=True)
    state = theirs.state_dict()
    for layer, cell in enumerate(ours.cells):
        of_input, of_hidden = state[f"weight_ih_l{layer}"], state[f"weight_hh_l{layer}"]
        bias = state[f"bias_ih_l{layer}"] + state[f"bias_hh_l{layer}"]
        gates = cell.get_submodule("gates")
        gates.load_state_dict({"weight": torch.cat([of_input, of_hidden], dim=1), "bias": bias})
    tokens = torch.randint(50, (3, 7))
    hidden, _ = theirs(ours.tokens(tokens))
    torch.testing.assert_close(ours(tokens), ours.head(hidden))


def test_unet3d_keeps_sides_that_are_multiples_of_its_coarsest_voxel():
    model = UNet3d(width=2, levels=3)
    assert model(torch.randn(1, 3, 4, 8, 12)).shape == (1, 3, 4, 8, 12)


def test_a_batch_may_be_too_small():
    spec = network("deeplabv3plus").small
    with pytest.raises(OptionValueError, match=r"batch=1: .* fewer than 2 samples"):
        spec.batch(1)
    with pytest.raises(OptionValueError, match="fewer than 2 samples"):
        capture.trace_network(spec, 1)


@pytest.mark.parametrize("size", [(9, 17), (65, 33)])
def test_deeplabv3plus_enlarges_as_torch_interpolates(size):
    features = torch.randn(2, 3, 5, 9)
    expected = functional.interpolate(features, size, mode="bilinear", align_corners=True)
    torch.testing.assert_close(enlarged(features, size), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TransformerShape(heads=5), r"heads=5: does not divide width=768 \(remainder 3\)"),
        (lambda: ViT(size=100), r"patch=16: leaves 4 pixels over along an image of 100x100"),
        (
            lambda: network("resnet5"),
            r"network='resnet5': there is no network of this name: did you mean 'resnet50'\?",
        ),
        (lambda: photograph_batches(1, size=428), r"size=428: crops have from 1 to 427 pixels"),
    ],
)
def test_a_wrong_option_is_explained(build, message):
    with pytest.raises(OptionValueError, match=message):
        build()


def test_photographs_are_normalized_crops_of_two_classes():
    batch = next(photograph_batches(64))
    (images,), (labels,) = batch.inputs, batch.targets
    assert images.shape == (64, 3, 224, 224)
    assert images.is_contiguous()
    assert labels.unique().tolist() == [0, 1]
    assert images.mean().abs() < 0.5
    assert 0.5 < images.std() < 2


def test_a_crop_is_a_piece_of_the_photograph_that_its_label_names():
    photographs = [torch.tensor(each) for each in load_sample_images().images]
    batch = next(photograph_batches(8, size=427))
    (crops,), (labels,) = batch.inputs, batch.targets
    mean, deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)
    for crop, label in zip(crops, labels, strict=True):
        pixels = (crop.permute(1, 2, 0) * deviation + mean).mul(255).round().byte()
        places = photographs[label].unfold(1, 427, 1).permute(1, 0, 3, 2)  # all of full height
        assert any(torch.equal(place, pixels) for place in [*places, *places.flip(2)])


def test_photographs_come_in_the_order_of_their_seed():
    streams = [photograph_batches(2, seed, size=32) for seed in (7, 7, 8)]
    for _ in range(3):
        first, again, other = (next(stream).inputs[0] for stream in streams)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_photographs_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(PhotographsError, match="pip install scikit-learn pillow"):
        photograph_batches(2)


@each_case
def test_a_case_trains(case):
    torch.manual_seed(3)
    module, args, loss = case.make()
    assert module.training
    value = loss(module(*args))
    assert value.isfinite()
    assert value.shape == ()
    assert all(grad is None or grad.isfinite().all() for grad in gradients(module, value).values())


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)
