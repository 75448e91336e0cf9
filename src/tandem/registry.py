"""From a name in a recipe to an object: a short name of a table, "package.module:attr" or "path/file.py:attr".

It holds no table: each kind of component has its own, of short names to "package.module:attr", so that naming a
component imports that one and no other. What a missing package is part of is read from the distribution's own extras.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import ModuleType

from tandem.errors import RegistryError

_OF_EVERYTHING = ("all", "test", "check")
_DISTRIBUTION = "tandem-rl"
# What top-level code of a module raises when something in it is wrong; the module is the user's as often as ours.
_IMPORT_FAILURES = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, OSError)


def resolve(name: str, table: Mapping[str, str], *, kind: str = "component") -> object:
    """The object that `name` stands for; `kind` is what messages call it.

    Raises RegistryError when there is no such name, file, module or attribute (with the nearest one that exists), and when
    its module cannot be imported (with the extra that brings a missing package).
    """
    if ":" not in name and name not in table:
        if name.endswith(".py"):
            raise RegistryError(f"{kind} {name!r} is a file, and not what is in it: write '{name}:NAME'")
        near = sorted(
            difflib.get_close_matches(name, table), key=lambda each: sorted(each) != sorted(name)
        )  # letters that swapped first
        advice = f"; did you mean {near[0]!r}?" if near else "."
        known = ", ".join(sorted(table)) or "none"
        form = "'package.module:attr' or 'path/file.py:attr'"
        raise RegistryError(f"unknown {kind} {name!r}{advice} Known: {known}; your own is written {form}")
    target = table.get(name, name)
    place, _, path = target.rpartition(":")
    if not place or not path:
        raise RegistryError(f"{kind} {name!r} is not of the form 'package.module:attr' or 'path/file.py:attr'")
    found: object = _load(place, name, kind)
    for part in path.split("."):
        if not hasattr(found, part):
            public = [attribute for attribute in vars(found) if not attribute.startswith("_")]
            near = difflib.get_close_matches(part, public, n=1)
            advice = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(public) or 'nothing public'}"
            raise RegistryError(f"{kind} {name!r}: {place} has no attribute {part!r}{advice}")
        found = getattr(found, part)
    return found


def _load(place: str, name: str, kind: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise RegistryError(f"{kind} {name!r}: there is no file {place} (looked in {Path.cwd()})")
    try:
        return _import_file(Path(place)) if is_file else importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if not is_file and (place == missing or place.startswith(f"{missing}.")):
            beside = Path(*place.split(".")).with_suffix(".py")
            advice = f"{beside} is a file: write '{beside}:...'" if beside.is_file() else "is it installed in this environment?"
            raise RegistryError(f"{kind} {name!r}: there is no module {missing!r}; {advice}") from error
        raise RegistryError(
            f"{kind} {name!r} needs the package {missing!r}, which is not installed: {_install(missing)}"
        ) from error
    except _IMPORT_FAILURES as error:
        raise RegistryError(f"{kind} {name!r}: importing {place} failed: {_cause(error)}") from error


def _import_file(path: Path) -> ModuleType:
    """Imports a file once per process, under a name made from its full path, so that what it defines can be pickled."""
    full = path.resolve()
    alias = f"tandem_file_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:12]}"
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, full)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with ExitStack() as undo:
        undo.callback(sys.modules.pop, alias)
        sys.modules[alias] = module
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


def _cause(error: BaseException) -> str:
    """Type, message and, for a syntax error, the line."""
    where = f" ({error.filename}:{error.lineno})" if isinstance(error, SyntaxError) else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}{where}"


def extras() -> dict[str, tuple[str, ...]]:
    """The packages of each extra of this distribution, those that bring all of them left out; {} where it is not installed."""
    try:
        requirements = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for requirement in requirements:
        package, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"]([\w.-]+)['\"]", requirement)
        if package and extra and extra[1] not in _OF_EVERYTHING:
            found[extra[1]] = (*found.get(extra[1], ()), package[0])
    return found


def _install(module: str) -> str:
    """The command that brings a missing module: the extra of this distribution that requires it, if one does."""
    wanted = _normal(module.partition(".")[0])
    for extra, packages in extras().items():
        if wanted in map(_normal, packages):
            return f"pip install '{_DISTRIBUTION}[{extra}]'"
    return f"install the package that provides {module!r}"


def _normal(name: str) -> str:
    """Alike for a distribution and its module: TransferQueue, transfer_queue."""
    return re.sub(r"[-_.]+", "", name).lower()
