"""Presets, YAML files and KEY=VALUE overrides to a `Config`, and back to commented YAML.

An unknown key, a wrong type or a value out of range raises a `UserError` that says where it is.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from dualmcmc.config import Config, InvalidSetting, tuple_kinds
from dualmcmc.utils import safe_yaml
from dualmcmc.utils.errors import UserError, first_line, format_value, nearest, sanitize

T = TypeVar("T")
MAX_TEXT = 4096  # characters of one setting, as of a path

# settings renamed since a run may have stored them
RENAMED = {
    "guard": {
        "energy_gap": "max_energy_gap",
        "x_moved": "max_x_displacement",
        "z_moved": "max_z_displacement",
        "rollbacks": "max_rollbacks",
        "lower": "backoff",
    }
}


def from_tree(tree: Any, where: str = "the settings") -> Config:
    """A `Config` from a nested dict; raises `UserError` for unknown keys and invalid values."""
    return _build(Config(), tree, "", where)


def load_stored_config(path: Path) -> Config:
    """The config.yaml of a run folder, also of an earlier version of dualmcmc."""
    where = f"'{sanitize(str(path))}'"
    return from_stored_tree(parse_yaml(_read(str(path)), where), where)


def from_stored_tree(tree: Any, where: str) -> Config:
    """A `Config` as a run stored it, also by an earlier version of dualmcmc."""
    if isinstance(tree, dict):
        tree = dict(tree)
        for group, names in RENAMED.items():
            if isinstance(tree.get(group), dict):
                tree[group] = {names.get(key, key): value for key, value in tree[group].items()}
    return from_tree(tree, where)


def to_tree(config: Any) -> dict[str, Any]:
    """The settings as a nested dict of plain values."""
    tree = dataclasses.asdict(config)
    return typing.cast(dict[str, Any], _plain(tree))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def setting_names(cls: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every setting's dotted key."""
    hints = typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from setting_names(hints[entry.name], f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


def flatten(config: Config) -> dict[str, Any]:
    """Every setting's value by its dotted key."""
    return {key: operator.attrgetter(key)(config) for key in setting_names()}


def _build(default: T, tree: Any, prefix: str, where: str) -> T:
    """`default` with the changes in `tree`."""
    if not isinstance(tree, dict):
        raise UserError(
            f"{where}: {prefix.rstrip('.') or 'the file'} must contain key: value pairs, not {format_value(tree)}."
        )
    hints = typing.get_type_hints(type(default))
    known = {entry.name: entry for entry in dataclasses.fields(default)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{sanitize(str(key))}" if isinstance(key, str) else f"{prefix}{format_value(key)}"
        if not isinstance(key, str) or key not in known:
            names = [*setting_names(), *(f"{prefix}{name}" for name in known)]
            raise UserError(f"{where}: unknown setting '{path}'.{nearest(path, names)}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(getattr(default, key), value, f"{path}.", where)
        else:
            values[key] = _convert(hints[key], value, path, where)
    try:
        return dataclasses.replace(default, **values)  # type: ignore[type-var]
    except InvalidSetting as error:
        raise UserError(f"{where}: {prefix}{error.name} {error.problem}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _convert(kind: Any, value: Any, path: str, where: str) -> Any:
    """`value` as the declared type."""
    options = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else _convert(options[0], value, path, where)
    origin = typing.get_origin(kind)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in options):
            return value
        hint = nearest(
            format_value(value).strip("'").lower(), [option for option in options if isinstance(option, str)]
        )
        raise UserError(f"{where}: {path} must be {_alternatives(options)}, not {format_value(value)}.{hint}")
    if origin is tuple:
        if Ellipsis in options and isinstance(value, str):  # one name without brackets
            value = [value]
        kinds = tuple_kinds(kind, value)
        if isinstance(value, (list, tuple)) and len(value) == len(kinds):
            return tuple(_convert(k, v, path, where) for k, v in zip(kinds, value, strict=True))
        if Ellipsis in options:
            names = typing.get_args(options[0])
            expected = f"a list of {_alternatives(names) if names else 'integers'}"
        else:
            expected = f"a list of {len(options)} numbers"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        expected = "true or false"
    elif kind is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return _text(value, path, where)
        expected = "text"
    else:
        number = _number(value)
        if number is not None and (kind is float or number == int(number)):
            return kind(value) if isinstance(value, int) else kind(number)
        expected = "an integer" if kind is int else "a number"
    raise UserError(f"{where}: {path} must be {expected}, not {format_value(value)}.")


def _alternatives(options: Sequence[Any]) -> str:
    """Such as "simple, resnet or style"."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}"


def _text(value: str | int | float, path: str, where: str) -> str:
    """Text that can be a path and be printed."""
    try:
        text = str(value)
    except ValueError:  # an integer with more digits than Python prints
        raise UserError(f"{where}: {path} must be text, not {format_value(value)}.") from None
    if len(text) > MAX_TEXT or "\0" in text:
        raise UserError(f"{where}: {path} must be text of at most {MAX_TEXT:,} characters without NUL.")
    return text


def _number(value: Any) -> float | None:
    """A finite number (YAML reads 1e6 as text), or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def preset_names() -> list[str]:
    """The names of all presets, the default first."""
    folder = resources.files("dualmcmc") / "presets"
    names = sorted(item.name[: -len(".yaml")] for item in folder.iterdir() if item.name.endswith(".yaml"))
    return sorted(names, key=lambda name: name != "digits")


def load_config(preset: str = "digits", overrides: Sequence[str] = ()) -> Config:
    """The settings of a preset or a YAML file, with KEY=VALUE overrides."""
    tree = {"preset": Path(preset).stem} | _preset_tree(preset)
    changed = _with_own_description(apply_overrides(tree, overrides), tree, Path(preset).stem)
    return from_tree(changed, f"'{sanitize(preset)}'")


def _with_own_description(tree: dict[str, Any], base: dict[str, Any], name: str) -> dict[str, Any]:
    """`tree` without the description of the settings `base`, called `name`, if its images are others."""
    data, base_data = tree.get("data"), base.get("data")
    if not isinstance(data, dict) or not isinstance(base_data, dict) or data.get("source") == base_data.get("source"):
        return tree
    if tree.get("description") != base.get("description"):
        return tree
    place = data.get("path") if data.get("source") == "folder" else None
    return tree | {"description": f"{name} on other images: {Path(str(place)).name if place else data.get('source')}"}


def _preset_tree(preset: str) -> dict[str, Any]:
    if preset.lower().endswith((".yaml", ".yml")):
        text = _read(preset)
    elif preset in preset_names():
        text = (resources.files("dualmcmc") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
    else:
        word = sanitize(preset)
        raise UserError(f"unknown preset '{word}'.{nearest(word, preset_names())} 'dualmcmc presets' lists them.")
    tree = parse_yaml(text, f"'{sanitize(preset)}'")
    base = tree.pop("extends", None)  # a variant contains only its changes
    if base is None:
        return tree
    if base not in preset_names() or base == preset:
        hint = nearest(sanitize(base), preset_names()) if isinstance(base, str) else ""
        raise UserError(f"'{sanitize(preset)}' extends {format_value(base)}, which is not a preset.{hint}")
    parent = _preset_tree(base)
    return _with_own_description(_merge(parent, tree), parent, base)


def _read(path: str) -> str:
    """The text of a config file."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would block, a device would never end
            raise UserError(f"cannot read config file '{sanitize(path)}': it is not a regular file.")
        with open(path, encoding="utf-8") as file:
            text = file.read(safe_yaml.MAX_LENGTH + 1)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in its name
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"cannot read config file '{sanitize(path)}': {reason}.") from None
    return text


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping."""
    try:
        tree = safe_yaml.load(text)
    except ValueError as error:
        raise UserError(f"{where} is not valid YAML: {error}.") from None
    if tree is None:
        raise UserError(f"{where} is empty.")
    if not isinstance(tree, dict):
        raise UserError(f"{where} must contain key: value pairs.")
    return tree


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree` with dotted KEY=VALUE overrides applied."""
    known = set(setting_names())
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise UserError(f"'{sanitize(text)}' is not a setting: write KEY=VALUE, for example train.batch=64.")
        if key not in known:
            inside = sorted(name for name in known if name.startswith(key + "."))
            hint = f" It is a group with {', '.join(inside)}." if inside else nearest(sanitize(key), sorted(known))
            raise UserError(f"unknown setting '{sanitize(key)}'.{hint}")
        if not raw.strip():
            raise UserError(f"{key}= has no value: write {key}=VALUE, or {key}=null for a setting that can be off.")
        value: Any = _text_or_none(raw) if _is_text(key) else _parse_value(raw, text)
        for part in reversed(key.split(".")):
            value = {part: value}
        tree = _merge(tree, value)
    return tree


def _is_text(key: str) -> bool:
    """Whether a setting is text, such as a path, and must not be parsed as YAML."""
    kind: Any = Config
    for part in key.split("."):
        kind = typing.get_type_hints(kind)[part]
    return kind is str or typing.get_args(kind)[:1] == (str,)


def _text_or_none(raw: str) -> str | None:
    return None if raw == "null" else raw


def _parse_value(raw: str, text: str) -> Any:
    try:
        return safe_yaml.load(raw)
    except ValueError:
        raise UserError(f"invalid value in '{sanitize(text)}'.") from None


def render(config: Config) -> str:
    """The whole tree as YAML with a comment per setting; `from_tree` reads it back."""
    lines: list[tuple[str, str]] = []

    def walk(node: Any, indent: str) -> None:
        for entry in dataclasses.fields(node):
            value = getattr(node, entry.name)
            doc = entry.metadata["doc"].strip().splitlines()[0]
            if dataclasses.is_dataclass(value):
                if not indent:
                    lines.append(("", ""))
                lines.append((f"{indent}{entry.name}:", doc))
                walk(value, indent + "  ")
            else:
                lines.append((f"{indent}{entry.name}: {_scalar(value)}", doc))

    walk(config, "")
    width = min(48, max(len(left) for left, _ in lines if "description" not in left))
    return "\n".join(f"{left:<{width}}  # {doc}" if doc else left for left, doc in lines) + "\n"


def _scalar(value: Any) -> str:
    # Always on one line: text with line breaks is quoted, so that none of it can look like a setting.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    plain = not isinstance(value, str) or value.isprintable()  # otherwise escaped, such as marks that reverse text
    endless = 1 << 30  # columns
    text = yaml.safe_dump(
        _plain(value), default_flow_style=True, default_style=style, width=endless, allow_unicode=plain
    )
    return text.removesuffix("...\n").strip()
