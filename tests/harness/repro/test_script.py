"""Standalone scripts: the same inputs to the bit, the same verdict as the harness, and nothing of attnfuzz but the kernel."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs
from support.paths import TESTS
from support.repro import register_all
from support.triton_mode import interpreted

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.judge.contract import heads_first
from attnfuzz.harness.judge.intervals import measure
from attnfuzz.harness.judge.truth import Truths
from attnfuzz.harness.repro.script.script import Script, script_of
from attnfuzz.harness.trial.inputs import materialise
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.expressions import named as modifiers
from attnfuzz.kernels.expressions.tree import to_data
from attnfuzz.kernels.modified import tensors_of
from attnfuzz.kernels.problem import Dtype, Layout, Needs, Problem
from attnfuzz.kernels.triton import runtime
from attnfuzz.oracles.formats import Format, rounded
from attnfuzz.strategies.case import PATTERNS, Case, Pattern, Recipe

CONFIG = Config(tile_m=6, tile_n=6)
INPUTS = ("q", "k", "v", "d_o", "d_lse", "cu_seqlens_q", "cu_seqlens_k")
SMALL: dict[str, Any] = {"seqlens_q": (3, 0, 5), "seqlens_k": (4, 2, 3), "heads": 4, "kv_heads": 2, "dim_qk": 8, "dim_v": 8}


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_all()


def written(case: Case, **found: Any) -> Script:
    if "identity" in found:
        found["identity"] = {"kernel": case.kernel, "output": None, "check": "element", **found["identity"]}
    return script_of(CaseFile(case, StoredFinding.read(found), Path("case.json")), "cpu")


def loaded(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's names, as after an import of it."""
    module = ModuleType("a_script_of_attnfuzz")
    if runtime.VARIABLE in text:
        # The script sets it for good, and device code that is imported later would be interpreted while Triton is compiled.
        monkeypatch.setenv(runtime.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, "script.py", "exec"), module.__dict__)
    return module.__dict__


def case_of(kernel: str = "acme.right", *, pattern: Pattern = "normal", check: Any = "oracle", **changed: Any) -> Case:
    recipe = Recipe(pattern=pattern, seed=5, q_scale=0.5, do_scale=2.0)
    return Case(kernel=kernel, problem=Problem(**(SMALL | changed)), recipe=recipe, config=CONFIG, check=check)


