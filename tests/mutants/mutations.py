"""Which faults are made: each is one change to one expression or statement, found by a walk over the syntax tree.

Not changed, since no wrong number can come of it: docstrings, annotations and other types, asserts, the texts of errors,
all other strings (names of modes, columns and metrics: a wrong one is an unknown name), `strict` of a zip, which is an
assert, and devices, which are all one on a CPU.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType

SAME_SHAPE = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "sum": "mean",
    "mean": "sum",
    "row_sum": "row_mean",
    "row_mean": "row_sum",
    "lowest": "highest",
    "highest": "lowest",
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "zeros": "ones",
    "ones": "zeros",
    "row_max": "row_sum",
    "new_zeros": "new_ones",
}
"""Functions and methods that are taken for one another."""
DROPPED = {"detach", "clamp", "abs", "double", "float", "exp", "log", "sqrt", "flip", "to", "bool"}
"""Methods whose call is replaced by the object that they are called on."""
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
TYPES = {"Literal", "Callable", "Mapping", "dict", "list", "tuple", "frozenset", "TypeVar", "NamedTuple"}
KEPT_ORDER = {"isinstance", "getattr", "zip", "min", "max", "minimum", "maximum", "logaddexp", "promote_types", "fullmatch"}
"""Calls whose arguments are not swapped: nothing but a TypeError comes of it, or nothing at all."""
LONGEST = 150


@dataclass(frozen=True)
class Mutant:
    """function: "" at module level. line: the statement. change: what becomes what. A key names one even when lines move."""

    module: str
    function: str
    line: str
    change: str
    lines: range
    place: tuple[ast.AST, str, int | None] = field(compare=False, repr=False)
    new: ast.AST = field(compare=False, repr=False)

    @property
    def key(self) -> tuple[str, str, str]:
        return f"{self.module}.{self.function}".rstrip("."), self.line, self.change

    @property
    def places(self) -> set[tuple[str, int]]:
        """(module, line) of each of its lines."""
        return {(self.module, line) for line in self.lines}

    def __str__(self) -> str:
        where, line, change = self.key
        return f"{where}: {change}    in: {line}"


class Source:
    """A module's syntax tree and its mutants."""

    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        seen: Counter[tuple[str, str, str]] = Counter()
        self.mutants: list[Mutant] = []
        for mutant in _Walk(module).of(self.tree):
            seen[mutant.key] += 1
            nth = seen[mutant.key]
            self.mutants.append(mutant if nth == 1 else replace(mutant, change=f"{mutant.change} (number {nth})"))

    def code(self, mutant: Mutant) -> CodeType:
        """The module's code with this one fault."""
        parent, name, index = mutant.place
        old = getattr(parent, name) if index is None else getattr(parent, name)[index]
        self._put(mutant, mutant.new)
        try:
            return compile(ast.fix_missing_locations(self.tree), str(self.path), "exec", dont_inherit=True)
        finally:
            self._put(mutant, old)

    @staticmethod
    def _put(mutant: Mutant, node: object) -> None:
        parent, name, index = mutant.place
        if index is None:
            setattr(parent, name, node)
        else:
            getattr(parent, name)[index] = node


