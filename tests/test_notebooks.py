"""The notebooks run from top to bottom in a Jupyter kernel, without warnings.

`make notebooks` also stores their outputs.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples"
UPDATE = os.environ.get("DUALMCMC_UPDATE_NOTEBOOKS") == "1"
PICTURES = {"quickstart": 5, "own_networks": 3}
TEXT = {
    "quickstart": ["Run(cifar10-simple: 3x32x32 images", "inpainting: 8 of 8 images", "noise: AUROC by energy"],
    "own_networks": ["('max-images', 100000)", "finished after 500,000 samples", "healthy", "train: 500k/500k"],
}


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts_of(notebook):
    """What the cells print, and how their results look as text."""
    return "\n".join(output.get("text") or output.data["text/plain"] for output in outputs_of(notebook))


@pytest.mark.parametrize("name", PICTURES)
def test_runs(name, tmp_path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    client = NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = outputs_of(notebook)
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == PICTURES[name]
    for text in TEXT[name]:
        assert text in texts_of(notebook)
    if UPDATE:
        notebook.metadata.pop("language_info", None)  # it names the Python version
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")


@pytest.mark.parametrize("name", PICTURES)
def test_stored_outputs(name):
    """They come from a complete run of the code next to them, and name no folder of the machine it ran on."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(output.output_type != "error" for output in outputs_of(notebook))
    assert not re.search(r"/(tmp|home|root|Users)/", texts_of(notebook))


@pytest.mark.parametrize("name", PICTURES)
def test_links(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    targets = [
        t for cell in notebook.cells for t in re.findall(r"\]\(([^)#]+)", cell.source) if cell.cell_type != "code"
    ]
    assert targets
    for target in targets:
        assert (FOLDER / target).exists(), target
