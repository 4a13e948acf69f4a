"""What the fuzz tests share: how many cases they run, and what may come out of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dualmcmc.errors import UserError
from tests.conftest import LONG

_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
settings.register_profile("short", max_examples=40, derandomize=True, **_COMMON)  # the same cases every time
settings.register_profile("long", max_examples=4000, **_COMMON)


def fuzz(share: float = 1.0) -> settings:
    """A decorator, so that other tests keep their settings; `share` of the long form's cases where one is slow."""
    profile = settings.get_profile("long" if LONG else "short")
    return settings(profile, max_examples=round(share * profile.max_examples)) if LONG else profile


run = 0  # cases so far, in this process


@contextmanager
def only_a_clear_refusal() -> Iterator[None]:
    """One case: it may end well, or with a UserError of one printable line. All else goes on up and fails the test."""
    global run
    run += 1
    try:
        yield
    except UserError as error:
        text = str(error)
        assert text.strip(), "a refusal that says nothing"
        assert text.isprintable(), f"a refusal that is not one plain line: {text!r}"
        assert len(text) < 5000, f"a refusal of {len(text):,} characters"


def json_values(leaves: int = 12) -> st.SearchStrategy[Any]:
    """Anything JSON can say, and a little that it should not."""
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


def hurt(content: bytes) -> st.SearchStrategy[bytes]:
    """A real file with bits flipped, bytes replaced, cut out, doubled or moved, or cut short."""
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
    """(name, hurt content) of one of several real files, or bytes that never were one."""
    real = [st.tuples(st.just(name), hurt(content)) for name, content in contents.items()]
    return st.one_of(*real, st.tuples(st.sampled_from(sorted(contents)), also()))
