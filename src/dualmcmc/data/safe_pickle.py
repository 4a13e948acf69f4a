"""Read pickles without executing them: CIFAR's batches are pickles, and a pickle is a program.

Only integer arrays, lists, tuples, dicts, strings and numbers are read; anything else is refused before it is called.
NumPy's unpickling is not used: arrays are built here from a type, a shape and raw bytes, which must match.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from dualmcmc.utils.errors import UserError, first_line, sanitize

DTYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
MAX_DEPTH = 8  # of nested containers


class _Refused(Exception):
    """The pickle contains something other than plain data."""


class _Dtype:
    """Stands in for numpy.dtype: a name from DTYPES and a byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        name = name.decode("latin1") if isinstance(name, bytes) else name
        if name not in DTYPES:
            raise _Refused(f"an array of type {str(name)[:20]!r}")
        self.name, self.order = name, "<"

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise _Refused("an array of unknown byte order")
        self.order = order


class _Array:
    """Stands in for numpy.ndarray."""

    value: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        content = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise _Refused("an array of objects")
        if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
            raise _Refused("an array without a valid shape")
        numpy_dtype = np.dtype(dtype.order + dtype.name)
        if len(content) != math.prod(shape) * numpy_dtype.itemsize:
            raise _Refused("an array whose size does not match its shape")
        self.value = np.frombuffer(content, numpy_dtype).reshape(shape, order="F" if fortran else "C")


# Opcodes that build plain data. Not included: class instances, extensions, persistent ids, byte arrays, buffers.
_OPCODES = """
    PROTO FRAME MARK STOP POP POP_MARK DUP PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD
"""


class _Dispatch(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise _Refused(f"opcode {code}")


_build: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]


class _Unpickler(pickle._Unpickler):  # the Python implementation, whose opcodes can be restricted
    dispatch = _Dispatch(
        {code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES.split())}
    )

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], (_Array, _Dtype)):  # type: ignore[attr-defined]
            raise _Refused("a change to something that is not an array")
        _build(self)

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        # Created for each lookup, so that no pickle can modify what the next one gets.
        def reconstruct(cls: Any, shape: Any, code: Any) -> _Array:
            if not (isinstance(cls, type) and issubclass(cls, _Array)):
                raise _Refused("an object that is not an array")
            return cls()

        def encode(text: Any, encoding: Any) -> bytes:
            if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
                raise _Refused("an unknown encoding")
            return text.encode("latin1")

        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
            ("numpy", "ndarray"): type("Array", (_Array,), {}),
            ("numpy", "dtype"): type("Dtype", (_Dtype,), {}),
            ("_codecs", "encode"): encode,
        }
        if (module, name) not in known:
            raise _Refused(f"{module}.{name}")
        return known[module, name]


def read(content: bytes, where: str) -> Any:
    """The plain data of a pickle, with bytes for the strings of Python 2; raises `UserError` for anything else."""
    try:
        return _unwrap(_Unpickler(io.BytesIO(content), encoding="bytes").load(), 0, {})
    except _Refused as error:
        found = sanitize(str(error))
        raise UserError(f"'{where}' is refused: it contains {found}, expected only arrays and text.") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None


def _unwrap(value: Any, depth: int, done: dict[int, Any]) -> Any:
    """Replace the stand-ins by arrays; refuse anything but plain data. Shared objects are visited once."""
    if depth > MAX_DEPTH:
        raise _Refused("data nested too deeply")
    if id(value) in done:
        return done[id(value)]
    result: Any = value
    if isinstance(value, _Array):
        result = value.value
    elif isinstance(value, dict):
        result = {_unwrap(key, depth + 1, done): _unwrap(item, depth + 1, done) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        result = type(value)(_unwrap(item, depth + 1, done) for item in value)
    elif value is not None and not isinstance(value, (str, bytes, bool, int, float)):
        raise _Refused(f"an object of type {type(value).__name__}")
    done[id(value)] = result
    return result