@dataclass(frozen=True)
class _Walk:
    """Where the walk is: module, function, the statement's lines and the widest expression around that is still short."""

    module: str
    function: str = ""
    line: str = ""
    lines: range = range(0)

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        for name, value in ast.iter_fields(node):
            if _is_skipped(node, name):
                continue
            children = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, child in children:
                if isinstance(child, ast.AST) and not _is_skipped_argument(node, name, index):
                    here = self._at(child)
                    for new, change in _changes(child, node, name):
                        yield Mutant(self.module, here.function, here.line, change, here.lines, (node, name, index), new)
                    yield from here.of(child)

    def _at(self, node: ast.AST) -> _Walk:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{self.function}.{node.name}".lstrip(".")
            return replace(self, function=function, line=f"def {node.name}", lines=range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.If | ast.While | ast.For | ast.Match):
            header = {ast.If: "test", ast.While: "test", ast.For: "iter", ast.Match: "subject"}[type(node)]
            value: ast.expr = getattr(node, header)
            text = f"{type(node).__name__.lower()} {ast.unparse(value)}"
            return replace(self, line=text, lines=range(node.lineno, (value.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.stmt):
            found = replace(self, line=_short(node), lines=range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if isinstance(node, ast.Try):
                return replace(found, line="try", lines=range(node.lineno, node.lineno + 1))
            return found
        if isinstance(node, ast.Call) and any(each.arg == "name" for each in node.keywords):
            (name,) = (each.value for each in node.keywords if each.arg == "name")
            return replace(self, function=ast.unparse(name).strip("'"), line="")
        if not self.line and isinstance(node, ast.expr | ast.keyword):
            return replace(self, line=_short(node))
        return self


def _short(node: ast.AST) -> str:
    """On one line; "" where that is too long to name anything."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= LONGEST else ""


def _is_skipped(node: ast.AST, name: str) -> bool:
    if name in ("annotation", "returns", "decorator_list", "ctx", "ops", "op", "pattern", "func", "posonlyargs", "vararg", "kwarg"):
        return name != "func" or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id in TYPES
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _is_skipped_argument(node: ast.AST, name: str, index: int | None) -> bool:
    """The complaint of a check, the type of a cast, a device, an assert of a zip."""
    if isinstance(node, ast.keyword) and node.arg in ("device", "strict"):
        return True
    if not isinstance(node, ast.Call) or name != "args":
        return False
    called = _called(node)
    return (called == "check" and index == 1) or (called == "cast" and index == 0) or called == "TypeVar"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def _changes(node: ast.AST, parent: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """What stands instead of this node, one after another, and the change in words."""
    if isinstance(node, ast.FunctionDef):
        return
    if isinstance(node, ast.stmt):
        if _is_deletable(node):
            yield ast.copy_location(ast.Pass(), node), "dropped"
        if isinstance(node, ast.Continue):
            yield ast.copy_location(ast.Break(), node), "continue -> break"
        if isinstance(node, ast.AugAssign) and (other := OPERATORS.get(type(node.op))):
            yield _with(node, op=other()), f"{ast.unparse(node)} -> {ast.unparse(_with(node, op=other()))}"
        return
    if isinstance(node, ast.arguments):
        return
    for new, without in _instead(node, parent, name):
        new = ast.copy_location(new, node)
        where = f"{parent.arg}=" if isinstance(parent, ast.keyword) else ""
        if isinstance(parent, ast.arguments):
            where = f"{_parameter(parent, node)}="
        yield new, f"{where}{_brief(node)} {without}" if without else f"{where}{_brief(node)} -> {where}{_brief(new)}"


def _parameter(arguments: ast.arguments, default: ast.AST) -> str:
    keyword = {id(value): arg.arg for arg, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value}
    last = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    return {**keyword, **{id(value): arg.arg for arg, value in zip(last, arguments.defaults, strict=True)}}[id(default)]


def _brief(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def _is_deletable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Subscript)
    return isinstance(node, ast.AugAssign | ast.Raise)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _instead(node: ast.AST, parent: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """New nodes; where one lacks a part of the old, which ("without ...")."""
    if name in ("test", "ifs") and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp) and isinstance(node, ast.expr):
        yield ast.UnaryOp(ast.Not(), node), ""
    match node:
        case ast.Constant(bool() as value):
            yield ast.Constant(not value), ""
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1), ""
        case ast.Constant(float() as value):
            yield ast.Constant(2 * value if value else 1.0), ""
        case ast.Constant("amin" | "amax" as value):
            yield ast.Constant(SAME_SHAPE[value]), ""
        case ast.Attribute(ast.Name("torch"), "inf"):
            yield ast.UnaryOp(ast.USub(), node), ""
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand, ""
        case ast.BinOp(left, op, right):
            if other := OPERATORS.get(type(op)):
                yield _with(node, op=other()), ""
            if isinstance(op, ast.Sub | ast.Div) and not _is_even(parent):
                yield _with(node, left=right, right=left), ""
        case ast.BoolOp(op, _):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And()), ""
        case ast.Compare(_, ops, _):
            for i, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:i], other(), *ops[i + 1 :]]), ""
        case ast.Dict(keys, values):
            for i in range(len(keys)):
                yield ast.Dict(keys[:i] + keys[i + 1 :], values[:i] + values[i + 1 :]), f"without {_brief(keys[i] or values[i])}"
        case ast.Call():
            yield from _calls(node)
        case _:
            pass


def _is_even(parent: ast.AST) -> bool:
    """A square or an absolute value: the sign of what is in it makes no difference."""
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.Pow) and isinstance(parent.right, ast.Constant) and parent.right.value == 2
    return isinstance(parent, ast.Attribute) and parent.attr == "abs"


def _calls(call: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    called, arguments = _called(call), call.args
    if called in ("check", "cast", "TypeVar", "ParamSpec"):
        return
    if other := SAME_SHAPE.get(called):
        func = _with(call.func, attr=other) if isinstance(call.func, ast.Attribute) else ast.Name(other, ast.Load())
        if isinstance(call.func, ast.Attribute) or called not in ("sum", "mean"):
            yield ast.Call(func, arguments, call.keywords), ""
    if isinstance(call.func, ast.Attribute) and called in DROPPED and "device" not in ast.unparse(call):
        yield call.func.value, ""
    if called == "keep":
        yield arguments[0], ""
    if called not in KEPT_ORDER:
        for i in range(len(arguments) - 1):
            one, other = arguments[i : i + 2]
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred) and ast.dump(one) != ast.dump(other):
                yield ast.Call(call.func, [*arguments[:i], arguments[i + 1], arguments[i], *arguments[i + 2 :]], call.keywords), ""
    for i, keyword in enumerate(call.keywords):
        if keyword.arg not in (None, "device", "strict"):
            yield ast.Call(call.func, arguments, call.keywords[:i] + call.keywords[i + 1 :]), f"without {keyword.arg}"
