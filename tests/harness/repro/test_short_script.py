"""Short scripts for an issue tracker: they show a planted fault in a fresh process, and pass where the fault is mended."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import structs
from support.fresh import Fresh
from support.paths import TESTS
from support.repro import register_all
from support.short_faults import FAULTS, Fault

from attnfuzz.harness.campaign.corpus import CaseFile, StoredFinding
from attnfuzz.harness.cli import main as cli
from attnfuzz.harness.judge.failure import Failure, Identity
from attnfuzz.harness.repro.script import short
from attnfuzz.harness.repro.script.short import ShortScript, short_script, shows
from attnfuzz.harness.repro.script.short_text import LINES
from attnfuzz.harness.repro.script.trying import Ran, run_script
from attnfuzz.harness.trial.trial import run_trial
from attnfuzz.kernels import registry
from attnfuzz.kernels.contract import Config
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.kernels.problem import Needs, Problem
from attnfuzz.strategies.case import Case, Recipe


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    process = Fresh(tmp_path_factory.mktemp("fresh"))
    yield process
    process.close()


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})


def stored_of(case: Case, output: str | None = None) -> CaseFile:
    """The case file of a Case that fails, as a campaign would write it."""
    failures = run_trial(case, "cpu").failures
    failure: Failure = next(each for each in failures if output in (None, each.output))
    return CaseFile(case, StoredFinding(identity=failure.identity, message=failure.message), Path("case.json"))


def body_of(text: str) -> list[str]:
    """The lines of a script without the comments at its top."""
    lines = text.splitlines()
    return lines[next(i for i, line in enumerate(lines) if not line.startswith("#")) :]


QUICK = ("a gradient", "groups", "raises")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in FAULTS])
def test_a_planted_fault_is_shown_until_it_is_mended(
    name: str, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault: Fault = FAULTS[name]
    module = f"short_{list(FAULTS).index(name)}"
    for folder, mended in (("faulty", False), ("mended", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text(fault.module(mended=mended))
    monkeypatch.syspath_prepend(tmp_path / "faulty")
    monkeypatch.delitem(sys.modules, module, raising=False)
    needs = Needs(outputs=registry.get(f"{module}:KERNEL").capabilities.outputs)
    recipe = Recipe(pattern=fault.pattern, seed=5)
    case = Case(kernel="acme.short", problem=Problem(**fault.problem, needs=needs), recipe=recipe)
    script: ShortScript = short_script(
        stored_of(case, fault.output), "cpu", run=lambda text, deadline: fresh.run(text, deadline, tmp_path / "faulty")
    )
    assert script.random is fault.random
    assert 20 <= len(body_of(script.text)) <= LINES, script.text
    assert [part for part in fault.contains if part not in script.text] == [], script.text
    assert f"from {module} import " in script.text
    imported = {node.module for node in ast.walk(ast.parse(script.text)) if isinstance(node, ast.ImportFrom)}
    assert not any(each and each.startswith("attnfuzz") for each in imported)
    assert max(len(line) for line in script.text.splitlines() if not line.startswith("data = ")) <= 130, script.text
    ran = fresh.run(script.text, 60.0, tmp_path / "faulty")
    assert ran.code == 1, ran
    ran = fresh.run(script.text, 60.0, tmp_path / "mended")
    assert ran.code == 0, ran
    assert "max error" in ran.out


# --- kernels by the contract, and built-in ones


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `support.repro` has no fault in dV."""
    folder = tmp_path_factory.mktemp("mended")
    (folder / "support").mkdir()
    text = (TESTS / "support" / "repro.py").read_text()
    (folder / "support" / "repro.py").write_text(text.replace("flat[3] += 0.25", "pass"))
    return folder


