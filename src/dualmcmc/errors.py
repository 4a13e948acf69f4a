"""What can go wrong in a way that the person at the keyboard can put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from dualmcmc.words import plain


class UserError(Exception):
    """Bad input: one clear line (what is wrong, where, what to do). The command exits with 2."""


class CannotWrite(UserError):
    """A file that cannot be written: the disk, or who may write there."""


class Damaged(UserError):
    """A file that is not as it was written: cut short, or with bits changed."""


class Diverged(Exception):
    """Training left the healthy range. The last good state is on disk. The command exits with 3."""


class ProcessLost(Exception):
    """Another of the processes that work together is gone. The command exits with 4."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line without a full stop; never nothing."""
    return plain((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."), 200)


def nearest(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest of `known`, or nothing where none is close.

    A bare last name counts too, so that `lr` finds `optim.energy.lr`.
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:
        leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        found = difflib.get_close_matches(word.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.6)
        close = [leaves[leaf] for leaf in found]
    return f" Did you mean '{close[0]}'?" if close else ""
