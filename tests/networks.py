"""Feature networks for tests: a tiny one of one's own, and Inceptions with random weights in the published layouts."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F

from dualmcmc.metrics.inception import Inception, _layer_names


class Tiny(nn.Module):
    """Four by four means of the three channels: features that a test can work out by itself."""

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, 4).flatten(1)


def own_network(path):
    """A TorchScript module as a user may bring one."""
    torch.jit.trace(Tiny(), torch.zeros(2, 3, 299, 299)).save(str(path))
    return path


def random_layers(seed=0):
    """(weight, beta, mean, variance) of all 94 convolutions, of a size that keeps activations in bounds."""
    rng = torch.Generator().manual_seed(seed)
    layers = []
    for conv in Inception().convolutions():
        shape = conv.weight.shape
        weight = torch.randn(shape, generator=rng) * (2 / shape[1:].numel()) ** 0.5
        beta, mean = (0.1 * torch.randn(shape[0], generator=rng) for _ in range(2))
        layers.append((weight, beta, mean, 0.5 + torch.rand(shape[0], generator=rng)))
    return layers


def released(path, layers, classifier):
    """The layout of the usual release file."""
    tensors = {}
    for name, (weight, beta, mean, variance) in zip(_layer_names(), layers, strict=True):
        tensors[f"{name}.conv.weight"] = weight
        tensors |= {f"{name}.bn.weight": torch.ones_like(beta), f"{name}.bn.bias": beta}
        tensors |= {f"{name}.bn.running_mean": mean, f"{name}.bn.running_var": variance}
        tensors[f"{name}.bn.num_batches_tracked"] = torch.tensor(0)
    tensors |= {"fc.weight": classifier, "fc.bias": torch.randn(len(classifier))}
    torch.save(tensors, path)
    return path


def packaged(path, layers):
    """The layout of the registry's package: TorchScript, in the order of the graph, no classifier."""

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