def checked(script: dict[str, Any], kernel: str | None = None) -> list[str]:
    """What the script finds wrong, with its own kernel or another one."""
    case = script["CASE"]
    case = dataclasses.replace(
        case, kernel=registry.get(kernel) if kernel else case.kernel, memory=script["unpacked"](script["DATA"])
    )
    lines: list[str] = script["check"](case)
    return lines


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_same_inputs(script: dict[str, Any], case: Case) -> None:
    """Values, strides, and all that lies around them in allocations, which the same tensors share."""
    problem, table = script["CASE"].calls[-1]
    allocations = script["unpacked"](script["DATA"])
    expected = materialise(case.problem, case.recipe, "cpu")
    tensors = {f"captured {each.name}": x for each, x in zip(tensors_of(case.problem), expected.captured, strict=True)}
    tensors |= {name: x for name in INPUTS if (x := getattr(expected, name)) is not None}
    assert problem == case.problem
    assert set(table) == set(tensors)
    for name, y in tensors.items():
        x = table[name].within(allocations)
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride()), name
        assert x.storage_offset() == y.storage_offset()
        assert torch.equal(bits(x), bits(y)), name
        whole = torch.empty(0, dtype=torch.uint8).set_(y.untyped_storage())
        assert torch.equal(allocations[table[name].allocation], whole)
        sharing = {other for other, z in tensors.items() if z.numel() and z.untyped_storage().data_ptr() == whole.data_ptr()}
        assert not y.numel() or sharing == {other for other in table if table[other].allocation == table[name].allocation}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_is_made_to_the_bit_and_a_right_kernel_is_ok(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(pattern=pattern, dtype=("float16", "bfloat16", "float32")[PATTERNS.index(pattern) % 3])
    script = loaded(written(case).text, monkeypatch)
    assert_same_inputs(script, case)
    assert checked(script) == []


SHAPES: dict[str, dict[str, Any]] = {
    "dense, slack, dLSE": {
        "packing": "dense", "seqlens_q": (4, 4), "seqlens_k": (3, 3), "slack_q": 2, "slack_k": 1, "needs": Needs(dlse=True),
        "causal": "bottom_right",
    },
    "ragged, slack, dLSE, window": {
        "slack_q": 1, "slack_k": 3, "needs": Needs(dlse=True), "window": (2, 1), "causal": "top_left",
    },
    "one side of a window, softcap": {"window": (None, 0), "softcap": 0.5, "softmax_scale": -0.25},
    "only O and dV": {"needs": Needs(outputs=("o", "dv"))},
    "packed, strided, expanded": {
        "seqlens_q": (3, 5), "seqlens_k": (3, 5), "heads": 2, "kv_heads": 2, "layout_q": Layout(packed=True, pitch=3),
        "layout_k": Layout(packed=True, pitch=3), "layout_v": Layout(packed=True, pitch=3), "layout_do": Layout(expanded=True),
    },
    "heads outside, expanded heads": {"layout_q": Layout(order="htd", offset=5), "layout_k": Layout(expanded_heads=True)},
    "score_mod with gradients, mask_mod": {
        "score_mod": to_data(modifiers.SCORES["bias"]), "mask_mod": to_data(modifiers.MASKS["documents and causal"]),
    },
    "no queries": {"seqlens_q": (0,), "seqlens_k": (3,), "score_mod": to_data(modifiers.SCORES["alibi"])},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_every_form_of_a_problem_is_made_to_the_bit_and_a_right_kernel_is_ok(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(**SHAPES[name])
    script = loaded(written(case).text, monkeypatch)
    assert_same_inputs(script, case)
    assert run_trial(case, "cpu").failures == ()
    assert checked(script) == []


FAULTS: dict[str, tuple[Case, str]] = {
    "one element": (case_of("acme.element"), "dv: 1 of 144 elements is wrong"),
    "unwritten": (case_of("acme.unwritten"), "dk: 16 of 144 elements are wrong"),
    "past the end": (case_of("acme.past"), "a tensor that the kernel made"),
    "an input": (case_of("acme.input"), "the kernel wrote to its input k"),
    "a shape": (case_of("acme.shape"), "lse is (8, 4) torch.float32 on cpu, (4, 8) torch.float32 on cpu is expected"),
    "a dtype": (case_of("acme.dtype"), "dq is (8, 4, 8) torch.float64 on cpu, (8, 4, 8) torch.float16 on cpu is expected"),
    "nothing": (case_of("acme.nothing"), "lse is NoneType, a tensor is expected"),
    "LSE of rows without keys": (case_of("acme.blind", causal="bottom_right"), "lse: "),
    "raises": (case_of("acme.raises"), "the kernel raised; its traceback is above"),
    "exits": (case_of("acme.exits"), "the kernel raised; its traceback is above"),
    "differs": (case_of("acme.differs", check="twice"), "o: "),
    "reuses": (case_of("acme.reuses", check="twice"), "o of the last call lies in the memory of the first call's"),
    "gradients": (case_of("acme.captured", score_mod=to_data(modifiers.SCORES["bias"])), "d bias: "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_script_shows_what_the_harness_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, expected = FAULTS[name]
    assert run_trial(case, "cpu").failures
    script = loaded(written(case).text, monkeypatch)
    lines = checked(script)
    assert any(line.startswith(expected) for line in lines), lines
    assert checked(script, "acme.right") == []


def test_a_script_allows_two_equal_calls_the_sums_that_the_harness_allows_to_be_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("acme.flushes", check="twice", dtype="float32", pattern="subnormal")
    assert run_trial(case, "cpu").failures == ()
    script = loaded(written(case).text, monkeypatch)
    assert checked(script) == []
    monkeypatch.setattr("attnfuzz.harness.repro.script.script.flushed_sums", lambda problem, name: 0.0)
    assert [line.split(":")[0] for line in checked(loaded(written(case).text, monkeypatch))] == ["dq"]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_worst_elements_are_shown_with_what_the_judge_accepts(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of float16 are larger than the budget: an allowed error alone would say that the expected value is wrong too."""
    case = case_of("acme.element", dtype=dtype)
    place = run_trial(case, "cpu").failures[0].place
    assert place is not None
    form = Format.of(dtype)
    ends = (place.expected + side * place.allowed for side in (-1, 1))
    low, high = (float(rounded(torch.tensor(each, dtype=torch.float64), form)) for each in ends)
    accepted = f"{low:.9g} alone" if low == high else f"{low:.9g} to {high:.9g}"
    lines = checked(loaded(written(case).text, monkeypatch))
    values = f"got {place.got:.9g}, expected {place.expected:.9g}, accepted {accepted}"
    assert lines[1:] == [f"  sequence 0, row 0, head 0, dim 3: {values}"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_interval_ends_where_the_judge_ends_it(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end of each element is right to the judge, and the next value beyond it is wrong."""
    case = case_of(dtype=dtype, causal="bottom_right", packing="dense", seqlens_q=(3, 3), seqlens_k=(2, 2), slack_q=1)
    script = loaded(written(case).text, monkeypatch)
    memory = script["unpacked"](script["DATA"])
    inputs = materialise(case.problem, case.recipe, "cpu")
    truths = Truths(inputs, registry.get(case.kernel).capabilities.deviations, "cpu")
    truths.count_ties()
    for name, (_, _, *ends) in script["CASE"].outputs.items():
        for end, away in zip(ends, (-torch.inf, torch.inf), strict=True):
            x = end.within(memory)
            beyond = torch.nextafter(x, torch.tensor(away, dtype=x.dtype))
            over = [measure(case.problem, {name: heads_first(case.problem, name, y)}, truths)[name].over for y in (x, beyond)]
            # There is nothing below -inf, the LSE of rows without keys.
            assert over == [0, int((heads_first(case.problem, name, x) != away).sum())], (name, away)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "large": (
        {"seqlens_q": (1 << 20,), "seqlens_k": (1 << 20,), "heads": 64, "kv_heads": 64},
        "a script holds at most 16777216 bytes of them; shrink it first: attnfuzz repro CASE --shrink",
    ),
    "large inputs": ({"layout_q": Layout(offset=1 << 24)}, "a script holds at most 16777216 bytes"),
    "unsupported": ({"dim_qk": 300}, "acme.right does not support it: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_script_is_refused(name: str, tmp_path: Path) -> None:
    changed, message = REFUSED[name]
    (tmp_path / "case.json").write_text(json.dumps(case_of(**changed).to_object()))
    arguments = [str(tmp_path / "case.json"), "--device", "cpu", "--exact", "--script", str(tmp_path / "shown.py")]
    result = CliRunner().invoke(cli.main, ["repro", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "shown.py").exists()


def test_names_and_texts_of_a_case_file_never_become_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harm = f"open({str(tmp_path / 'harm')!r}, 'w')"
    config = Config({"quoted": f"'+{harm}+'", "lines": f'"""+{harm}+"""\\\n{harm}', "null": "\0"})
    case = dataclasses.replace(
        CaseFile(case_of(), StoredFinding(message=f"\n{harm}\r{harm}\f\x1d\0{harm}\ud800"), Path("case.json"))
    )
    case = dataclasses.replace(case, case=structs.replace(case.case, config=config))
    text = script_of(case, "cpu").text
    text.encode()
    script = loaded(text, monkeypatch)
    assert script["CASE"].config == config
    assert checked(script) == []
    assert not (tmp_path / "harm").exists()


def test_a_flaky_failure_is_run_as_often_as_its_rate_demands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(case_of(), rate=[1, 3]).text
    assert "# It failed in 1 of 3 runs: it is run up to 8 times, until it fails." in text
    script = loaded(text, monkeypatch)
    runs = iter([[], [], ["o: wrong"]])
    monkeypatch.setitem(script, "check", lambda case: next(runs))
    assert script["run"](script["CASE"], script["DATA"]) == 1
    assert capsys.readouterr().out == "FAILED acme.right on cpu, run 3\no: wrong\n"


def test_calls_before_have_their_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other lengths; equal calls share theirs."""
    case = case_of(check="other_shape")
    script = loaded(written(case).text, monkeypatch)
    memory, calls = script["unpacked"](script["DATA"]), script["CASE"].calls
    assert [problem == case.problem for problem, _ in calls] == [False, True, False, True]
    assert calls[0] == calls[2]
    for problem, table in calls:
        assert torch.equal(bits(table["q"].within(memory)), bits(materialise(problem, case.recipe, "cpu").q))
    assert checked(script) == []


@pytest.mark.parametrize(
    ("identity", "check", "note"),
    [
        ({"kind": "aggregate", "check": "R"}, "oracle", "only all of them together"),
        ({"kind": "relation", "check": "split_batch"}, "split_batch", "compares related calls (check split_batch)"),
        ({"kind": "uninitialised", "check": "load in forward"}, "oracle", "seen by attnfuzz's memory checker"),
        ({"kind": "race", "check": "store in forward"}, "oracle", None),
        ({"kind": "contract", "check": "strides"}, "oracle", "not its strides"),
        ({"kind": "mismatch", "check": "element"}, "oracle", None),
    ],
)
def test_what_a_script_cannot_show_is_said(identity: dict[str, str], check: Any, note: str | None) -> None:
    script = written(case_of(check=check), identity=identity)
    if note is None:
        assert script.note is None
        assert "NOTE" not in script.text
    else:
        assert script.note is not None
        assert note in script.note
        assert f"# NOTE: {script.note}" in script.text


@interpreted
def test_the_interpreters_own_checks_are_on_in_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if registry.get("triton.varlen").unavailable("cpu"):
        pytest.skip("Triton cannot run here")
    problem = Problem(seqlens_q=(5,), seqlens_k=(3,), dim_qk=16, dim_v=16)
    kernel = registry.get("fault.memory.store")
    case = Case(kernel=kernel.name, problem=problem, config=kernel.configs(problem)[0])
    assert run_trial(case, "cpu").failures[0].kind == "out-of-bounds"
    script = written(case, identity={"kind": "out-of-bounds", "check": "store in preprocess"})
    assert script.note is None
    assert checked(loaded(script.text, monkeypatch)) == ["the kernel raised; its traceback is above"]
    assert "MemoryFault: varlen_device.py:" in capsys.readouterr().err


def test_a_script_needs_nothing_of_attnfuzz_but_the_kernel() -> None:
    for name in ("normal", "onehot"):
        text = written(case_of(pattern=name, score_mod=to_data(modifiers.SCORES["bias"]))).text  # type: ignore[arg-type]
        nodes = list(ast.walk(ast.parse(text)))
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        ours = {each for each in modules if each and each.startswith("attnfuzz")}
        assert {"attnfuzz.kernels.contract", "attnfuzz.kernels.problem"} <= ours
        assert all(each.startswith("attnfuzz.kernels.") for each in ours), ours
        assert "support.repro" in modules


@pytest.mark.parametrize("path", ["run", "make", "Holder.check"])
def test_a_kernel_is_imported_from_where_it_was_asked_for(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object, a function that makes it, an attribute; whose names may be the script's own."""
    for table in ("_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    source = "from support.repro import Plain\n\nrun = Plain('acme.target')\nclass Holder:\n    check = run\n"
    (tmp_path / "script_target.py").write_text(source + "def make():\n    return run\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script_target", raising=False)
    kernel = registry.get(f"script_target:{path}")
    script = loaded(written(case_of(kernel.name)).text, monkeypatch)
    assert script["CASE"].kernel is sys.modules["script_target"].run
    assert script["run"](script["CASE"], script["DATA"]) == 0


@pytest.mark.parametrize("name", ["acme-kernels", "class", "x; import os"])
def test_a_kernel_whose_name_is_no_identifier_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.repro import Plain

    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    module.__dict__["KERNEL"] = registry.register(Plain("acme.named"))
    with pytest.raises(BadArgument, match="cannot be written as an import; give module and kernel Python identifiers"):
        written(case_of("acme.named"))


def test_a_kernel_that_no_script_could_import_is_refused() -> None:
    from support.repro import Plain

    registry.register(Plain("acme.nowhere"))
    with pytest.raises(BadArgument, match="the kernel is not a global of a module that a script could import"):
        written(case_of("acme.nowhere"))


# --- in a fresh process


def started(path: Path, *folders: Path) -> subprocess.Popen[str]:
    # Packages may have come by the variable as well.
    places = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.Popen(
        [sys.executable, "-P", str(path)], cwd=path.parent, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_scripts_fail_in_fresh_processes_until_the_kernel_is_mended(tmp_path: Path) -> None:
    """A numeric fault of a kernel elsewhere, one that dies, and the demo's in an interpreted Triton kernel."""
    source = (TESTS / "support" / "repro.py").read_text()
    for folder, text in (("broken", source), ("fixed", source.replace("flat[3] += 0.25", "pass"))):
        (tmp_path / folder / "support").mkdir(parents=True)
        (tmp_path / folder / "support" / "repro.py").write_text(text)
    ours = case_of("acme.element")
    dies = Case(
        kernel="fault.segfault", problem=Problem(seqlens_q=(1,), seqlens_k=(3,), dim_qk=16, dim_v=16, dtype="float32"),
        config=Config(tile_m=16, tile_n=16),
    )  # fmt: skip
    demo = Case(
        kernel="demo.varlen", problem=Problem(seqlens_q=(0,), seqlens_k=(1,), dim_qk=16, dim_v=16),
        config=Config(num_stages=2, num_warps=4, tile_m=32, tile_n=32),
    )  # fmt: skip
    cases = {"ours": ours, "dies": dies}
    if registry.get("demo.varlen").unavailable("cpu") is None:
        cases["demo"] = demo
    for name, case in cases.items():
        (tmp_path / f"{name}.py").write_text(written(case, identity={"kind": "crash"}).text)
    running = {name: started(tmp_path / f"{name}.py", tmp_path / "broken") for name in cases}
    running["fixed"] = started(tmp_path / "ours.py", tmp_path / "fixed")
    if "demo" in cases:
        text = (tmp_path / "demo.py").read_text().replace("get('demo.varlen')", "get('triton.varlen')")
        (tmp_path / "right.py").write_text(text)
        running["right"] = started(tmp_path / "right.py")
    done = {name: (*process.communicate(timeout=300), process.returncode) for name, process in running.items()}
    out, err, code = done["ours"]
    assert code == 1, err
    assert out.splitlines()[:2] == ["FAILED acme.element on cpu, run 1", "dv: 1 of 144 elements is wrong"]
    assert done["fixed"] == ("OK acme.element on cpu\n", "", 0)
    assert done["dies"][2] == -signal.SIGSEGV
    if "demo" in cases:
        out, err, code = done["demo"]
        assert code == 1, err
        assert "dk: 16 of 16 elements are wrong" in out
        assert done["right"][2] == 0, done["right"]
        assert done["right"][0] == "OK triton.varlen on cpu\n"