CONTRACT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "public, ragged": ({}, ("kernels import Config, attention_varlen", "= attention_varlen(q, k, v, cu_seqlens_q,")),
    "public, dense": (
        {"packing": "dense", "seqlens_q": (3, 3), "seqlens_k": (4, 4), "causal": "bottom_right", "softmax_scale": 0.5},
        ('causal="bottom_right", softmax_scale=0.5, config=Config({"tile_m": 6, "tile_n": 6})',),
    ),
    "contract, window": ({"window": (2, None), "causal": "top_left"}, ("problem = Problem(", ".tril(0).triu(0 - 2)")),
    "contract, dense": (
        {"packing": "dense", "seqlens_q": (3, 3), "seqlens_k": (4, 4), "window": (1, 1)},
        ("cu_seqlens_q=torch.arange(3, dtype=torch.int32) * 3", "built.backward(inputs, o, lse)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRACT)
def test_a_kernel_by_the_contract_is_called_by_a_public_function_or_by_the_contract(
    name: str, fresh: Fresh, mended: Path
) -> None:
    changed, parts = CONTRACT[name]
    register_all()
    problem = Problem(**{"seqlens_q": (3, 2), "seqlens_k": (4, 2), "heads": 2, "kv_heads": 2, "dim_qk": 8, "dim_v": 8, **changed})
    case = Case(kernel="acme.element", problem=problem, config=Config(tile_m=6, tile_n=6))
    script = short_script(stored_of(case), "cpu", run=lambda text, deadline: fresh.run(text, deadline, TESTS))
    assert [part for part in parts if part not in script.text] == [], script.text
    assert len(body_of(script.text)) <= LINES
    assert fresh.run(script.text, 60.0, TESTS).code == 1
    ran = fresh.run(script.text, 60.0, mended)
    assert ran.code == 0, ran


def test_a_built_in_kernel_is_called_by_its_name_alone() -> None:
    texts: list[str] = []

    def run(text: str, deadline: float) -> Ran:
        texts.append(text)
        return Ran(1, "O: max error 1, at most 0.1 is expected\n", "")

    problem = Problem(seqlens_q=(3,), seqlens_k=(5,), dim_qk=16, dim_v=16, dtype="float32")
    stored = CaseFile(Case(kernel="torch.reference_cpu", problem=problem), StoredFinding(), Path("case.json"))
    script = short_script(stored, "cpu", run=run)
    assert script.text == texts[0]
    assert 'attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, kernel="torch.reference_cpu")' in script.text
    assert "KERNEL" not in script.text


# --- what is tried, and what counts


PASSES = Ran(0, "O: max error 0.0, at most 1.0 is expected\n", "")


def test_a_script_that_is_ended_before_it_compares_does_not_pass() -> None:
    """A kernel that leaves the process with exit code 0 is a crash."""
    register_all()
    problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8)
    stored = stored_of(Case(kernel="acme.element", problem=problem, config=Config(tile_m=6, tile_n=6)))
    with pytest.raises(BadArgument, match="the script was ended with exit code 0 before it compared anything"):
        short_script(stored, "cpu", run=lambda *_: Ran(0, "", ""))
    assert stored.finding.identity is not None
    crash = CaseFile(stored.case, StoredFinding(identity=structs.replace(stored.finding.identity, kind="crash")), Path("c"))
    assert shows(crash, Ran(0, "", ""))
    assert not shows(crash, PASSES)


def test_random_values_come_first_then_nan_in_fresh_memory_then_the_cases_own() -> None:
    register_all()
    case = Case(kernel="acme.element", problem=Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8))
    texts: list[str] = []

    def run(text: str, deadline: float) -> Ran:
        texts.append(text)
        return PASSES

    case = structs.replace(case, config=Config(tile_m=6, tile_n=6), recipe=Recipe(q_scale=4.0))
    with pytest.raises(BadArgument, match="no short script shows its failure: with random values it passes; with the Case's own"):
        short_script(stored_of(case), "cpu", run=run)
    tried = [("randn" in text, "use_deterministic_algorithms" in text, "zlib" in text) for text in texts]
    assert tried == [*[(True, False, False)] * 3, (True, True, False), (False, True, True)]
    assert "q = 4.0 * torch.randn(2, 1, 8, dtype=torch.float16)" in texts[0]
    assert ["torch.manual_seed(0)" in text for text in texts] == [True, False, False, True, False]


