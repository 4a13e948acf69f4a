"""What is measured of a run, by the columns of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable

from dualmcmc.metrics.fid import pixel_frechet_distance
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.paper.runs import PaperRun, Scale
from dualmcmc.tasks.evaluate import NO_CLASSIFIER, evaluate
from dualmcmc.tasks.inputs import choose, dataset_for
from dualmcmc.tasks.outliers import outliers
from dualmcmc.tasks.reconstruct import NOISE_STEPS
from dualmcmc.tasks.run import Run, require_finite
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import to_uint8
from dualmcmc.utils.progress import ProgressFactory

Numbers = dict[str, float | None]
PIXELS = "Fréchet distance of pixels"  # to held-out images
GENERATOR_SAMPLES = ("triangle", "no-mcmc")  # trained without x-chains
OTHERS = {"SVHN": "svhn", "CIFAR-100": "cifar100", "CelebA": "celeba"}


class Measurement:
    """How to measure a run: with which features, and how much of it."""

    def __init__(self, scale: Scale, features: FeatureExtractor | None, progress: ProgressFactory) -> None:
        self.scale, self.features, self.progress = scale, features, progress
        self.notes: list[str] = []  # of the last measurement
        self.all_notes: dict[str, None] = {}  # of all, in order
        self.complete = True  # whether the last measurement found all it needs

    def samples(self, run: Run, source: PaperRun) -> Numbers:
        """FID and IS of EBM samples, or of the generator's if no x-chain has trained it (`GENERATOR_SAMPLES`).

        Without Inception a pixel distance.
        """
        from_generator = run.config.method in GENERATOR_SAMPLES or not run.has("energy")
        if self.features is None:
            splits = run.load_data(self.progress)
            count = min(self.scale.samples, len(splits.test_or_train()[0]))
            real = splits.test_or_train()[0].first(count)
            samples = require_finite(run.sample(self.scale.samples, steps=0 if from_generator else None))
            return {"FID": None, PIXELS: pixel_frechet_distance(to_uint8(samples).cpu(), real)}
        metrics = ["fid", "is"] if self.features.has_classifier else ["fid"]
        if "is" not in metrics:
            self._note(f"IS: {NO_CLASSIFIER}")
        result = evaluate(run, metrics, self.scale.samples, features=self.features, progress=self.progress)
        numbers, name = result.generator if from_generator else result.ebm, self.features.metric_name
        return {
            "FID": numbers[name],
            "IS": numbers.get("is"),
            "FID, generator": result.generator.get(name),
            "FID, after the x-chain": result.ebm.get(name),
        }

    def errors(self, run: Run, source: PaperRun) -> Numbers:
        """MSE of held-out images at the latents that the method infers, and by inference alone and + z-chain.

        Methods with a z-chain from inference, or from noise, in training: after it. Other methods with an inference
        model: without one. Those whose chains start at latents that only training images have: after a long one.
        """
        if not run.has("generator"):
            return {}
        result = evaluate(run, ["mse"], images=None, progress=self.progress, reconstructions=self.scale.images)
        by_start = {start: numbers["mse"] for start, numbers in result.reconstruction.items()}
        method, steps = run.config.method, run.config.teaching.z_chain.steps
        inferred, revised = by_start.get("inference"), by_start.get(f"inference+{steps}")
        if inferred is not None:
            own = revised if method == "dual-mcmc" else inferred
        else:
            own = by_start[f"noise+{steps if method in ('dual-mcmc', 'sr-abp') else max(NOISE_STEPS)}"]
        return {"MSE": own, "MSE, inference": inferred, "MSE, inference + z-chain": revised}

    def time(self, run: Run, source: PaperRun) -> Numbers:
        """Seconds per iteration."""
        return {"time (s)": source.seconds_per_iteration}

    def outliers(self, run: Run, source: PaperRun) -> Numbers:
        """AUROC of the energy against other datasets, as far as they are there."""
        held_out, _ = run.load_data(self.progress).test_or_train()
        numbers: Numbers = {}
        for column, name in OTHERS.items():
            try:
                other = dataset_for(run, name, self.progress)[1].store
            except UserError:
                self.complete = False
                self._note(f"{column}: its images are missing ('dualmcmc data fetch {name}')")
                continue
            sets = [choose(store, self.scale.images, run.seed) for store in (held_out, other)]
            found = outliers(run, sets[0], {name: sets[1]}, ["energy"], self.progress)
            numbers[column] = found.numbers[name]["energy"]["auroc"]
        return numbers

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


MEASURES: dict[str, Callable[[Measurement, Run, PaperRun], Numbers]] = {
    "samples": Measurement.samples,
    "errors": Measurement.errors,
    "time": Measurement.time,
    "outliers": Measurement.outliers,
}
