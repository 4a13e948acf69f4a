"""Feature networks for tests: tiny ones, and Inception with random weights in the layouts of the published files."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F

from dualmcmc.metrics.inception import Inception, layer_names


class Tiny(nn.Module):
    """Four by four means of the three channels."""

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, 4).flatten(1)


class TinyInception(Inception):
    """`Tiny` in place of the convolutions, with a classifier."""

    def __init__(self):
        nn.Module.__init__(self)
        self.body = Tiny()
        self.register_buffer("head", torch.randn(1008, 48, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.body(x)


def own_network(path):
    """A user's TorchScript module."""
    torch.jit.trace(Tiny(), torch.zeros(2, 3, 299, 299)).save(str(path))
    return path


def random_layers(seed=0):
    """(weight, beta, mean, variance) of all 94 convolutions, scaled to keep activations bounded."""
    rng = torch.Generator().manual_seed(seed)
    layers = []
    for conv in Inception().convolutions():
        shape = conv.weight.shape
        weight = torch.randn(shape, generator=rng) * (2 / shape[1:].numel()) ** 0.5
        beta, mean = (0.1 * torch.randn(shape[0], generator=rng) for _ in range(2))
        layers.append((weight, beta, mean, 0.5 + torch.rand(shape[0], generator=rng)))
    return layers


def released(path, layers, classifier):
    """The layout of pytorch-fid's file, with the classifier."""
    tensors = {}
    for name, (weight, beta, mean, variance) in zip(layer_names(), layers, strict=True):
        tensors[f"{name}.conv.weight"] = weight
        tensors |= {f"{name}.bn.weight": torch.ones_like(beta), f"{name}.bn.bias": beta}
        tensors |= {f"{name}.bn.running_mean": mean, f"{name}.bn.running_var": variance}
        tensors[f"{name}.bn.num_batches_tracked"] = torch.tensor(0)
    tensors |= {"fc.weight": classifier, "fc.bias": torch.randn(len(classifier))}
    torch.save(tensors, path)
    return path


def packaged(path, layers):
    """The layout of the PyPI package: TorchScript, in the order of the TensorFlow graph, without the classifier."""

    class Layer(nn.Module):
        def __init__(self, weight, beta, mean, var):
            super().__init__()
            for name, tensor in {"weight": weight, "beta": beta, "mean": mean, "var": var}.items():
                self.register_buffer(name, tensor)

        def forward(self, x):
            return x

    net = nn.Sequential(*(Layer(*layer) for layer in layers))
    torch.jit.script(net).save(str(path))
    return path


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
