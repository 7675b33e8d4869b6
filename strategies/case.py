"""Case and Recipe: everything needed to repeat one trial, as data. No Hypothesis here, so that any process can read a Case."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, Literal, get_args

import msgspec

from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument, reject, shown
from attnfuzz.kernels.problem import Problem

__all__ = [
    "CALLS",
    "CHECKS",
    "DEFAULT_TILE",
    "FORMAT",
    "PATTERNS",
    "RELATIONS",
    "SINK_VALUES",
    "STREAMS",
    "BadCase",
    "Case",
    "Check",
    "Pattern",
    "Recipe",
    "SinkValues",
    "case_from_json",
    "case_from_object",
    "with_check",
    "with_problem",
]

DEFAULT_TILE = 64
"""Tile around which lengths are drawn where a Config names none."""
FORMAT = 1
"""Version of the Case's JSON. A Case of another version is refused, never guessed at."""

Pattern = Literal[
    "normal",
    "zeros",
    "uniform01",
    "fewvalued",
    "sparse",
    "constant_v",
    "ties",
    "ties_q",
    "dup_keys",
    "block_const",
    "needle",
    "small_logits",
    "normal_scaled",
    "large_logits",
    "huge_logits",
    "falling",
    "rising",
    "negative",
    "below_sentinels",
    "large_products",
    "sink",
    "onehot",
    "k_offset",
    "v_mean",
    "sorted_do",
    "outlier",
    "chan_outlier",
    "tok_outlier",
    "lognormal",
    "do_orthogonal",
    "do_parallel",
    "tiny",
    "subnormal",
    "near_overflow",
]
"""Distributions of values, simplest first; harness/trial/values.py implements them and says what each is for."""
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
SinkValues = Literal["moderate", "zero", "large", "small", "mixed"]
"""Sinks near the scores, 0, far above them, far below them, and one of these for each head."""
SINK_VALUES: tuple[SinkValues, ...] = get_args(SinkValues)
Calls = Literal["twice", "other_shape", "other_scale", "other_mask"]
Relation = Literal[
    "split_batch",
    "permuted_keys",
    "repeated_heads",
    "shifted_scores",
    "constant_v",
    "scaled_values",
    "future_keys",
    "split_keys",
    "huge_strides",
]
Streams = Literal["other_stream", "two_streams", "graph"]
Check = Literal["oracle"] | Calls | Relation | Literal["protocol"] | Streams
"""What a Trial compares: a call with the float64 oracle, a call with earlier ones of the same process, or two related calls.

protocol: a call with the oracle, as warp roles that run under a schedule, with what orders them checked. other_stream,
two_streams, graph: a plain call with one on another CUDA stream, beside another call there, or in a CUDA graph.
"""
CALLS: tuple[Check, ...] = get_args(Calls)
RELATIONS: tuple[Check, ...] = get_args(Relation)
STREAMS: tuple[Check, ...] = get_args(Streams)
CHECKS: tuple[Check, ...] = ("oracle", *CALLS, *RELATIONS, "protocol", *STREAMS)
_PARTS = frozenset({"problem", "recipe", "config", "check", "schedule"})
_KEYS = _PARTS | {"format", "kernel", "after", "found"}
"""`found` holds what a case file records in addition to the Case."""
_MOST_AFTER = 1000
"""Largest number of earlier Cases: a file with more was not written here."""
_MOST_CHOICES = 1000
"""Largest number of choices in a schedule."""
_LARGEST_CHOICE, _LAST_ROLE = 99, 99
_SCALE_LIMIT = 2.0**40
_NO_SINKS: SinkValues = SINK_VALUES[0]
"""What a Recipe says of sinks where the Problem has none: each Trial has one Case."""


