"""YAML from strangers: plain values only, in bounded memory and time."""

from __future__ import annotations

from typing import Any

import yaml

from dualmcmc.errors import first_line
from dualmcmc.words import plain

LONGEST = 1 << 18  # characters of a text; the settings that are printed have 10,000
LONGEST_NUMBER = 400  # characters of a number: 1:1:1:... takes minutes where it is long
DEEPEST = 16  # levels of nesting


class _Loader(yaml.SafeLoader):
    """YAML's plain values only, in a tree that is no larger than its text.

    An alias stands for what may be large, and aliases of aliases for what no memory holds; a key that is
    there twice would hide one of its values.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases (*name) are not allowed", event)
        self.depth += 1
        if self.depth > DEEPEST:
            raise _refused("it is nested too deeply", event)
        node = super().compose_node(parent, index)
        if node is not None and node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise _refused("a number is too long", node)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise _refused("a key is there twice", node)
        return mapping


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _refused(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """`place`: the node or event at fault."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def load(text: str) -> Any:
    """The plain values of a YAML text; a ValueError that says what is wrong and where for anything else."""
    if len(text) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST:,} characters")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(place + plain(problem or first_line(error), 200)) from None
    except Exception:  # PyYAML trips over tags that do not fit their value, such as !!int ""
        raise ValueError("a value is not what it says it is") from None
