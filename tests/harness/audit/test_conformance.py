"""`attnfuzz check-adapter`: every check with an adapter that breaks it, and one that fulfils them all."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from msgspec.structs import replace
from support import adapters as support
from support.emulated.whole import Emulated
from support.schema import wrong

from attnfuzz.harness.audit.conformance import features
from attnfuzz.harness.audit.conformance.check import Conformance, check_adapter
from attnfuzz.harness.audit.conformance.probes import probed
from attnfuzz.harness.audit.conformance.row import Row
from attnfuzz.harness.cli import main as cli
from attnfuzz.kernels import registry
from attnfuzz.kernels.adapters import dense
from attnfuzz.kernels.contract import Capabilities, Config, Deviations, Inputs, why_unsupported
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import Case
from attnfuzz.strategies.variants import all_variants

SMALL: dict[str, Any] = {"dims": ((8, 8),), "dtypes": ("float32",), "devices": ("cpu",), "configs": ({"tile_m": 4, "tile_n": 4},)}
GOOD = dense(
    support.flash, name="theirs.flash", groups=None, unequal=True, zero_q=True, zero_k=True, scale_any=True, dlse=True,
    layouts=True, deterministic=("o", "lse", "dq", "dk", "dv"), **SMALL,
)  # fmt: skip


class Planted:
    """A right kernel in which some members are others."""

    def __init__(self, base: Any = GOOD, **changed: Any) -> None:
        for name in registry.MEMBERS:
            if changed.get(name, "") is not None:
                setattr(self, name, changed.get(name, getattr(base, name)))

    @classmethod
    def calling(cls, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None) -> Planted:
        """With changes of what `forward(inputs, o, lse)` and `backward(inputs, dq, dk, dv)` give."""

        class Built:
            def __init__(self, problem: Any, config: Any, device: Any) -> None:
                self.inner = GOOD.build(problem, config, device)

            def forward(self, inputs: Inputs) -> Any:
                found = self.inner.forward(inputs)
                return forward(inputs, *found) if forward else found

            def backward(self, inputs: Inputs, o: Any, lse: Any) -> Any:
                found = self.inner.backward(inputs, o, lse)
                return backward(inputs, *found) if backward else found

        return cls(build=Built)


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(registry, "_origins", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def check(kernel: Any) -> Conformance:
    registry._registered["theirs.flash"] = kernel
    return check_adapter("theirs.flash", "cpu", in_process=True)


def row(done: Conformance, check: str) -> Row:
    found = [each for each in done.rows if each.check == check]
    assert len(found) == 1, [each.check for each in done.rows]
    return found[0]


def test_an_adapter_that_is_right_fulfils_the_list() -> None:
    heard: list[Row] = []
    registry.register(GOOD)
    done = check_adapter("theirs.flash", "cpu", heard.append, in_process=True)
    assert [each for each in done.rows if each.status in ("wrong", "not run")] == []
    assert done.rows == tuple(heard)
    assert done.complete
    works = {each.check for each in done.rows if each.found == "declared, and works"}
    assert works >= {
        "dtype float32", "dims 8/8", "dense batch", "groups of 2", "groups of 3", "causal bottom_right", "window", "softcap",
        "softmax_scale", "scale of 0 or less", "gradient of LSE", "unequal lengths", "several tiles", "1 keys",
        "sequences without queries", "sequences without keys", "empty batch", "any strides", "rows that see no key",
    }  # fmt: skip
    assert row(done, "ragged batch").status == "absent"
    assert row(done, "dtype bfloat16").status == "hint"


# --- what it says of itself

counter = itertools.count()
CAN = GOOD.capabilities


def with_(**changes: Any) -> Capabilities:
    fields = {name: getattr(CAN, name) for name in Capabilities.__struct_fields__}
    return Capabilities(**{**fields, **changes})


def only_some(problem: Any, config: Any, device: Any) -> str | None:
    return "no masks today" if problem.causal else GOOD.supports(problem, config, device)


def fragile(problem: Any, config: Any, device: Any) -> str | None:
    if problem.batch == 3:
        raise IndexError("list index out of range")
    return GOOD.supports(problem, config, device)


DECLARED: dict[str, tuple[Any, str, str]] = {
    "nothing at all": (object(), "members", "it lacks name, backend, files, capabilities, configs"),
    "no compile_key": (Planted(compile_key=None), "members", "it lacks compile_key"),
    "a class": (Planted, "members", "it lacks name"),
    "a name with a space": (Planted(name="my kernel"), "members", "name='my kernel' must be a text without blanks"),
    "capabilities of another type": (Planted(capabilities={"dims": 8}), "members", "capabilities is a dict"),
    "a list of files": (Planted(files=[__file__]), "members", "must be a tuple of paths"),
    "supports of two arguments": (
        Planted(supports=lambda problem, config: None),
        "members",
        "supports does not take 3 arguments",
    ),
    "no dims": (Planted(capabilities=with_(dims=())), "capabilities", "dims is empty"),
    "an unknown dtype": (Planted(capabilities=with_(dtypes=("float8",))), "capabilities", "float8"),
    "dQ alone": (Planted(capabilities=with_(outputs=("o", "dq"), dlse=False, deterministic=())), "capabilities", "together"),
    "no O": (Planted(capabilities=with_(outputs=("lse", "dq", "dk", "dv"), deterministic=())), "capabilities", "O is always one"),
    "dLSE without LSE": (Planted(capabilities=with_(outputs=("o",), deterministic=())), "capabilities", "dlse: a gradient"),
    "deterministic in what it has not": (
        Planted(capabilities=with_(outputs=("o",), dlse=False)),
        "capabilities",
        "not among outputs: lse, dq, dk, dv",
    ),
    "no files": (Planted(files=()), "files", "none is named"),
    "a file that is not there": (Planted(files=("/nowhere/kernel.py",)), "files", "/nowhere/kernel.py is not a file"),
    "a relative file": (Planted(files=("kernel.py",)), "files", "kernel.py is "),
    "available everywhere": (Planted(unavailable=lambda device: None), "unavailable", "gives None, though cuda is not declared"),
    "unavailable without a reason": (Planted(unavailable=lambda device: ""), "unavailable", "unavailable('cpu') gives ''"),
    "no config": (Planted(configs=lambda problem: ()), "configs", "a tuple of at least one Config is expected"),
    "configs in a list": (Planted(configs=lambda problem: [Config()]), "configs", "a tuple of at least one Config is expected"),
    "other configs each time": (Planted(configs=lambda problem: (Config(n=next(counter)),)), "configs", "two calls give"),
    "a config twice": (Planted(configs=lambda problem: (Config(n=1), Config(n=1))), "configs", "one Config is there twice"),
    "configs that raise": (Planted(configs=lambda problem: {}[problem]), "configs", "it raised KeyError"),
    "a mask that is never taken": (
        Planted(supports=only_some),
        "variants",
        "causal='bottom_right' is declared, and never taken: no masks today",
    ),
    "supports that raises": (Planted(supports=fragile), "supports", "it raised IndexError: list index out of range for {"),
    "supports that takes all": (Planted(supports=lambda *_: None), "supports", "it takes what is not declared: "),
    "supports that gives a bool": (
        Planted(supports=lambda *asked: GOOD.supports(*asked) is None),
        "supports",
        "it gives True for ",
    ),
    "supports that takes any Config": (
        Planted(supports=lambda problem, config, device: why_unsupported(CAN, problem, device)),
        "supports",
        "it takes Config(no_such_choice=12345)",
    ),
    "a key that counts": (Planted(compile_key=lambda *_: str(next(counter))), "compile_key", "equal Problems have "),
    "a key with an address": (Planted(compile_key=lambda *_: repr(GOOD.build)), "compile_key", "address"),
    "no key": (Planted(compile_key=lambda *_: None), "compile_key", "it gives None, which must be a str"),
}


@pytest.mark.parametrize("name", DECLARED)
def test_what_it_says_of_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.harness.audit.conformance import check as conformance

    # What its calls do is another matter.
    monkeypatch.setattr(conformance, "_calls", lambda *_: iter(()))
    kernel, expected, message = DECLARED[name]
    wrong = {each.check: each for each in check(kernel).wrong}
    assert expected in wrong
    assert message in wrong[expected].found
    assert wrong[expected].remedy


# --- what it does


def raises(*_: Any) -> Any:
    raise RuntimeError("no kernel image is available")


def short_lse(_: Any, o: Any, lse: Any) -> Any:
    return o, lse[..., :-1]


def writes(inputs: Inputs, o: Any, lse: Any) -> Any:
    inputs.k.zero_()
    return o, lse


def base_two(_: Any, o: Any, lse: Any) -> Any:
    return o, lse * 1.4426950408889634


def default_dtype(_: Any, o: Any, lse: Any) -> Any:
    return o, lse.to(torch.get_default_dtype())


def default_device(_: Any, o: Any, lse: Any) -> Any:
    return o + torch.zeros(1, dtype=o.dtype), lse


def exits(_: Any, o: Any, lse: Any) -> Any:
    if torch.get_default_dtype() == torch.float64:
        raise SystemExit(3)
    return o, lse


def dropout(_: Any, o: Any, lse: Any) -> Any:
    return o * (1 + 1e-12 * torch.rand(1, dtype=torch.float64).item()), lse


def leaves_a_dtype(_: Any, o: Any, lse: Any) -> Any:
    torch.set_default_dtype(torch.float32 if torch.get_default_dtype() != torch.float32 else torch.float16)
    return o, lse


def grad_mode(_: Any, o: Any, lse: Any) -> Any:
    return (o if torch.is_grad_enabled() else o * 2), lse


def wavering(_: Any, o: Any, lse: Any) -> Any:
    return torch.nextafter(o, o + 1) if next(counter) % 2 else o, lse


def double_dk(_: Any, dq: Any, dk: Any, dv: Any) -> Any:
    return dq, 2 * dk, dv


def build_all(problem: Any, config: Any, device: Any) -> Any:
    return GOOD.build(problem, config, device) if GOOD.supports(problem, config, device) is None else object()


def build_silently(problem: Any, config: Any, device: Any) -> Any:
    if GOOD.supports(problem, config, device) is not None:
        raise KeyError
    return GOOD.build(problem, config, device)


SETTINGS = "independent of torch's settings"
DONE: dict[str, tuple[Any, str, str]] = {
    "raising": (Planted.calling(raises), "runs", "forward raised RuntimeError: no kernel image is available"),
    "raising backward": (Planted.calling(None, raises), "runs", "backward raised RuntimeError"),
    "a shape": (Planted.calling(short_lse), "form of outputs", "LSE has shape"),
    "no gradients": (Planted.calling(None, lambda *_: (None, None, None)), "form of outputs", "dQ has type None"),
    "writing to inputs": (Planted.calling(writes), "inputs left alone", "the kernel wrote to its input k"),
    "LSE to base 2": (Planted.calling(base_two), "O and LSE", "LSE: "),
    "wrong dK": (Planted.calling(None, double_dk), "gradients", "dK: "),
    "torch's default dtype": (Planted.calling(default_dtype), SETTINGS, "LSE has dtype torch.float64"),
    "torch's default device": (Planted.calling(default_device), SETTINGS, "with set_default_device('meta') it raised"),
    "a setting that ends it": (Planted.calling(exits), SETTINGS, "with set_default_dtype(float64) it raised SystemExit: 3"),
    "torch's generator": (Planted.calling(dropout), SETTINGS, "it changes the state of torch's generator"),
    "a default that it leaves": (Planted.calling(leaves_a_dtype), SETTINGS, "it changes torch's default dtype"),
    "the grad mode": (Planted.calling(grad_mode), "O and LSE", "O: "),
    "wavering": (Planted.calling(wavering), "deterministic as declared", "O differs between 4 runs"),
    "build that takes all": (
        Planted(build=build_all),
        "wrong arguments raise",
        "build takes an unknown Config, which supports refuses",
    ),
    "build without a word": (Planted(build=build_silently), "wrong arguments raise", "build raised KeyError"),
}


@pytest.mark.parametrize("name", DONE)
def test_what_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.harness.audit.conformance import features as conformance_features

    # Features have tests of their own.
    monkeypatch.setattr(conformance_features, "features", lambda *_: iter(()))
    kernel, expected, message = DONE[name]
    dtype = torch.get_default_dtype()
    try:
        wrong = {each.check: each for each in check(kernel).wrong}
    finally:
        torch.set_default_dtype(dtype)
    assert expected in wrong, wrong
    assert message in wrong[expected].found
    assert wrong[expected].remedy


# --- features


def mha_only(q, k, v, **keywords):
    return support.flash(q, k[:, :, :1].expand_as(q), v[:, :, :1].expand_as(q), **keywords)


def unequal_wrong(q, k, v, **keywords):
    return support.flash(q, k[:, : q.shape[1]], v[:, : q.shape[1]], **keywords)


def no_softcap(q, k, v, softcap=0.0, window_size=(-1, -1), causal=False, softmax_scale=None, return_lse=False):
    o, lse, _ = support.flash(q, k, v, causal=causal, softmax_scale=softmax_scale, return_attn_probs=True)
    return (o, lse) if return_lse else o


FEATURES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "groups": (mha_only, {"groups": None}, "groups of 2", "do not declare 2 in groups"),
    "unequal": (unequal_wrong, {"unequal": True}, "unequal lengths", "do not declare unequal=True"),
    "softcap": (no_softcap, {}, "softcap", "do not declare softcap=True"),
    "window": (no_softcap, {}, "window", "do not declare window=True"),
    "dtype": (
        lambda q, k, v: support.flash(q, k, v).bfloat16(),
        {"dtypes": ("float32", "bfloat16")},
        "dtype float32",
        "do not declare 'float32' in dtypes",
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_declared_and_fails(name: str) -> None:
    function, declared, expected, remedy = FEATURES[name]
    kernel = dense(function, name="theirs.flash", files=[__file__], **{**SMALL, **declared})
    done = check(kernel)
    found = row(done, expected)
    assert found.status == "wrong"
    assert remedy in found.remedy


def test_what_works_and_is_not_declared_is_a_hint() -> None:
    done = check(dense(support.flash, name="theirs.flash", **SMALL))
    hints = {each.check: each.remedy for each in done.rows if each.status == "hint"}
    assert hints["groups of any number"] == "declare groups=None, and fuzz it"
    assert hints["unequal lengths"] == "declare unequal=True, and fuzz it"
    assert "any strides" in hints
    assert not done.wrong
    assert registry.get("theirs.flash").capabilities.groups == (1,)


def test_a_feature_is_no_hint_where_it_fails_or_cannot_be_tried() -> None:
    assert row(check(dense(mha_only, name="theirs.flash", files=[__file__], **SMALL)), "groups of any number").status == "absent"

    class Fixed(Planted):
        capabilities = property(lambda self: dense(support.flash, **SMALL).capabilities, lambda self, _: None)

    def copied(self: Any) -> Any:
        raise TypeError("no copies")

    Fixed.__copy__ = copied  # type: ignore[attr-defined]
    done = check(Fixed())
    assert not [each for each in done.rows if each.check == "groups of any number"]


# --- the command, and child processes


def attnfuzz(*arguments: str) -> Result:
    sys.argv = ["attnfuzz", *arguments]
    return CliRunner().invoke(cli.main, list(arguments))


def test_the_command_tells_a_person_and_a_machine() -> None:
    registry.register(GOOD)
    result = attnfuzz("check-adapter", "theirs.flash", "--device", "cpu", "--in-process")
    assert result.exit_code == 0, result.output
    assert "theirs.flash on cpu: fulfils the contract (" in result.stdout
    registry.register(Planted(files=()))
    result = attnfuzz("check-adapter", "theirs.flash", "--device", "cpu", "--in-process")
    assert result.exit_code == 1
    assert "wrong    files " in result.stdout
    assert "-> name files that exist" in result.stdout
    assert "theirs.flash on cpu: breaks the contract (1 of " in result.stdout
    result = attnfuzz("check-adapter", "theirs.flash", "--device", "cpu", "--in-process", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not list(wrong(found, "Conformance"))
    assert found["right"] is False
    assert {"check": "members", "status": "ok", "found": "all there", "remedy": ""} in found["checks"]


def test_a_kernel_that_cannot_run_here_is_not_said_to_be_right() -> None:
    registry.register(Planted(unavailable=lambda device: "its compiler is missing"))
    result = attnfuzz("check-adapter", "theirs.flash", "--device", "cpu", "--in-process")
    assert result.exit_code == 2
    assert "not run  calls" in result.stdout
    assert "its compiler is missing" in result.stdout
    assert "could not be checked here" in result.stdout


def test_what_cannot_be_imported_is_wrong_use() -> None:
    result = attnfuzz("check-adapter", "no.such:KERNEL", "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: kernel='no.such:KERNEL': module 'no' is neither ")


def test_what_no_child_finds_is_told() -> None:
    registry._registered["theirs.flash"] = Planted(compile_key=lambda *_: "a")
    done = check_adapter("theirs.flash", "cpu")
    found = row(done, "found by a child process")
    assert found.status == "wrong"
    assert "a child process cannot be given it" in found.found
    assert "--in-process" in found.found
    assert not done.complete


@pytest.mark.slow
def test_a_case_that_no_child_can_read_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "canonical", lambda self: "{}")
    result = attnfuzz("check-adapter", "torch.reference_cpu", "--device", "cpu", "--json")
    assert result.exit_code == 1, result.stderr
    [identity] = [each for each in json.loads(result.stdout)["checks"] if each["check"] == "found by a child process"]
    assert identity["status"] == "wrong"
    assert "case.format=None" in identity["found"]


def test_a_kernel_that_ends_its_process_is_a_row() -> None:
    done = check_adapter("fault.abort", "cpu")
    found = row(done, "runs")
    assert found.status == "wrong"
    assert "SIGABRT" in found.found
    assert row(done, "found by a child process").status == "ok"


def test_an_import_that_fails_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("halfway.py").write_text("import torch\n\nKERNEL = torch.no_such_thing\n")
    with pytest.raises(BadArgument, match=r"importing halfway failed with AttributeError: .* \(halfway.py:3\)"):
        registry.find("halfway:KERNEL")


@pytest.mark.parametrize("name", [each for each in registry.names() if "cpu" in registry.get(each).capabilities.devices])
def test_a_kernel_of_ours_builds_nothing_that_it_does_not_support(name: str) -> None:
    kernel = registry.get(name)
    if reason := kernel.unavailable("cpu"):
        pytest.skip(reason)
    plain = all_variants(kernel, "cpu")[0]
    case = Case(kernel=name, problem=plain.problem(kernel.capabilities), config=plain.config)
    found = probed("arguments", kernel, case, "cpu", {})
    assert found["wrong"] == []
    assert found["right"].startswith("build refuses an unknown Config, dims 511/7")


# --- kernels that take less than they declare


def multiples_of(n: int) -> Callable[..., str | None]:
    """Return a `supports` that takes lengths that are multiples of n only."""

    def supports(problem: Any, config: Any, device: Any) -> str | None:
        odd = [each for each in problem.seqlens_q + problem.seqlens_k if each % n]
        return f"seqlen={odd[0]}: only multiples of {n}" if odd else GOOD.supports(problem, config, device)

    return supports


@pytest.mark.parametrize("n", [16, 64, 128])
def test_the_plain_case_has_lengths_that_the_kernel_takes(n: int) -> None:
    supports = multiples_of(n)
    # The probe of a variant has one token.
    done = check(Planted(supports=lambda p, *rest: GOOD.supports(p, *rest) if p.total_q == 1 else supports(p, *rest)))
    assert [each.status for each in done.rows if each.check in ("runs", "O and LSE", "gradients")] == ["ok"] * 3


def test_a_kernel_that_refuses_every_plain_case_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # A variant is asked for by one token, so that the kernel cannot refuse that.
    monkeypatch.setattr(features, "_LENGTHS", (64, 2))

    def supports(problem: Any, config: Any, device: Any) -> str | None:
        return GOOD.supports(problem, config, device) if problem in probes else "heads=1: only problems of tomorrow"

    probes = [each.problem(CAN) for each in all_variants(GOOD, "cpu")]
    done = check(Planted(supports=supports))
    assert row(done, "plain case").found == "heads=1: only problems of tomorrow"
    assert row(done, "calls").status == "not run"


def test_the_command_takes_a_deadline_and_leaves_out_the_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def noted(*_: Any, **how: Any) -> Conformance:
        given.append(how)
        return Conformance("theirs.flash", "cpu", (Row("runs", "ok", "yes"),), 0.0)

    monkeypatch.setattr("attnfuzz.harness.audit.conformance.check.check_adapter", noted)
    registry.register(GOOD)
    arguments = ["check-adapter", "theirs.flash", "--device", "cpu"]
    taken = attnfuzz(*arguments, "--deadline", "90s", "--no-memory-check")
    assert taken.exit_code == 0, taken.output
    assert given == [{"in_process": False, "deadline": 90.0, "memory_check": False}]
    refused = attnfuzz(*arguments, "--deadline", "9s", "--in-process")
    assert refused.exit_code == 2
    assert "deadline='9s': a kernel in this process has none" in refused.output


def test_deadlines_and_the_memory_check_reach_the_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.harness.audit.conformance import check as module

    given: list[dict[str, Any]] = []

    class Noted:
        def __init__(self, _: Any, **how: Any) -> None:
            given.append(how)
            raise BadArgument("enough")

    monkeypatch.setattr(module, "Isolated", Noted)
    registry.register(GOOD)
    with pytest.raises(BadArgument, match="enough"):
        check_adapter("theirs.flash", "cpu", deadline=9.0, memory_check=False)
    assert given == [{"backends": ["torch"], "deadline": 9.0, "memory_check": False}]


@pytest.mark.parametrize(
    ("fault", "deviation"),
    [
        pytest.param("k scaled in half", "half_scaled_k", marks=pytest.mark.slow),
        pytest.param("partial o in half, splits of 16", "half_partial_o", marks=pytest.mark.slow),
        pytest.param("split lse in half, splits of 16", "half_split_lse", marks=pytest.mark.slow),
        ("lse in base 2", "lse_base2"),
        ("scale 1 %", None),
        (None, None),
    ],
)
def test_deviations_that_would_explain_wrong_values_are_named(
    fault: str | None, deviation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    kernel = Emulated(faults=frozenset({fault} - {None}))
    registry.register(kernel)
    rows = {each.check: each for each in check_adapter(kernel.name, "cpu", in_process=True).rows}
    assert "wrong" in {rows[each].status for each in ("O and LSE", "gradients")} or fault is None
    if deviation is None:
        assert "deviations" not in rows
        return
    assert rows["deviations"].status == "hint"
    names = rows["deviations"].found.removeprefix("the plain case passes with ").removesuffix(", which is not declared")
    assert deviation in names.split(" or ")
    declared = replace(kernel.capabilities, deviations=Deviations(**{deviation: True}))
    registry.register(Emulated(faults=kernel.faults, capabilities=declared))
    rows = {each.check: each for each in check_adapter(kernel.name, "cpu", in_process=True).rows}
    assert "deviations" not in rows
    assert {rows[each].status for each in ("O and LSE", "gradients")} == {"ok"}