class BadCase(BadArgument):
    """A Case that cannot be read: broken JSON, another version, or an invalid Problem."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A rule to compute the values of q, k, v and dO, never the values themselves.

    Each tensor is `pattern` applied to hashed noise of (seed, tensor name, element index), times its scale, a power of
    two so that scaling is exact. `sinks`: how large the sinks are, where the Problem has them.
    """

    pattern: Pattern = "normal"
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    do_scale: float = 1.0
    sinks: SinkValues = "moderate"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("q_scale", "k_scale", "v_scale", "do_scale"):
            value = float(getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)
            if not (1 / _SCALE_LIMIT <= value <= _SCALE_LIMIT) or math.frexp(value)[0] != 0.5:
                raise reject(f"recipe.{name}", value, "only a power of two scales exactly", "use a power of two, 2**-40 to 2**40")
        if not 0 <= self.seed < 2**63:
            raise reject("recipe.seed", self.seed, "it is hashed as a 64-bit integer", "use 0 to 2**63 - 1")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel name, Problem, Recipe, Config and check: frozen, hashable, JSON both ways. Canonical JSON is its identity.

    `after`: Cases of the same kernel that run first, in the same new process, whatever their Verdicts; they have none themselves.
    `schedule`: for the check protocol, the choice at each point at which several roles or operations may go on, 0 behind its end;
    -N at its start holds back the Nth role.
    """

    kernel: str
    problem: Problem
    recipe: Recipe = Recipe()
    config: Config = Config()
    check: Check = "oracle"
    after: tuple[Case, ...] = ()
    schedule: tuple[int, ...] = ()

    @property
    def alone(self) -> Case:
        """Return the Case without those that run first."""
        return msgspec.structs.replace(self, after=()) if self.after else self

    def to_object(self) -> dict[str, Any]:
        """Return the Case as plain JSON values without defaults."""
        return {
            "format": FORMAT,
            "kernel": self.kernel,
            **self._parts(),
            **({"after": [each._parts() for each in self.after]} if self.after else {}),
        }

    def _parts(self) -> dict[str, Any]:
        return {
            "problem": _without_defaults(self.problem),
            "recipe": _without_defaults(self.recipe),
            "config": dict(self.config),
            **({"check": self.check} if self.check != "oracle" else {}),
            **({"schedule": list(self.schedule)} if self.schedule else {}),
        }

    def canonical(self) -> str:
        """Return sorted JSON without spaces or defaults: equal for equal Cases, and only for those."""
        return msgspec.json.encode(self.to_object(), order="sorted").decode()

    @property
    def id(self) -> str:
        """First 10 hex digits of the canonical JSON's SHA-256."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:10]


def with_problem(case: Case, problem: Problem) -> Case:
    """Return the Case with another Problem; without sinks, its Recipe says nothing of their values."""
    if problem.sinks or case.recipe.sinks == _NO_SINKS:
        return msgspec.structs.replace(case, problem=problem)
    return msgspec.structs.replace(case, problem=problem, recipe=msgspec.structs.replace(case.recipe, sinks=_NO_SINKS))


def with_check(case: Case, check: Check) -> Case:
    """Return the Case with another check; without roles, there is no schedule."""
    return msgspec.structs.replace(case, check=check, schedule=case.schedule if check == "protocol" else ())


