"""Untrusted YAML: plain values only, in bounded memory and time."""

from __future__ import annotations

from typing import Any

import yaml

from dualmcmc.utils.errors import first_line, sanitize

MAX_LENGTH = 1 << 18  # characters; a printed config has 10,000
MAX_NUMBER_LENGTH = 400  # characters; a long 1:1:1:... would take minutes
MAX_DEPTH = 16


class _Loader(yaml.SafeLoader):
    """Plain values only, in a tree no larger than its text.

    Aliases could expand beyond any memory, and a duplicate key would hide a value: both are refused.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases (*name) are not allowed", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refused("nested too deeply", event)
        node = super().compose_node(parent, index)
        if node is not None and node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_LENGTH:
            raise _refused("a number is too long", node)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise _refused("duplicate key", node)
        return mapping


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _refused(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """`place`: the offending node or event."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def load(text: str) -> Any:
    """Parse YAML; raises ValueError with the line number for anything but plain values."""
    if len(text) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH:,} characters")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(place + sanitize(problem or first_line(error), 200)) from None
    except Exception:  # PyYAML fails on tags that do not fit their value, such as !!int ""
        raise ValueError("a value does not match its tag") from None