ALONE = 'os.environ["TRITON_INTERPRET"] = "1"'


@pytest.mark.parametrize(
    ("dtype", "kind", "first"),
    [("float16", "mismatch", True), ("float32", "exception", True), ("bfloat16", "mismatch", False), ("float16", "race", False)],
)
def test_a_triton_function_is_tried_without_attnfuzz_first(
    dtype: Any, kind: Any, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own interpreter is wrong in bfloat16, and looks at no memory."""
    (tmp_path / "of_triton.py").write_text(
        "from attnfuzz.kernels import dense\ndef attention(q, k, v):\n    return v\n"
        'KERNEL = dense(attention, name="acme.triton", backend="triton", devices=("cpu",), dims=((8, 8),), gradients=False)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(short, "check_runnable", lambda case, device: registry.get("of_triton:KERNEL"))
    problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8, dtype=dtype, needs=Needs(outputs=("o",)))
    identity = Identity(kernel="acme.triton", kind=kind, output="o" if kind == "mismatch" else None, check="element")
    stored = CaseFile(Case(kernel="acme.triton", problem=problem), StoredFinding(identity=identity, message="m"), Path("c"))
    texts: list[str] = []

    def run(text: str, deadline: float) -> Ran:
        texts.append(text)
        return PASSES

    with pytest.raises(BadArgument, match="see whether it still fails, by attnfuzz repro CASE; if so, write the exact script"):
        short_script(stored, "cpu", run=run)
    assert len(texts) == (10 if first else 5)
    assert [ALONE in text for text in texts] == [first] * 5 + [False] * (len(texts) - 5)
    assert ["attnfuzz" in "\n".join(body_of(text)) for text in texts] == [not first] * 5 + [True] * (len(texts) - 5)
    assert all("# Python must find of_triton: put this file beside it" in text for text in texts)


def test_another_seed_is_tried_where_the_first_passes() -> None:
    """A wrong row whose values are small beside the others stays below the largest error of all rows."""
    register_all()

    def run(text: str, deadline: float) -> Ran:
        return Ran(1, _WRONG.format("dV"), "") if "torch.manual_seed(1)" in text else PASSES

    problem = Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8)
    script = short_script(
        stored_of(Case(kernel="acme.element", problem=problem, config=Config(tile_m=6, tile_n=6))), "cpu", run=run
    )
    assert "torch.manual_seed(1)" in script.text
    assert script.random


def test_the_tensors_of_each_seed_are_those_of_the_script() -> None:
    register_all()
    case = Case(kernel="acme.element", problem=Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8))
    case = structs.replace(case, config=Config(tile_m=6, tile_n=6))
    for values in list(short._candidates(registry.get("acme.element"), stored_of(case)))[:3]:
        torch.manual_seed(values.seed)
        assert torch.equal(values.inputs.q, torch.randn(2, 1, 8, dtype=torch.float16))


_WRONG = "{}: max error 1, at most 0.1 is expected WRONG\n"
_TRACE = "Traceback (most recent call last)\n  File\n"
ENDS: dict[str, tuple[dict[str, Any] | None, Ran, bool]] = {
    "the output is wrong": ({"kind": "mismatch", "output": "dv"}, Ran(1, _WRONG.format("dV"), ""), True),
    "another is wrong": ({"kind": "mismatch", "output": "dv"}, Ran(1, _WRONG.format("O"), ""), False),
    "an import fails": ({"kind": "mismatch", "output": "o"}, Ran(1, "", f"{_TRACE}ModuleNotFoundError: no"), False),
    "it raises in place of a mismatch": ({"kind": "mismatch", "output": "o"}, Ran(1, "", f"{_TRACE}ValueError: no"), False),
    "it raises between": (
        {"kind": "mismatch", "output": "o"}, Ran(1, "O: max error 1, at most 2 is expected\n", f"{_TRACE}ValueError: no"), False,
    ),
    "passes": ({"kind": "mismatch", "output": "o"}, Ran(0, "O: max error 0, at most 0.1 is expected\n", ""), False),
    "one output": ({"kind": "nonfinite", "output": "o"}, Ran(1, "O: max error nan, at most 0.1 is expected\n", ""), True),
    "the exception": ({"kind": "exception", "output": None}, Ran(1, "", f"{_TRACE}ValueError: planted"), True),
    "another exception": ({"kind": "exception", "output": None}, Ran(1, "", f"{_TRACE}KeyError: planted"), False),
    "no import, no exception": ({"kind": "exception", "output": None}, Ran(1, "", f"{_TRACE}ImportError: planted"), False),
    "a memory fault": ({"kind": "out-of-bounds", "output": None}, Ran(1, "", f"{_TRACE}attnfuzz.MemoryFault: planted"), True),
    "a crash": ({"kind": "crash", "output": None}, Ran(-11, "", ""), True),
    "no crash": ({"kind": "crash", "output": None}, Ran(1, "", f"{_TRACE}ValueError"), False),
    "a hang": ({"kind": "hang", "output": None}, Ran(None, "", ""), True),
    "late, no hang": ({"kind": "mismatch", "output": "o"}, Ran(None, "", ""), False),
    "nothing known, wrong": (None, Ran(1, "O: max error 1, at most 0.1 is expected\n", ""), True),
    "nothing known, a signal": (None, Ran(-6, "", ""), True),
    "nothing known, an import": (None, Ran(1, "", f"{_TRACE}ModuleNotFoundError: no"), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_only_the_same_failure_counts(name: str) -> None:
    identity, ran, expected = ENDS[name]
    found: dict[str, Any] = {"message": "ValueError: planted"}
    if identity is not None:
        found["identity"] = {"kernel": "acme.element", "check": "element", **identity}
    case = Case(kernel="acme.element", problem=Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8))
    assert shows(CaseFile(case, StoredFinding.read(found), Path("case.json")), ran) is expected


def test_texts_of_a_case_file_never_become_code(tmp_path: Path) -> None:
    register_all()
    harm = f"open({str(tmp_path / 'harm')!r}, 'w')"
    config = Config({"quoted": f"'+{harm}+'", "lines": f'"""+{harm}+"""\\\n{harm}', "null": "\0", "double": f'"+{harm}+"'})
    case = Case(kernel="acme.element", problem=Problem(seqlens_q=(2,), seqlens_k=(2,), dim_qk=8, dim_v=8), config=config)
    message = f"\n{harm}\r{harm}\f\x1d\0{harm}\ud800\u202e\x1b]52;c;aGk=\x07\u2028{harm}"
    stored = CaseFile(case, StoredFinding(message=message), Path("case.json"))
    script = short_script(stored, "cpu", run=lambda text, deadline: Ran(-11, "", ""))
    script.text.encode()
    tree = ast.parse(script.text)
    opened = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "open"]
    assert opened == []
    written = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Config")
    assert ast.literal_eval(written.args[0]) == dict(config)
    assert all(each.isprintable() for each in script.text.replace("\n", ""))


def test_a_script_runs_in_a_process_of_its_own_that_ends_at_the_deadline() -> None:
    ran = run_script("import sys\nprint('shown')\nsys.exit(3)\n", 60.0)
    assert (ran.code, ran.out, ran.err) == (3, "shown\n", "")
    assert run_script("import time\ntime.sleep(600)\n", 0.2).code is None


def test_the_command_writes_what_it_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fault = FAULTS["wrong scale"]
    Path("short_command.py").write_text(fault.module(mended=False))
    problem = {"packing": "dense", "seqlens_q": [3, 3], "seqlens_k": [5, 5], "dim_qk": 8, "dim_v": 8, "softmax_scale": -0.25}
    content = {"format": 1, "kernel": "acme.short", "problem": {**problem, "needs": {"outputs": ["o"]}}}
    Path("case.json").write_text(json.dumps(content))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["repro", "case.json", "--kernel", "short_command:KERNEL", "--device", "cpu", "--script", "shown.py", "--json"]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert (written["script"], written["exact"], written["note"]) == ("shown.py", False, None)
    assert "from short_command import my_dense" in Path("shown.py").read_text()
