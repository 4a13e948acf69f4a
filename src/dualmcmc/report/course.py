"""How a run went, apart from what it learned: divergence, rollbacks, speed, saves, resumes."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from dualmcmc.config import Config
from dualmcmc.report.findings import Finding, calmer_energy, times
from dualmcmc.report.history import Entry, History, number
from dualmcmc.report.ranges import HEALTHY
from dualmcmc.words import plain, shown

SLOWED = 3.0  # times; a busy machine alone makes a healthy run swing by 2
SPEED_LINES = 12  # of one sitting, before its speed is judged: the first are slow or fast for reasons of their own
SAVING, SAVING_SECONDS = 0.1, 60.0  # the share of the time that saves may take, and how much is worth a word
LONGEST = 200  # characters of a reason, as the log has it
RESUMES, SITTING = 5, 10  # so many stops, with fewer lines of the log between them: each costs work


def divergence(history: History, config: Config) -> list[Finding]:
    """How it ended, or was set back."""
    findings = []
    if event := _end(history):
        words = f"The run diverged at image {event['images']:,}: {_reason(event)}."
        findings.append(Finding("bad", "diverged", words, _calmer(history, config)))
    if rollbacks := history.events("rollback"):
        last = rollbacks[-1]
        count = last["number"] if isinstance(last.get("number"), int) else len(rollbacks)
        often = "once" if count == 1 else f"{count:,} times"
        words = f"The run diverged and was set back {often}, last to image {last['images']:,}: {_reason(last)}."
        lowered = last.get("lowered")
        changes = [_setting(*item) for item in lowered.items()] if isinstance(lowered, dict) else []
        advice = "begin the next run with " + " ".join(changes) if changes else _calmer(history, config)
        findings.append(Finding("watch", "rollback", words, advice))
    return findings


def finite(history: History, config: Config) -> list[Finding]:
    """Numbers that are none; where the run diverged for good, that says it already."""
    if _end(history):
        return []
    bad: dict[str, int] = {}
    for line in history.lines:
        for name, value in line.items():
            seen = number(value)
            if seen is not None and not math.isfinite(seen):
                bad.setdefault(name, line["images"])
    if not bad:
        return [Finding("ok", "finite numbers", "Every number is finite.")]
    named = ", ".join(f"{plain(name)} at image {images:,}" for name, images in list(bad.items())[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    words = f"Numbers that are not finite: {named}{more}. What was learned since cannot be trusted."
    return [Finding("bad", "finite numbers", words, _calmer(history, config))]


def speed(history: History, config: Config) -> list[Finding]:
    """Slower than it was, in the sitting that is the last."""
    begins = [i for i, entry in enumerate(history.log) if entry.get("kind") in ("start", "resume")]
    sitting, name = History(history.log[begins[-1] :] if begins else history.log), "iterations_per_second"
    if len(sitting.series(name)) < SPEED_LINES:
        return []
    before, now = median(sitting.early(name)), median(sitting.recent(name))
    if now * SLOWED < before:
        words = f"Training has slowed from {before:.3g} to {now:.3g} iterations per second."
        return [Finding("watch", "speed", words, "see what else uses the machine, and whether it throttles")]
    return [Finding("ok", "speed", f"{now:.3g} iterations per second.")]


def saves(history: History, config: Config) -> list[Finding]:
    """Time that goes into states instead of training."""
    seconds = [number(event.get("seconds")) for event in history.events("save")]
    spent = sum(value for value in seconds if value is not None and math.isfinite(value))
    share = spent / max(spent + max(history.series("seconds"), default=0.0), 1e-9)
    if spent > SAVING_SECONDS and share > SAVING:
        words = f"Saving takes {share:.0%} of the time."
        return [Finding("watch", "saves", words, times(config, "train.save_every", 4))]
    return [Finding("ok", "saves", "Saving takes little of the time.")]


def resumes(history: History, config: Config) -> list[Finding]:
    """A run that is stopped again and again."""
    count, lines = len(history.events("resume")), len(history.lines)
    if count >= RESUMES and lines < SITTING * (count + 1):
        words = f"The run was resumed {count} times within {lines} lines of its log: each stop costs work."
        return [Finding("watch", "resumes", words, times(config, "train.save_every", 0.5))]
    return [Finding("ok", "resumes", f"Resumed {count} times.")]


def _end(history: History) -> Entry | None:
    """The divergence that ended the run: nothing was trained after it."""
    end: Entry | None = None
    for entry in history.log:
        if entry.get("kind") == "diverged":
            end = entry
        elif entry.get("kind") in ("resume", "rollback", "train"):
            end = None
    return end


def _calmer(history: History, config: Config) -> str:
    """What to lower after a divergence: the chain that ran away, or all that may have caused it."""
    last: Entry = next((entry for entry in reversed(history.log) if entry.get("kind") == "train"), {})
    chains = {"x_moved": "teaching.x_chain.step_size", "z_moved": "teaching.z_chain.step_size"}
    moved = {name: number(last.get(name)) for name in chains}
    away = [name for name, value in moved.items() if value is not None and not abs(value) <= HEALTHY[name].limit]
    if len(away) == 1:
        return times(config, chains[away[0]], 0.1)
    return f"{times(config, chains['z_moved'], 0.5)} {calmer_energy(config)}"


def _reason(event: Entry) -> str:
    """The first sentence of why; the advice that follows it there is general."""
    return plain(str(event.get("reason", "no reason is noted")), LONGEST).partition(". ")[0].rstrip(".")


def _setting(key: str, value: Any) -> str:
    return f"{plain(key)}={f'{value:.4g}' if isinstance(value, float) else shown(value)}"
