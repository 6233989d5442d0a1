"""Functions a test relies on must be those that were there before the answer was loaded."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType
from typing import Any

_WATCHED = """
    torch torch.nn.functional torch.linalg torch.testing torch.random numpy numpy.testing math
    random operator itertools functools collections copy dataclasses json re statistics heapq
    bisect hashlib struct time os sys pytest
"""
_ALLOWED = {"torch.manual_seed"}  # torch replaces it itself when it first needs its compiler
_PACKAGES = ("minifer", "_pytest", "pluggy")


class Seal:
    """What modules and their classes hold, noted once. Only functions, classes and modules count:
    an engine may cache a number, nobody may replace a function."""

    def __init__(self, *more: ModuleType) -> None:
        self._modules = {
            name: sys.modules[name] for name in _WATCHED.split() if name in sys.modules
        }
        self._modules |= {
            name: module
            for name, module in sys.modules.items()
            if name.split(".")[0] in _PACKAGES
            and isinstance(module, ModuleType)
            and not name.startswith("_pytest.assertion")  # sets its own hooks for every test
        }
        owners: dict[str, Any] = {"builtins": builtins, **self._modules}
        owners |= {module.__name__: module for module in more}
        classes = {
            f"{name}.{key}": value
            for name, module in owners.items()
            for key, value in list(vars(module).items())
            if isinstance(value, type) and not _static(value) and value.__module__ == name
        }
        self._saved = [
            (name, vars(owner), {k: v for k, v in vars(owner).items() if _matters(v)})
            for name, owner in (owners | classes).items()
        ]
        self._classes = [(name, kind, set(vars(kind))) for name, kind in classes.items()]

    def broken(self) -> str:
        """What was replaced, "" when nothing was."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"the module {name} was replaced"
        for name, now, then in self._saved:
            for key, value in then.items():
                if now.get(key) is not value and f"{name}.{key}" not in _ALLOWED:
                    return f"{name}.{key} was replaced"
        for name, kind, keys in self._classes:
            if len(vars(kind)) != len(keys):
                for key in vars(kind).keys() - keys:
                    if any(key in vars(base) for base in kind.__mro__[1:]):
                        return f"{name}.{key} was replaced"
        return ""


def _matters(value: Any) -> bool:
    return callable(value) or isinstance(value, (ModuleType, property, classmethod, staticmethod))


def _static(kind: type) -> bool:
    """Whether the class is written in C and cannot be changed."""
    return not kind.__flags__ & (1 << 9)  # Py_TPFLAGS_HEAPTYPE
