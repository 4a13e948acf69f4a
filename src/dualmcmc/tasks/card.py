"""The model card of shared weights: the README.md of their repository on the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualmcmc import __version__
from dualmcmc.config import Chain, Config
from dualmcmc.hub import FILE

TAGS = ["energy-based-model", "mcmc", "langevin-dynamics", "dual-mcmc-teaching", "pytorch"]
MEASUREMENTS = ("evaluate", "reconstruct", "inpaint", "outliers")  # tasks whose numbers describe the model
MAX_NUMBERS = 100  # per task


def model_card(
    repo: str,
    config: Config,
    parameters: Mapping[str, int],
    images: int,
    file: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    license: str | None,
) -> str:
    """A card for the weights in `repo`. `file`: their `dtype`, `bytes` and `sha256`; `results`: records of the run."""
    data = config.data
    shape = "x".join(map(str, data.sample_shape))
    counts = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    sections = [
        _front_matter(config, license),
        f"# {repo.partition('/')[2]}",
        f"An energy-based model E, a generator G and an inference model I for {shape} {data.noun}, trained together by "
        "dual-MCMC teaching (Cui & Han, NeurIPS 2023) with the Python package `dualmcmc`.",
        _usage(repo, config),
        "## Training\n\n" + _table(_training(config, images)),
        "## File\n\n"
        + _table(
            {
                "file": f"`{FILE}`: safetensors, with the training settings, without code",
                "parameters": counts,
                "size": f"{file['bytes']:,} bytes, {file['dtype']} (vectors float32)",
                "SHA-256": f"`{file['sha256']}`",
            }
        ),
        *_measurements(results, file["dtype"]),
        "## Intended use\n\nNot stated yet: what the weights are for, what they are not for, and known limits.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: Config, license: str | None) -> str:
    """The metadata that the Hub reads; JSON values are valid YAML."""
    fields: dict[str, Any] = {"library_name": "dualmcmc", "tags": TAGS}
    if license is not None:
        fields["license"] = license
    if config.data.is_image:
        fields["pipeline_tag"] = "unconditional-image-generation"
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def _usage(repo: str, config: Config) -> str:
    custom = config.nets.kind == "custom"
    networks = ", networks=networks" if custom else ""
    note = "\n\nThe file does not describe the networks: `networks` is a `Trio` like the one trained." if custom else ""
    return (
        "## Use\n\n```sh\npip install 'dualmcmc[hub]'\n```\n\n"
        f'```python\nimport dualmcmc\n\nrun = dualmcmc.load("hf://{repo}"{networks})\n'
        f"x = run.sample(16)  # EBM samples: generator, then the x-chain\n```{note}"
    )


def _training(config: Config, images: int) -> dict[str, str]:
    data, nets, teaching = config.data, config.nets, config.teaching
    named = f"{data.source}, split {_code(data.split)}"
    widths = f"E {nets.energy_width}, G {nets.generator_width}, I {nets.inference_width}"
    rows = {
        "data": {"folder": "a folder of images", "custom": "data passed in Python"}.get(data.source, named),
        f"{data.noun} trained on": f"{images:,}, in batches of {config.train.batch:,}",
        "networks": "custom" if nets.kind == "custom" else f"{nets.kind}, widths {widths}",
        "latent dimension, sigma": f"{teaching.latent_dim}, {teaching.sigma:g}",
        "x-chain in training": _chain(teaching.x_chain),
        "x-chain of samples": _chain(config.sampling_chain),
        "z-chain": _chain(teaching.z_chain),
        "seed": str(config.seed),
        "version": f"dualmcmc {__version__} wrote the file",
    }
    return {"preset": _code(config.preset), **rows} if config.preset else rows


def _chain(chain: Chain) -> str:
    one = replace(chain, temperature=1.0)  # `format_steps` would repeat the temperature
    return f"{one.format_steps()} of size {chain.step_size:g}, temperature {chain.temperature:g}"


def _measurements(results: Sequence[Mapping[str, Any]], dtype: str) -> Iterator[str]:
    """The newest result of each task. Commands and paths stay out: they describe the author's machine."""
    newest = {str(result["task"]): result for result in results}
    shown = [newest[task] for task in MEASUREMENTS if task in newest]
    if not shown:
        return
    text = "## Results\n\nOf the run's weights"
    yield text + (f", before they were rounded to {dtype}." if dtype != "float32" else ".")
    for result in shown:
        rows = {name: f"{value:.6g}" for name, value in list(_numbers(result["numbers"]))[:MAX_NUMBERS]}
        amounts = {name: result.get(name) for name in ("samples", "images")}
        amount = ", ".join(f"{count:,} {name}" for name, count in amounts.items() if isinstance(count, int) and count)
        circumstances = [str(result["task"]), amount, str(result.get("device", "")), str(result["time"])[:10]]
        yield ", ".join(_code(word) for word in circumstances if word) + ":\n\n" + _table(rows, "number", "value")


def _numbers(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from _numbers(value, name)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield _code(name), value


def _code(text: str) -> str:
    """Text from a file, on one line and without a meaning in Markdown."""
    return f"`{re.sub(r'[`|]|[^ -~]', ' ', text)[:200]}`"


def _table(rows: Mapping[str, str], *head: str) -> str:
    lines = [f"| {' | '.join(head) if head else ' | '} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
