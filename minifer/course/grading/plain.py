"""What an answer returned, as plain values: a subclass may lie about itself, its base does not.

An object whose `__eq__` always says yes, a `str` that compares equal to everything, a tensor with
a `detach` of its own: all of them would pass a test that asks them. So nobody asks them.
`type(value)` cannot be overridden, and a method of the base class, called on the value, reads what
is stored.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_EXACT = (NoneType, bool, int, float, complex, str, bytes)
_TENSORS = (Tensor, torch.nn.Parameter)


def plain(value: Any) -> Any:
    """The outermost layer of a value as an exact built-in type or `Tensor`.

    A namedtuple becomes a tuple, an OrderedDict a dict, a bool stays a bool; what is inside is
    left as it is. A range becomes a list, a Parameter a tensor. A subclass of Tensor and any other
    object are returned unchanged: they equal nothing plain.
    """
    kind = type(value)
    if kind in _EXACT or issubclass(kind, Enum):
        return value
    if kind in _TENSORS:
        return Tensor.detach(value)  # a new object: attributes set on the old one stay behind
    if issubclass(kind, int):
        return int.__add__(value, 0)
    if issubclass(kind, float):
        return float.__add__(value, 0.0)
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, (bytes, bytearray)):
        return bytes(memoryview(value))
    if issubclass(kind, list):
        return list.copy(value)
    if issubclass(kind, tuple):
        return tuple.__getitem__(value, slice(None))
    if issubclass(kind, dict):
        return dict.copy(value)
    if issubclass(kind, (set, frozenset)):
        return set().union(value)
    if kind is range:
        return list(value)
    return value


def fields_of(value: Any) -> dict[str, Any] | None:
    """A dataclass instance's fields by name, read past any `__getattribute__`; None for others."""
    kind = type(value)
    if not is_dataclass(kind):
        return None
    return {f.name: object.__getattribute__(value, f.name) for f in fields(kind)}


def array_as_tensor(value: Any) -> Tensor | None:
    """A numpy array of numbers as a tensor of its own memory; None for anything else."""
    if type(value) is not np.ndarray or value.dtype.kind not in "biuf":
        return None
    return torch.from_numpy(np.ascontiguousarray(value).copy())


def name_of(value: Any) -> str:
    """What kind of thing it is, in a learner's words."""
    kind = type(value)
    if kind is NoneType:
        return "None"
    if kind in _TENSORS:
        return "a tensor"
    if issubclass(kind, Tensor):
        return f"a subclass of Tensor ({kind.__name__})"
    if kind is np.ndarray:
        return "a numpy array"
    name = f"numpy.{kind.__name__}" if issubclass(kind, np.generic) else kind.__name__
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def short(value: Any, longest: int = 600) -> str:
    """The repr of a value, cut; never raises an ordinary error.

    Of a tensor that fills more than a few lines, shape and dtype: nobody finds a number in it.
    """
    if type(value) in _TENSORS and Tensor.numel(value) > 24:
        return f"a tensor of shape {list(value.shape)}, {value.dtype}"
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    if type(text) is not str:
        text = str.__str__(text)
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text)} characters)"
