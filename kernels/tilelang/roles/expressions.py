"""Expressions of TIR as Python source: what is known when steps are recorded, and what is computed when they are executed.

Loop variables, parameters, thread indices and local variables are known at recording; a variable of a parallel loop is an array
along an axis of its own. What depends on the contents of a buffer becomes the body of a function of the Memory, in which every
part that is known already is bound as a default argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attnfuzz.kernels.contract import BuildError
from attnfuzz.kernels.support.absent import Absent

try:
    import tilelang  # noqa: F401  (makes its own tvm importable)
    from tvm import tirx
except ImportError:
    tirx = Absent("tilelang")

__all__ = ["FUNCTIONS", "Expressions", "UnsupportedByRolesError", "name_of"]

FUNCTIONS = {
    **{name: f"np.{name}" for name in ("ceil", "cos", "exp", "exp2", "floor", "log", "log10", "log1p", "log2", "sin", "sinh")},
    **{name: f"np.{name}" for name in ("copysign", "cosh", "hypot", "isnan", "sqrt", "tan", "tanh", "trunc")},
    "acos": "np.arccos",
    "asin": "np.arcsin",
    "atan": "np.arctan",
    "fabs": "np.abs",
    "nearbyint": "np.rint",
    "rsqrt": "_rsqrt",
    "sigmoid": "_sigmoid",
    "pow": "np.power",
}
"""Functions of the op "tirx.NAME"."""
_OPERATORS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "shift_left": "<<", "shift_right": ">>"}
_ARITHMETIC = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%"}
_COMPARISONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
_HALVES = ("float16", "bfloat16")


class UnsupportedByRolesError(BuildError):
    """Error for a PrimFunc with something that the executor of roles does not know."""


def name_of(call: Any) -> str:
    """The op of a call, such as "tl.tileop.copy"."""
    return str(getattr(call.op, "name", call.op))


class Expressions:
    """Source text of expressions; `names` and `buffers` are filled by the translation of statements."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.axes: set[Any] = set()
        """Variables of parallel loops."""
        self.threads: set[Any] = set()
        """Variables bound to thread indices."""
        self.variables: dict[Any, str] = {}
        """Local variables known at recording, by their buffer's data."""
        self.slots: dict[Any, int] = {}
        """Other buffers, by their data."""
        self.constants: list[tuple[str, float, str]] = []
        self.rank = 0
        self._bound: list[str] | None = None

    # what an expression depends on

    def depends(self, expression: Any, test: Callable[[Any], bool]) -> bool:
        """Whether a node of `expression` passes `test`."""
        return any(test(each) for each in _nodes(expression))

    def on_contents(self, expression: Any) -> bool:
        """Whether the value is unknown until steps are executed."""
        return self.depends(expression, self._is_content)

    def on_threads(self, expression: Any) -> bool:
        """Whether it differs among threads."""
        return self.depends(
            expression, lambda each: each in self.threads if isinstance(each, tirx.Var) else _is_call(each, "tl.tl_shuffle_elect")
        )

    def on_axes(self, expression: Any) -> bool:
        """Whether it differs within a parallel loop."""
        return self.depends(expression, lambda each: isinstance(each, tirx.Var) and each in self.axes)

    def _is_content(self, node: Any) -> bool:
        if not isinstance(node, tirx.BufferLoad) or node.buffer.data in self.variables:
            return False
        # lengths of sequences, and tables of pages, are read by every role as it runs
        index = node.buffer.scope() == "global" and str(node.buffer.dtype) in ("int32", "int64")
        return not (index and not any(self.on_axes(each) for each in node.indices))

    def _is_array(self, expression: Any) -> bool:
        return self.on_axes(expression) or self.on_threads(expression) or self.on_contents(expression)

    # source text

    def function(self, expression: Any) -> str:
        """A function of the Memory that computes `expression`."""
        outer, self._bound = self._bound, []
        body = self._within(expression)
        arguments = "".join(f", {each}" for each in self._bound)
        self._bound = outer
        return f"(lambda M{arguments}: {body})"

    def recorded(self, expression: Any) -> str:
        """An expression of what is known at recording.

        Raises:
            UnsupportedByRolesError: it depends on the contents of a buffer.
        """
        if self.on_contents(expression):
            raise UnsupportedByRolesError(
                f"{expression}: control flow or an index depends on the contents of a buffer; the executor of roles takes what "
                "depends on parameters, loops and local variables"
            )
        return self._text(expression, self.recorded)

    def _bind(self, source: str) -> str:
        assert self._bound is not None
        name = f"c{len(self._bound)}"
        self._bound.append(f"{name}={source}")
        return name

    def _within(self, expression: Any) -> str:
        if isinstance(expression, tirx.IntImm | tirx.FloatImm):
            return self._text(expression, self._within)
        if not self.on_contents(expression):
            return self._bind(self.recorded(expression))
        return self._text(expression, self._within)

    def _text(self, e: Any, part: Callable[[Any], str]) -> str:
        kind, dtype = type(e).__name__, str(e.dtype)
        if kind == "Var":
            return self._variable(e)
        if kind == "IntImm":
            return repr(bool(e.value)) if dtype == "bool" else repr(int(e.value))
        if kind == "FloatImm":
            return self._constant(float(e.value), dtype)
        if kind in _ARITHMETIC:
            return self._rounded(f"({part(e.a)} {_ARITHMETIC[kind]} {part(e.b)})", dtype)
        if kind in _COMPARISONS:
            return f"({part(e.a)} {_COMPARISONS[kind]} {part(e.b)})"
        if kind in ("Min", "Max"):
            return self._extreme(e, kind.lower(), part)
        if kind in ("Div", "Mod"):
            return self._quotient(e, kind, part)
        if kind in ("And", "Or", "Not"):
            return self._logical(e, kind, part)
        if kind == "Select":
            return self._either(e.condition, e.true_value, e.false_value, part)
        if kind == "Cast":
            return self._cast(e, part)
        if kind == "BufferLoad":
            return self._load(e)
        if kind == "Call":
            return self._call(e, part)
        raise UnsupportedByRolesError(f"{kind}: the executor of roles does not know this expression")

    def _variable(self, var: Any) -> str:
        if var not in self.names:
            raise UnsupportedByRolesError(f"{var}: this variable is bound by nothing that the executor of roles knows")
        return self.names[var]

    def _constant(self, value: float, dtype: str) -> str:
        name = f"K{len(self.constants)}"
        self.constants.append((name, value, dtype))
        return name

    def _rounded(self, text: str, dtype: str) -> str:
        return f"rounded({text}, {dtype!r})" if dtype in _HALVES else text

    def _extreme(self, e: Any, which: str, part: Callable[[Any], str]) -> str:
        if str(e.dtype).startswith("float"):
            return f"np.f{which}({part(e.a)}, {part(e.b)})"
        name = f"np.{which}imum" if self._is_array(e) else which
        return f"{name}({part(e.a)}, {part(e.b)})"

    def _quotient(self, e: Any, kind: str, part: Callable[[Any], str]) -> str:
        if "float" in str(e.dtype):
            if kind == "Mod":
                raise UnsupportedByRolesError(f"{e}: the executor of roles knows no remainder of floats")
            return self._rounded(f"np.divide({part(e.a)}, {part(e.b)})", str(e.dtype))
        return f"{'_towards_zero' if kind == 'Div' else '_remainder'}({part(e.a)}, {part(e.b)})"

    def _logical(self, e: Any, kind: str, part: Callable[[Any], str]) -> str:
        if kind == "Not":
            return f"np.logical_not({part(e.a)})" if self._is_array(e) else f"(not {part(e.a)})"
        if self._is_array(e):
            return f"np.logical_{kind.lower()}({part(e.a)}, {part(e.b)})"
        return f"({part(e.a)} {kind.lower()} {part(e.b)})"

    def _either(self, condition: Any, then: Any, other: Any, part: Callable[[Any], str]) -> str:
        if self._is_array(condition):
            return f"np.where({part(condition)}, {part(then)}, {part(other)})"
        return f"({part(then)} if {part(condition)} else {part(other)})"

    def _cast(self, e: Any, part: Callable[[Any], str]) -> str:
        dtype, source = str(e.dtype), str(e.value.dtype)
        text = part(e.value)
        if "float" in dtype:
            return self._rounded(text if "float" in source else f"_to_float({text})", dtype)
        return f"_to_int({text})" if "float" in source else text

    def _load(self, e: Any) -> str:
        if e.buffer.data in self.variables:
            return f"{self.variables[e.buffer.data]}[0]"
        slot, indices = self.slots[e.buffer.data], self.indices(e)
        if not self.on_contents(e):
            return f"R.number({slot}, {indices})"
        return f"M.load({self._bind(f'R.read({slot}, {indices}, {self.rank})')})"

    def indices(self, e: Any) -> str:
        """The indices of a load or a store, as a tuple."""
        return f"({''.join(self.recorded(index) + ', ' for index in e.indices)})"

    def _call(self, e: Any, part: Callable[[Any], str]) -> str:
        name = name_of(e)
        if name == "tirx.if_then_else":
            return self._either(e.args[0], e.args[1], e.args[2], part)
        if name == "tl.infinity":
            return self._constant(float("inf"), str(e.dtype))
        if name == "tl.tl_shuffle_elect":
            return f"R.elected({part(e.args[0])})"
        if name == "tirx.likely":
            return part(e.args[0])
        short = name.removeprefix("tirx.")
        if short in _OPERATORS:
            return f"({part(e.args[0])} {_OPERATORS[short]} {part(e.args[1])})"
        if name.startswith("tirx.") and short in FUNCTIONS:
            return self._rounded(f"{FUNCTIONS[short]}({', '.join(part(each) for each in e.args)})", str(e.dtype))
        known = sorted([*(f"tirx.{each}" for each in (*FUNCTIONS, *_OPERATORS)), "tirx.if_then_else", "tl.infinity"])
        raise UnsupportedByRolesError(f"{name}: the executor of roles does not know this function; known are {', '.join(known)}")


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, tirx.Call) and name_of(node) == name


def _nodes(e: Any) -> Iterator[Any]:
    """The nodes of an expression, those of indices included."""
    yield e
    kind = type(e).__name__
    if kind == "Call":
        parts = [each for each in e.args if isinstance(each, tirx.PrimExpr)]
    elif kind == "BufferLoad":
        parts = list(e.indices)
    elif kind == "Cast":
        parts = [e.value]
    elif kind == "Select":
        parts = [e.condition, e.true_value, e.false_value]
    elif kind == "Not":
        parts = [e.a]
    elif hasattr(e, "a") and hasattr(e, "b"):
        parts = [e.a, e.b]
    else:
        parts = []
    for each in parts:
        yield from _nodes(each)
