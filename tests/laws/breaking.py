"""How a law is proved to have teeth: each breaker replaces one function by a wrong one, and the law's check must then fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Breaker:
    """target: "package.module:attribute.path" to replace. check: the law's test, without arguments."""

    law: int
    name: str
    target: str
    replacement: Any
    check: Callable[[], None]

    def place(self) -> tuple[Any, str]:
        """The object that holds the target, and the attribute's name in it."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        holder: Any = importlib.import_module(module)
        for parent in parents:
            holder = getattr(holder, parent)
        return holder, name
