"""The registry: names to kernels, from the package, from entry points, and at run time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Built, Capabilities, Config, Device, Kernel
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Problem
from attnfuzz.kernels.targets import why_not_on

PLAIN = Capabilities()


@dataclass(frozen=True)
class Dummy:
    name: str = "acme.flash"
    backend: str = "acme"
    files: tuple[str, ...] = ()
    capabilities: Capabilities = PLAIN

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        return (Config(),)

    def unavailable(self, device: Device) -> str | None:
        return None

    def supports(self, problem: Problem, config: Config, device: Device) -> str | None:
        return None

    def compile_key(self, problem: Problem, config: Config) -> str:
        return ""

    def build(self, problem: Problem, config: Config, device: Device) -> Built:
        raise NotImplementedError


def dummy() -> Dummy:
    return Dummy()


@dataclass(frozen=True)
class Point:
    """What importlib.metadata gives for an entry point, as far as the registry looks; its object is that of a module here."""

    name: str
    target: Any

    @property
    def value(self) -> str:
        setattr(OBJECTS, f"object_{id(self.target)}", self.target)
        return f"{OBJECTS.__name__}:object_{id(self.target)} [extra]"


OBJECTS = ModuleType("acme_objects")


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setitem(sys.modules, OBJECTS.__name__, OBJECTS)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Point]]:
    listed: list[Point] = []
    groups: list[str] = []

    def entry_points(*, group: str) -> list[Point]:
        groups.append(group)
        return listed

    monkeypatch.setattr(registry.metadata, "entry_points", entry_points)
    yield listed
    assert set(groups) <= {"attnfuzz.kernels"}


def test_the_kernels_of_the_package_are_listed_in_order() -> None:
    names = registry.names()
    assert list(names) == sorted(names)
    assert {"tilelang.varlen", "triton.varlen"} <= set(names)


@pytest.mark.parametrize("wrong", ["triton.varlan", "triton-varlen", "Triton.varlen", "triton.varlen "])
def test_an_unknown_name_suggests_the_nearest(wrong: str) -> None:
    with pytest.raises(registry.UnknownKernel) as caught:
        registry.get(wrong)
    assert str(caught.value) == f"kernel={wrong!r}: no kernel of that name is installed; did you mean 'triton.varlen'?"
    assert isinstance(caught.value, BadArgument)


@pytest.mark.parametrize("group", ["triton", "released", "released.fla", "tilelang.gqa"])
def test_the_beginning_of_names_says_what_it_is(group: str) -> None:
    names = registry.members(group)
    assert len(names) > 1
    for ask in (registry.get, registry.find):
        with pytest.raises(registry.UnknownKernel) as caught:
            ask(group)
        text = f"it is no kernel, but the beginning of {len(names)} kernels' names, which `attnfuzz run` and `gate` take together"
        assert str(caught.value) == f"kernel={group!r}: {text}; give one of {', '.join(names)}"


@pytest.mark.parametrize("wrong", ["", "zzz", "0"])
def test_a_name_like_no_other_lists_all(wrong: str) -> None:
    with pytest.raises(registry.UnknownKernel) as caught:
        registry.get(wrong)
    assert str(caught.value) == (
        f"kernel={wrong!r}: no kernel of that name is installed; known kernels: {', '.join(registry.names())}"
    )


@pytest.mark.parametrize(("wrong", "right"), [("mypackage.attention.KERNEL", "mypackage.attention:KERNEL"), ("a.B", "a:B")])
def test_an_object_named_with_a_dot_is_shown_with_a_colon(wrong: str, right: str) -> None:
    with pytest.raises(registry.UnknownKernel, match=f"; an object of a module is {right}$"):
        registry.get(wrong)


def test_a_registered_kernel_is_found_listed_and_suggested() -> None:
    kernel = registry.register(Dummy())
    assert registry.get("acme.flash") is kernel
    assert "acme.flash" in registry.names()
    assert registry.is_local("acme.flash")
    with pytest.raises(registry.UnknownKernel, match=r"did you mean 'acme\.flash'"):
        registry.get("acme.flush")


def test_registering_again_replaces() -> None:
    registry.register(Dummy())
    other = Dummy(backend="other")
    registry.register(other)
    assert registry.get("acme.flash") is other


def test_unregister_forgets_and_may_be_repeated() -> None:
    registry.register(Dummy())
    registry.unregister("acme.flash")
    registry.unregister("acme.flash")
    assert "acme.flash" not in registry.names()
    assert not registry.is_local("acme.flash")
    with pytest.raises(registry.UnknownKernel):
        registry.get("acme.flash")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"multiple_q": 0}, "multiple_q=0: 1 or more"),
        ({"batch_max": 0, "heads_max": -1}, "batch_max=0: 1 or more; heads_max=-1: 1 or more"),
        ({"multiple_k": "16"}, "Expected `int`, got `str` - at `$.multiple_k`"),
        ({"multiple_k": 64, "length_max": 32}, "length_max=32 leaves no multiple of 64"),
        ({"min_seqlen_k": 0}, "min_seqlen_k=0: empty sequences are zero_k's"),
        ({"dims": ()}, "dims is empty"),
        ({"dtypes_on": {"cpu": ()}}, "dtypes_on is empty for cpu"),
        ({"groups": (0, 1)}, "groups=(0, 1): each is 1 or more"),
        ({"outputs": ("lse",)}, "outputs=('lse',): O is always one of them"),
        ({"shapes": ((1, 3, 2, 8, 8),)}, "shapes: (1, 3, 2, 8, 8): each number is 1 or more, and kv_heads divides heads"),
        ({"page_sizes": (16,)}, "page_sizes: a paged cache is of ragged batches, and has no gradient"),
    ],
)
def test_a_kernel_with_values_that_none_can_have_is_refused(changes: dict[str, Any], reason: str) -> None:
    kernel = Dummy(capabilities=Capabilities(**changes))
    text = f"kernel='acme.flash': its capabilities cannot be ({reason}); declare what the kernel can do"
    with pytest.raises(BadArgument, match=re.escape(text)):
        registry.register(kernel)
    with pytest.raises(BadArgument, match=re.escape(text)):
        why_not_on(kernel, "cpu")


def test_capabilities_of_another_class_are_refused() -> None:
    with pytest.raises(BadArgument, match=r"capabilities is a dict: must be attnfuzz\.kernels\.Capabilities"):
        registry.register(Dummy(capabilities={}))  # type: ignore[arg-type]


def test_what_is_no_kernel_cannot_be_registered() -> None:
    class Half:
        name, backend = "x.half", "x"

        def __repr__(self) -> str:
            return "Half()"

    with pytest.raises(BadArgument) as caught:
        registry.register(Half())  # type: ignore[arg-type]
    assert str(caught.value).startswith(
        "kernel=Half(): it lacks files, capabilities, configs, unavailable, supports, compile_key, build; "
    )
    assert str(caught.value).endswith("; fulfil attnfuzz.kernels.contract.Kernel")


def test_a_wrapper_may_hand_members_on() -> None:
    """Python's own check of a protocol sees no member that `__getattr__` gives, from version 3.12 on."""

    class Wrapper:
        name = "acme.wrapper"

        def __getattr__(self, name: str) -> Any:
            return getattr(Dummy(), name)

    kernel = registry.register(Wrapper())  # type: ignore[arg-type]
    assert registry.get("acme.wrapper") is kernel