def _without_defaults(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that differ from their default by value: msgspec's own omission compares some types by identity.

    In a copy that another process has sent, a tuple that equals the default is another object.
    """
    values = {name: value for name, default in _defaults(type(struct)) if (value := getattr(struct, name)) != default}
    return {
        name: _without_defaults(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
        for name, value in values.items()
    }


@functools.cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    """Return (name, default) of each field; cached, since msgspec evaluates the annotations at every call, in 2 ms."""
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))


def case_from_json(text: str | bytes) -> Case:
    """Read a Case from JSON.

    Raises:
        BadCase: what is wrong, where in the file, and the remedy.
    """
    try:
        data = msgspec.json.decode(text)
    except RecursionError:
        raise BadCase("case: it is nested too deeply; give a file that `attnfuzz run` wrote") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCase(f"case: not JSON ({error}); give a file that `attnfuzz run` wrote") from None
    return case_from_object(data)


def case_from_object(data: object) -> Case:
    """Read a Case from decoded JSON, ignoring a case file's `found`."""
    if not isinstance(data, dict):
        raise BadCase("case: not a JSON object; give a file that `attnfuzz run` wrote")
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise BadCase(
            f"case.format={shown(data.get('format'))}: this attnfuzz reads format {FORMAT}; "
            "reproduce it with the version that wrote it, or find it again"
        )
    for name in ("kernel", "problem"):
        if name not in data:
            raise BadCase(
                f"case.{name}: it is missing; a Case has format, kernel, problem, recipe, config, check, schedule and after"
            )
    unknown = sorted(data.keys() - _KEYS)
    if unknown:
        part = shown(unknown[0])[1:-1]
        raise BadCase(f"case.{part}: no such part; a Case has format, kernel, problem, recipe, config, check, schedule and after")
    kernel = _part(data, "kernel", str)
    if ":" in kernel:
        # package.module:OBJECT would be imported, and a file from anywhere must not choose what is imported.
        raise BadCase(f"case.kernel={shown(kernel)}: a kernel's own name is expected; give --kernel what it is found by")
    problem, recipe = _part(data, "problem", Problem), _part(data, "recipe", Recipe)
    if recipe.sinks != _NO_SINKS and not problem.sinks:
        reason = f"case.recipe.sinks={recipe.sinks!r}: the problem has no sinks"
        raise BadCase(f"{reason}; leave it out, or give problem.sinks=true")
    return Case(
        kernel=kernel,
        problem=problem,
        recipe=recipe,
        config=_config(data),
        check=_part({"check": "oracle", **data}, "check", Check),
        after=_after(data.get("after", []), kernel),
        schedule=_schedule(data),
    )


def _schedule(data: dict[str, Any]) -> tuple[int, ...]:
    """Read the choices of a Case with the check protocol."""
    schedule: tuple[int, ...] = _part({"schedule": [], **data}, "schedule", tuple[int, ...])
    if not schedule:
        return ()
    if data.get("check") != "protocol":
        raise BadCase(f"case.schedule={shown(schedule)}: only the check protocol has one; leave it out, or give check=protocol")
    choices = schedule[1:] if -_LAST_ROLE <= schedule[0] < 0 else schedule
    if len(schedule) > _MOST_CHOICES or not all(0 <= each <= _LARGEST_CHOICE for each in choices):
        raise BadCase(
            f"case.schedule={shown(schedule)}: not at most {_MOST_CHOICES} choices from 0 to {_LARGEST_CHOICE}, "
            f"the first perhaps from -1 to -{_LAST_ROLE}; give a file that `attnfuzz run` wrote"
        )
    return schedule


def _after(data: object, kernel: str) -> tuple[Case, ...]:
    """Read the Cases that run before one of `kernel`."""
    if not isinstance(data, list) or len(data) > _MOST_AFTER:
        raise BadCase(
            f"case.after={shown(data)}: not a list of at most {_MOST_AFTER} earlier Cases; give a file that `attnfuzz run` wrote"
        )
    return tuple(_earlier(each, number, kernel) for number, each in enumerate(data))


def _earlier(data: object, number: int, kernel: str) -> Case:
    parts = "an earlier Case has problem, recipe, config, check and schedule"
    if not isinstance(data, dict) or "problem" not in data:
        raise BadCase(f"case.after[{number}]={shown(data)}: it has no problem; {parts}")
    if unknown := sorted(data.keys() - _PARTS):
        raise BadCase(f"case.after[{number}].{shown(unknown[0])[1:-1]}: no such part; {parts}")
    try:
        return case_from_object({"format": FORMAT, "kernel": kernel, **data})
    except BadCase as error:
        raise BadCase(str(error).replace("case.", f"case.after[{number}].", 1)) from None


def _config(data: dict[str, Any]) -> Config:
    values = _part(data, "config", dict[str, int | str | bool])
    try:
        return Config(values)
    except BadArgument as error:
        raise BadCase(f"case.{error}") from None


def _part(data: dict[str, Any], name: str, kind: Any) -> Any:
    try:
        return msgspec.convert(data.get(name, {}), kind)
    except msgspec.ValidationError as error:
        # A Problem's own reasons have their remedies.
        remedy = "" if "; " in str(error) else "; give it as `attnfuzz run` writes it"
        raise BadCase(f"case.{name}: {error}{remedy}") from None
