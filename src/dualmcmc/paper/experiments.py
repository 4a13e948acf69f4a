"""The paper's tables as data: what it reports, and which runs measure the same.

docs/paper-numbers.md says what can be compared. What the paper quotes from other families are rows without a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AS_TRAINED = ("sampling.steps=null", "sampling.step_size=null", "sampling.temperature=null")  # the x-chain of samples
AUTHORS_CHAIN = (  # but for its number of steps, and the loss weight that goes with its strength
    "teaching.x_chain.step_size=0.125",
    "teaching.x_chain.temperature=4.0e-6",
    "teaching.generator_sample_weight=50",
    *AS_TRAINED,
)
BOUND = "teaching.generator_data_weight=null"  # 1 / (2 sigma^2), as in the evidence lower bound
VARIANTS: dict[str, tuple[str, ...]] = {  # settings of each run, on top of the scale's
    "dual-mcmc": (),
    "cooperative": ("method=cooperative",),
    "amortized": ("method=amortized", "teaching.generator_sample_weight=null"),
    "triangle": ("method=triangle", BOUND),
    "no-mcmc": ("method=no-mcmc", "teaching.entropy_spread=0.3"),
    "short-run": ("method=short-run", "teaching.x_chain.steps=100", *AS_TRAINED),
    "persistent": ("method=persistent", "teaching.x_chain.steps=60", *AS_TRAINED, "sampling.steps=240"),
    "improved-cd": ("method=improved-cd", "teaching.x_chain.steps=60", *AS_TRAINED, "sampling.steps=240"),
    "vae": ("method=vae", BOUND),
    "wae": ("method=wae", "teaching.generator_data_weight=1", "teaching.latent_weight=10"),
    "rae": ("method=rae",),
    "abp": ("method=abp", "data.flip=false"),
    "sr-abp": ("method=sr-abp", "teaching.z_chain.steps=30"),
    "noise-kz10": ("teaching.z_start=prior", "teaching.z_chain.steps=10"),
    "noise-kz30": ("teaching.z_start=prior", "teaching.z_chain.steps=30"),
    "kz10": ("teaching.z_chain.steps=10",),
    "kz30": ("teaching.z_chain.steps=30",),
    "kx10": ("teaching.x_chain.steps=10", *AUTHORS_CHAIN),
    "kx20": ("teaching.x_chain.steps=20", *AUTHORS_CHAIN),
    "kx30": ("teaching.x_chain.steps=30", *AUTHORS_CHAIN),
    "kx50": ("teaching.x_chain.steps=50", *AUTHORS_CHAIN),
    "half-width": (),
    "width": (),
    "double-width": (),
}
WIDTHS = {"half-width": 0.5, "width": 1.0, "double-width": 2.0}  # factor of the widths of E and G


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's figures by column, as printed, and the run that measures ours."""

    label: str
    paper: Mapping[str, str] = field(default_factory=dict)
    variant: str | None = None
    ours: Mapping[str, str] = field(default_factory=dict)  # columns with another of our numbers than that of their name


