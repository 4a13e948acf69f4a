"""Find and read the results of a run, which `record` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dualmcmc.pretrained import output_folder
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import read_text

FOLDER = "results"
MAX_RECORD = 1 << 24  # bytes

# names in files of earlier versions
RENAMED_NUMBERS = {
    "frechet_own_network": "frechet_custom_network",
    "mse_unit": "mse_0_to_1",
    "psnr": "psnr_db",
    "psnr_hidden": "psnr_hidden_db",
    "hidden": "hidden_fraction",
    "x_moved": "x_displacement_rms",
    "energy_half": "energy_halfway",
    "moved_half": "displacement_rms_halfway",
    "moved_end": "displacement_rms_end",
    "largest_pixel": "max_abs_pixel",
    "outside_range": "fraction_outside_range",
    "outside_range_at": "fraction_outside_range_at",
    "step_mean": "pixel_change_rms_mean",
    "step_largest": "pixel_change_rms_max",
    "unevenness": "max_to_mean_change",
    "aupr_known": "aupr_in_distribution",
    "fpr95": "fpr_at_95_tpr",
}
RENAMED_FACTS = {"left_out": "skipped", "seconds_of": "seconds_by_part"}
RENAMED_TASKS = {"long-run": "long-chains"}


def folder_for(run: Path) -> Path:
    """Where the results of a run folder, a snapshot or pretrained weights are."""
    return output_folder(run) / FOLDER


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Every result in a folder, oldest first, with current names; other files are skipped."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(read_text(path, MAX_RECORD))
            if isinstance(result, dict) and {"task", "time"} <= result.keys() and isinstance(result["numbers"], dict):
                results.append(_with_current_names(result))
        except (UserError, KeyError, ValueError, RecursionError):
            continue
    return sorted(results, key=lambda result: str(result["time"]))


def _with_current_names(result: dict[str, Any]) -> dict[str, Any]:
    def rename(numbers: dict[str, Any]) -> dict[str, Any]:
        current = {}
        for key, value in numbers.items():
            if isinstance(value, dict):  # of a stage or a dataset, which keeps its name
                current[key] = rename(value)
            else:
                current[RENAMED_NUMBERS.get(key, key)] = value
        return current

    task = str(result["task"])
    changes = {"task": RENAMED_TASKS.get(task, task), "numbers": rename(result["numbers"])}
    return {RENAMED_FACTS.get(key, key): value for key, value in (result | changes).items()}
