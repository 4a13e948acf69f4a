"""The model card of shared weights: the README.md of their repository on the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dualmcmc import __version__
from dualmcmc.config import Chain, Config
from dualmcmc.data.catalog import CATALOG
from dualmcmc.hub import FILE

TAGS = ["energy-based-model", "mcmc", "langevin-dynamics", "dual-mcmc-teaching", "pytorch"]
MEASUREMENTS = ("evaluate", "reconstruct", "inpaint", "outliers")  # tasks whose numbers describe the model
HEADLINES = re.compile(  # the numbers that are shown
    r"(generator|ebm)\.(fid|frechet_custom_network|kid|is|precision|recall)"
    r"|(reconstruction\.)?inference(\+\d+( noise-free)?)?\.(mse|psnr_db|ssim)"
    r"|(completed|generated)\.\w+\.(mse|psnr_db|psnr_hidden_db|ssim)"
    r"|[^.]+\.\w+\.auroc"
)
BEGIN, END = "<!-- dualmcmc: generated, replaced by the next push -->", "<!-- dualmcmc: end of the generated part -->"


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
        "## Intended use\n\n<!-- What the weights are for, what they are not for, and known limits. -->",
        BEGIN,
        f"{_networks(config)} for {data.noun} of shape {shape}, trained {_method(config)} with the Python package "
        "`dualmcmc`.",
        _usage(repo, config),
        "## Training\n\n" + _table(_training(config, images)),
        "## File\n\n"
        + _table(
            {
                "file": f"`{FILE}`: safetensors, with the training settings, without code",
                "parameters": counts,
                "size": f"{file['bytes']:,} bytes, {file['dtype']} (tensors of one dimension float32)",
                "SHA-256": f"`{file['sha256']}`",
            }
        ),
        *_measurements(results, file["dtype"]),
        END,
    ]
    return "\n\n".join(sections) + "\n"


def _networks(config: Config) -> str:
    names = {"energy": "an energy-based model E", "generator": "a generator G", "inference": "an inference model I"}
    *most, last = (names[name] for name in config.networks)
    text = f"{', '.join(most)} and {last}" if most else last
    return text[0].upper() + text[1:]


def _method(config: Config) -> str:
    if config.method == "dual-mcmc":
        return "together by dual-MCMC teaching (Cui & Han, NeurIPS 2023)"
    return f"by the method {config.method}"


def updated_card(card: str, existing: str) -> str | None:
    """`existing` with the generated part of `card`; None if it has no such part, since somebody wrote it anew."""
    begin, end = existing.find(BEGIN), existing.find(END)
    if begin < 0 or end < begin:
        return None
    return existing[:begin] + card[card.index(BEGIN) : card.index(END)] + existing[end:]


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
        f"x = run.sample(16)  # {_samples(config)}\n```{note}"
    )


def _samples(config: Config) -> str:
    if "energy" not in config.networks:
        return "generator samples"
    return f"EBM samples: {'generator' if 'generator' in config.networks else 'noise'}, then the x-chain"


def _training(config: Config, images: int) -> dict[str, str]:
    data, nets, teaching = config.data, config.nets, config.teaching
    named = f"{data.source}, split {_code(data.split)}"
    widths = ", ".join(f"{name[0].upper()} {getattr(nets, f'{name}_width')}" for name in config.networks)
    chains = {}
    if "energy" in config.networks:
        chains = {"x-chain in training": _chain(teaching.x_chain), "x-chain of samples": _chain(config.sampling_chain)}
    if "generator" in config.networks:
        chains["z-chain"] = _chain(teaching.z_chain)
    rows = {
        "data": {"folder": "a folder of images", "custom": "data passed in Python"}.get(data.source, named),
        f"{data.noun} trained on": f"{images:,}, in batches of {config.train.batch:,}",
        "networks": "custom" if nets.kind == "custom" else f"{nets.kind}, widths {widths}",
        "method": config.method,
        "latent dimension, sigma": f"{teaching.latent_dim}, {teaching.sigma:g}",
        **chains,
        "seed": str(config.seed),
        "version": f"dualmcmc {__version__} wrote the file",
    }
    return {"preset": _code(config.preset), **rows} if config.preset else rows


def _chain(chain: Chain) -> str:
    one = replace(chain, temperature=1.0)  # `format_steps` would repeat the temperature
    return f"{one.format_steps()} of size {chain.step_size:g}, temperature {chain.temperature:g}"


def _measurements(results: Sequence[Mapping[str, Any]], dtype: str) -> Iterator[str]:
    """The newest value of each headline number. Commands and names of files stay out: they are the author's own."""
    seen: set[tuple[str, str]] = set()
    sections = []
    for result in reversed(results):
        task = str(result["task"])
        numbers = {name: value for name, value in _numbers(result["numbers"]) if HEADLINES.fullmatch(name)}
        rows = {name: f"{value:.6g}" for name, value in numbers.items() if (task, name) not in seen}
        if task not in MEASUREMENTS or not rows:
            continue
        seen |= {(task, name) for name in rows}
        sections.append(
            _circumstances(result) + ":\n\n" + _table({_code(k): v for k, v in rows.items()}, "number", "value")
        )
    if sections:
        rounding = f", before they were rounded to {dtype}." if dtype != "float32" else "."
        yield f"## Results\n\nOf the run's weights{rounding}"
        yield from sections


def _circumstances(result: Mapping[str, Any]) -> str:
    """The task, how many samples or images, the x-chain, the device and the day."""
    amounts = {name: result.get(name) for name in ("samples", "images")}
    reconstructed = result.get("reconstructed")
    if isinstance(reconstructed, dict):
        amounts |= {str(kind): count for kind, count in reconstructed.items()}
    words = [str(result["task"])]
    words += [f"{count:,} {name}" for name, count in amounts.items() if isinstance(count, int) and count]
    chain = result.get("x_chain")
    if isinstance(chain, dict) and isinstance(chain.get("steps"), int):
        words.append(f"{chain['steps']:,} steps of the x-chain")
    return ", ".join(map(_code, [*words, str(result.get("device", "")), str(result["time"])[:10]]))


def _numbers(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for number, (key, value) in enumerate(values.items(), 1):
        # Outliers may be from a folder of the author's, whose name is nobody else's business.
        own = not path and any(isinstance(part, dict) and "auroc" in part for part in _parts(value))
        word = f"other-images-{number}" if own and str(key).partition(":")[0] not in CATALOG else str(key)
        name = f"{path}.{word}" if path else word
        if isinstance(value, dict):
            yield from _numbers(value, name)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _code(text: str) -> str:
    """Text from a file, on one line and without a meaning in Markdown."""
    return f"`{re.sub(r'[`|]|[^ -~]', ' ', text)[:200]}`"


def _table(rows: Mapping[str, str], *head: str) -> str:
    lines = [f"| {' | '.join(head) if head else ' | '} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