@dataclass(frozen=True)
class Experiment:
    """A table or figure. `measures`: what is measured of each run, see `measure.MEASURES`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    measures: tuple[str, ...]
    note: str
    simple: bool = False  # with the paper's small networks

    @property
    def variants(self) -> list[str]:
        """The runs it needs."""
        return list(dict.fromkeys(row.variant for row in self.rows if row.variant is not None))


def _quoted(column: str, figures: Mapping[str, str]) -> tuple[Row, ...]:
    return tuple(Row(label, {column: figure}) for label, figure in figures.items())


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(
        "FID and Inception Score",
        ("FID", "IS"),
        (
            Row("dual-MCMC teaching", {"FID": "9.26", "IS": "8.55"}, "dual-mcmc"),
            Row("Cooperative EBM", {"FID": "33.61", "IS": "6.55"}, "cooperative"),
            Row("Amortized EBM", {"IS": "6.65"}, "amortized"),
            Row("Divergence triangle", {"FID": "30.10", "IS": "7.23"}, "triangle"),
            Row("No MCMC EBM", {"FID": "27.5"}, "no-mcmc"),
            Row("Short-run EBM", {"IS": "6.21"}, "short-run"),
            Row("IGEBM", {"FID": "38.2", "IS": "6.78"}, "persistent"),
            Row("Improved CD EBM", {"FID": "25.1", "IS": "7.85"}, "improved-cd"),
            Row("Diffusion EBM", {"FID": "9.58", "IS": "8.30"}),
            Row("VAEBM", {"FID": "12.19", "IS": "8.43"}),
            *_quoted("FID", {"NCP-VAE": "24.08"}),
            Row("SNGAN", {"FID": "21.7", "IS": "8.22"}),
            Row("StyleGAN2 without ADA", {"FID": "9.9", "IS": "8.99"}),
            Row("NCSN", {"FID": "25.32", "IS": "8.87"}),
            Row("DDPM", {"FID": "3.17", "IS": "9.46"}),
        ),
        ("samples",),
        "The paper quotes the other methods from their papers, whose networks differ; here all have the same. Samples "
        "of triangle and No MCMC are the generator's, without an x-chain.",
    ),
    "table-mse": Experiment(
        "Reconstruction error",
        ("MSE",),
        (
            Row("VAE", {"MSE": "0.0341"}, "vae"),
            Row("WAE", {"MSE": "0.0291"}, "wae"),
            Row("RAE", {"MSE": "0.0231"}, "rae"),
            Row("ABP", {"MSE": "0.0183"}, "abp"),
            Row("SR-ABP", {"MSE": "0.0262"}, "sr-abp"),
            Row("Cooperative EBM", {"MSE": "0.0271"}, "cooperative"),
            Row("Divergence triangle", {"MSE": "0.0237"}, "triangle"),
            Row("dual-MCMC teaching, Inf", {"MSE": "0.0214"}, "kz10", {"MSE": "MSE, inference"}),
            Row("dual-MCMC teaching, Inf + L = 10", {"MSE": "0.0072"}, "kz10"),
        ),
        ("errors",),
        "Of held-out images on [-1, 1], by inference for VAE, WAE, RAE and triangle; by 30 steps of the z-chain from "
        "noise for ABP, SR-ABP and cooperative. The paper states neither scale nor split.",
    ),
    "methods": Experiment(
        "Samples and reconstructions of seven methods",
        ("FID", "MSE"),
        (
            Row("dual-MCMC teaching", {"FID": "9.26", "MSE": "0.0072"}, "dual-mcmc"),
            Row("Cooperative EBM", {"FID": "33.61", "MSE": "0.0271"}, "cooperative"),
            Row("Divergence triangle", {"FID": "30.10", "MSE": "0.0237"}, "triangle"),
            Row("No MCMC EBM", {"FID": "27.50"}, "no-mcmc"),
            Row("VAE", {"MSE": "0.0341"}, "vae"),
            Row("ABP", {"MSE": "0.0183"}, "abp"),
            Row("Short-run EBM", {}, "short-run"),
        ),
        ("samples", "errors"),
        "From several of the paper's tables, whose networks differ; here all have the same. FID and MSE as in table1 "
        "and table-mse.",
    ),
    "table-kz": Experiment(
        "Steps of the z-chain, from noise and from inference",
        ("FID", "MSE", "time (s)"),
        (
            Row("L = 10", {"FID": "17.32", "MSE": "0.0214", "time (s)": "1.576"}, "noise-kz10"),
            Row("L = 30", {"FID": "14.51", "MSE": "0.0164", "time (s)": "2.034"}, "noise-kz30"),
            Row("Inf + L = 10", {"FID": "9.26", "MSE": "0.0072", "time (s)": "1.594"}, "kz10"),
            Row("Inf + L = 30", {"FID": "9.18", "MSE": "0.0068", "time (s)": "2.112"}, "kz30"),
        ),
        ("samples", "errors", "time"),
        "Time per iteration: the paper's on an A100.",
    ),
    "table-kx": Experiment(
        "Steps of the x-chain",
        ("FID", "time (s)"),
        (
            Row("L = 10", {"FID": "14.78", "time (s)": "0.861"}, "kx10"),
            Row("L = 20", {"FID": "11.51", "time (s)": "1.241"}, "kx20"),
            Row("L = 30", {"FID": "9.26", "time (s)": "1.594"}, "kx30"),
            Row("L = 50", {"FID": "9.07", "time (s)": "2.454"}, "kx50"),
        ),
        ("samples", "time"),
        "Samples are drawn with as many steps as in training; the paper does not state its number.",
    ),
    "table-simple": Experiment(
        "Small networks",
        ("FID",),
        (
            Row("Cooperative EBM", {"FID": "33.61"}, "cooperative"),
            Row("Divergence triangle", {"FID": "30.10"}, "triangle"),
            Row("No MCMC EBM", {"FID": "27.50"}, "no-mcmc"),
            Row("dual-MCMC teaching", {"FID": "19.35"}, "dual-mcmc"),
        ),
        ("samples",),
        "The paper's networks are not published; ours have their numbers of parameters (at the scale short E has 3.3 "
        "million instead of 2). Samples of triangle and No MCMC are the generator's, without an x-chain.",
        simple=True,
    ),
    "table-nef": Experiment(
        "Width of the networks",
        ("FID",),
        (
            Row("nef = 256", {"FID": "11.19"}, "half-width"),
            Row("nef = 512", {"FID": "9.26"}, "width"),
            Row("nef = 1024", {"FID": "8.45"}, "double-width"),
        ),
        ("samples",),
        "At the scales smoke and short: half, equal and double the widths of their preset.",
    ),
    "table-ood": Experiment(
        "Out-of-distribution detection, AUROC of the energy",
        ("SVHN", "CIFAR-100", "CelebA"),
        (
            Row("dual-MCMC teaching", {"SVHN": "0.94", "CIFAR-100": "0.64", "CelebA": "0.85"}, "dual-mcmc"),
            Row("Divergence triangle", {"SVHN": "0.68", "CelebA": "0.56"}, "triangle"),
            Row("No MCMC EBM", {"SVHN": "0.83", "CIFAR-100": "0.73", "CelebA": "0.33"}, "no-mcmc"),
            Row("IGEBM", {"SVHN": "0.63", "CIFAR-100": "0.50", "CelebA": "0.70"}, "persistent"),
            Row("Improved CD EBM", {"SVHN": "0.91", "CIFAR-100": "0.83"}, "improved-cd"),
            Row("VAEBM", {"SVHN": "0.83", "CIFAR-100": "0.62", "CelebA": "0.77"}),
            Row("JEM (supervised)", {"SVHN": "0.67", "CIFAR-100": "0.67", "CelebA": "0.75"}),
            Row("HDGE (supervised)", {"SVHN": "0.96", "CIFAR-100": "0.91", "CelebA": "0.80"}),
            Row("OOD EBM (supervised)", {"SVHN": "0.91", "CIFAR-100": "0.87", "CelebA": "0.78"}),
            Row("OOD EBM, fine-tuned (supervised)", {"SVHN": "0.99", "CIFAR-100": "0.94", "CelebA": "1.00"}),
        ),
        ("outliers",),
        "The paper states neither the networks nor the crop of CelebA nor the numbers of images.",
    ),
}
