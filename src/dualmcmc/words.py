"""What strangers wrote, made fit to be shown: on one line, not too long, nothing that a terminal would obey."""

from __future__ import annotations

from typing import Any

LONGEST = 80  # characters of one foreign word in a message


def plain(text: str, longest: int = LONGEST) -> str:
    """`text` on one line, control characters as escapes, its middle left out where it is long."""
    if len(text) > longest:  # first: escaping a megabyte to show 80 characters of it would be a waste
        text = f"{text[: longest * 3 // 4]}...{text[-(longest // 4) :]}"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shown(value: Any, longest: int = LONGEST) -> str:
    """A value as it would be written in Python, shortened; a list or a dict by what it is, for it may be endless."""
    if isinstance(value, (dict, list, tuple, set)):
        names = {dict: "key: value pairs", list: "a list", tuple: "a list", set: "a set"}
        return f"{names[type(value)]} of {len(value):,}"
    if isinstance(value, int) and abs(value) >= 10**longest:
        return "a number too long to be shown"  # Python itself refuses to print one of 5,000 digits
    return plain(repr(value), longest)