@pytest.mark.parametrize("target", [Dummy(), Dummy, dummy, lambda: Dummy()], ids=["object", "class", "function", "lambda"])
def test_an_entry_point_names_an_object_a_class_or_a_function(points: list[Point], target: Any) -> None:
    points.append(Point("acme.flash", target))
    kernel = registry.get("acme.flash")
    assert isinstance(kernel, Kernel)
    assert kernel.name == "acme.flash"
    assert "acme.flash" in registry.names()
    assert not registry.is_local("acme.flash")


def test_an_entry_point_is_loaded_once(points: list[Point]) -> None:
    calls: list[int] = []

    def make() -> Dummy:
        calls.append(1)
        return Dummy()

    points.append(Point("acme.flash", make))
    assert registry.get("acme.flash") is registry.get("acme.flash")
    assert calls == [1]


def test_an_entry_point_that_is_not_asked_for_is_not_loaded(points: list[Point]) -> None:
    def make() -> Dummy:
        raise AssertionError("loaded")

    points += [Point("acme.broken", make), Point("acme.flash", Dummy())]
    assert registry.get("acme.flash").backend == "acme"
    assert "acme.broken" in registry.names()


def test_a_registered_kernel_goes_before_an_entry_point(points: list[Point]) -> None:
    points.append(Point("acme.flash", Dummy()))
    here = registry.register(Dummy(backend="here"))
    assert registry.get("acme.flash") is here


def test_the_demo_kernel_is_found_but_never_listed() -> None:
    assert "demo.varlen" not in registry.names()
    assert registry.get("demo.varlen").name == "demo.varlen"
    assert "demo.varlen" not in registry.names()


def test_every_listed_kernel_fulfils_the_contract() -> None:
    for name in registry.names():
        kernel = registry.get(name)
        assert isinstance(kernel, Kernel)
        assert kernel.name == name
