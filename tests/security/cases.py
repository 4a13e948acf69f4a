"""Helpers of the fuzz tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dualmcmc.utils.errors import UserError
from tests.conftest import LONG

_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
settings.register_profile("short", max_examples=40, derandomize=True, **_COMMON)  # always the same cases
settings.register_profile("long", max_examples=4000, **_COMMON)


def fuzz(fraction: float = 1.0) -> settings:
    """Decorator with the settings of the fuzz tests; slow tests run a fraction of the long form's cases."""
    profile = settings.get_profile("long" if LONG else "short")
    return settings(profile, max_examples=round(fraction * profile.max_examples)) if LONG else profile


run = 0  # number of cases in this process


@contextmanager
def valid_or_refused() -> Iterator[None]:
    """One case: it may succeed, or raise a UserError with a message of one printable line."""
    global run
    run += 1
    try:
        yield
    except UserError as error:
        text = str(error)
        assert text.strip(), "empty message"
        assert text.isprintable(), f"not one printable line: {text!r}"
        assert len(text) < 5000, f"a message of {len(text):,} characters"


def json_values(leaves: int = 12) -> st.SearchStrategy[Any]:
    """Any JSON value, and some numbers that JSON does not allow."""
    numbers = st.one_of(
        st.integers(),
        st.floats(),
        st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 10**400, float("inf"), float("nan"), 0.5]),
    )
    leaf = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)),
        max_leaves=leaves,
    )


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """A valid file with bits flipped, bytes replaced, removed or duplicated, or truncated."""
    places = st.integers(0, max(0, len(content) - 1))
    early = st.integers(0, min(len(content) - 1, 200))  # where the headers are

    def flipped(places: list[int], masks: list[int]) -> bytes:
        changed = bytearray(content)
        for place, mask in zip(places, masks, strict=False):
            changed[place] ^= mask
        return bytes(changed)

    def spliced(start: int, length: int, put: bytes) -> bytes:
        return content[:start] + put + content[start + length :]

    def doubled(start: int, length: int, to: int) -> bytes:
        return content[:to] + content[start : start + length] + content[to:]

    masks = st.lists(st.integers(1, 255), min_size=8, max_size=8)
    return st.one_of(
        st.builds(flipped, st.lists(st.one_of(places, early), min_size=1, max_size=8), masks),
        st.builds(spliced, st.one_of(places, early), st.integers(0, 40), st.binary(max_size=40)),
        st.builds(doubled, places, st.integers(1, 200), places),
        places.map(lambda end: content[:end]),
        st.tuples(early, st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"])).map(
            lambda found: content[: found[0]] + found[1] + content[found[0] + 4 :]
        ),
    )


def any_of(contents: dict[str, bytes], also: Callable[[], st.SearchStrategy[bytes]] = st.binary) -> Any:
    """(name, content) of one of several valid files, damaged, or with content from `also`."""
    files = [st.tuples(st.just(name), damaged(content)) for name, content in contents.items()]
    return st.one_of(*files, st.tuples(st.sampled_from(sorted(contents)), also()))
