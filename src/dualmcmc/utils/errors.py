"""User-facing errors, and untrusted text made safe to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_LENGTH = 80  # characters of untrusted text in a message


class UserError(Exception):
    """Bad input, in one line: what is wrong, where, what to do. The command exits with 2."""


class CannotWrite(UserError):
    """A file cannot be written: no space, or no permission."""


class Damaged(UserError):
    """A file has changed since it was written: truncated, or with bits flipped."""


class NotFinite(UserError):
    """A trained run has samples or energies that are not finite."""


class Diverged(Exception):
    """Training diverged. The last valid state is on disk. The command exits with 3."""


class ProcessLost(Exception):
    """Another process of a distributed job was lost. The command exits with 4."""


def first_line(error: BaseException) -> str:
    """An error's message, or its type, in one line without a full stop."""
    return sanitize((str(error).strip() or type(error).__name__).splitlines()[0].rstrip("."), 200)


def nearest(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the closest of `known`; empty if none is close.

    The last part of a dotted name also matches, so that `lr` finds `optim.energy.lr`.
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:
        leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        matches = difflib.get_close_matches(word.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.6)
        close = [leaves[leaf] for leaf in matches]
    return f" Did you mean '{close[0]}'?" if close else ""


def sanitize(text: str, max_length: int = MAX_LENGTH) -> str:
    """`text` on one line, control characters escaped, its middle omitted if it is long."""
    if len(text) > max_length:  # first: no need to escape a megabyte to show 80 characters
        text = f"{text[: max_length * 3 // 4]}...{text[-(max_length // 4) :]}"
    return _escape(text)


def printable(text: str) -> str:
    """`text` of any number of lines without anything that changes how a terminal or a browser shows the rest.

    That is: control characters, and Unicode's marks that reverse the direction of text or are invisible.
    """
    return "\n".join(map(_escape, text.split("\n")))


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def format_value(value: Any, max_length: int = MAX_LENGTH) -> str:
    """A value's repr, shortened; containers by type and length only, since they may be huge. None is YAML's null."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list, tuple, set)):
        names = {dict: "key: value pairs", list: "a list", tuple: "a list", set: "a set"}
        return f"{names[type(value)]} of {len(value):,}"
    if isinstance(value, int) and abs(value) >= 10**max_length:
        return "a number too long to print"  # Python refuses to print 5,000 digits
    return sanitize(repr(value), max_length)
