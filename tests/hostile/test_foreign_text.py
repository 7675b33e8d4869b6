"""Foreign text comes out spelled: no command's output holds what a terminal, a reader or GitHub's runner would obey."""

from __future__ import annotations

import ast
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from support.foreign_text import EVERYTHING, MARK, PAYLOADS, obeyed
from support.paths import ROOT
from support.report import Spoilt, failure, kernel_record, record, right, written

from attnfuzz.harness.audit.conformance.check import Conformance
from attnfuzz.harness.audit.conformance.report import conformance_object, show_conformance
from attnfuzz.harness.audit.conformance.row import Row as Check
from attnfuzz.harness.audit.selftest.faults import FaultRow, Faults, Leaks
from attnfuzz.harness.audit.selftest.memory import CleanRow, MemoryRow, MemoryTried
from attnfuzz.harness.audit.selftest.report import show_faults, show_memory
from attnfuzz.harness.campaign.events import CaseNotKept, CaseSkipped, KernelBroke, KernelSkipped
from attnfuzz.harness.cli.main import main
from attnfuzz.harness.cli.options import console
from attnfuzz.harness.compile.compile import Left, Row
from attnfuzz.harness.compile.report import markdown as compile_markdown
from attnfuzz.harness.compile.report import show as show_compiled
from attnfuzz.harness.core import text as texts
from attnfuzz.harness.gate.report import github
from attnfuzz.harness.gate.report.junit import junit
from attnfuzz.harness.gate.report.terminal import GateProgress, gate_object, markdown, show_gate
from attnfuzz.harness.gate.result import Finding, Gate, KernelGate, Part, PartFinished, PartProgress, Waiver
from attnfuzz.harness.report.console import SafeConsole
from attnfuzz.harness.report.terminal import Terminal
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument
from attnfuzz.strategies.case import case_from_object

NO_COLON = EVERYTHING.replace(":", ".")
"""A name with a colon is a kernel's target."""
PROBLEM = {"seqlens_q": [3], "seqlens_k": [4], "dim_qk": 8, "dim_v": 8, "dtype": "float32"}


@pytest.fixture(autouse=True)
def _on_github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def attnfuzz(*arguments: str) -> str:
    """What a command prints to both streams, in this process."""
    sys.argv = ["attnfuzz", *arguments]
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert not any(each in result.output for each in ("internal error", "fault of attnfuzz")), result.output
    return result.output


def assert_spelled(output: str, **how: bool) -> None:
    assert MARK in output, output
    assert not obeyed(output, **how), output


# --- the scan itself, and the function


@pytest.mark.parametrize("payload", [each for name, each in PAYLOADS.items() if name != "markup and emoji"], ids=repr)
def test_the_scan_sees_each_payload_and_the_printer_spells_it(payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnfuzz.harness.core.github import shown

    assert obeyed(payload)
    assert not obeyed(shown(payload))
    assert not obeyed(texts.one_line(payload), on_page=True)
    assert "\n" not in texts.one_line(payload)
    written_out = texts.dumps({payload: [payload]})
    assert not obeyed(written_out)
    assert json.loads(written_out) == {payload: [payload]}
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert shown(payload) == texts.printable(payload)


# --- case files

FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "kernel": lambda text: {"kernel": text},
    "kernel without a colon": lambda text: {"kernel": text.replace(":", ".")},
    "config value": lambda text: {"config": {"tile": text}},
    "config name": lambda text: {"config": {text: 1}},
    "score_mod": lambda text: {"problem": {**PROBLEM, "score_mod": [text]}},
    "dtype": lambda text: {"problem": {**PROBLEM, "dtype": text}},
    "pattern": lambda text: {"recipe": {"pattern": text}},
    "check": lambda text: {"check": text},
    "an unknown name": lambda text: {text: 1},
    "found.message": lambda text: {"found": {"message": text}},
    "found.device": lambda text: {"found": {"device": text}},
    "found.versions value": lambda text: {"found": {"device": "x", "versions": {"torch": text}}},
    "found.versions name": lambda text: {"found": {"device": "x", "versions": {text: "1"}}},
}
ON_CASES = {
    "show": ["show"],
    "show --json": ["show", "--json"],
    "repro": ["repro", "--device", "cpu", "--in-process"],
    "repro --json": ["repro", "--device", "cpu", "--in-process", "--json"],
    "compile --case": ["compile", "--case"],
}
SHOWN_ONLY = {"found.message", "found.device", "found.versions value", "found.versions name"}
CASE_ROWS = [
    pytest.param(field, command, id=f"{field}, {command}")
    for field in FIELDS
    for command in ON_CASES
    if command.startswith("show") or field not in SHOWN_ONLY
    if (field, command) != ("config value", "compile --case")
]


def stored(**changed: Any) -> str:
    path = Path("case.json")
    path.write_text(json.dumps({"format": 1, "kernel": "torch.reference_cpu", "problem": PROBLEM, **changed}))
    return str(path)


@pytest.mark.parametrize(("field", "command"), CASE_ROWS)
def test_case_files(field: str, command: str) -> None:
    assert_spelled(attnfuzz(*ON_CASES[command], stored(**FIELDS[field](EVERYTHING))))


@pytest.mark.parametrize("command", ON_CASES)
def test_lone_surrogates_in_a_case_file_and_in_its_name(command: str) -> None:
    path = Path(f"{MARK}\udce9\x1b[2J.json")
    path.write_text(json.dumps({"format": 1, "kernel": f"{MARK}\ud800", "problem": PROBLEM}))
    assert_spelled(attnfuzz(*ON_CASES[command], str(path)))


@pytest.mark.parametrize("command", ["show", "show --json", "repro", "repro --json"])
def test_the_name_of_a_case_file(command: str) -> None:
    path = Path(NO_COLON.replace("\0", "").replace("/", "")[:200])
    path.write_text(json.dumps({"format": 1, "kernel": "acme.absent", "problem": PROBLEM}))
    assert_spelled(attnfuzz(*ON_CASES[command], str(path)))


TARGETS = [
    "x:y; touch PWNED #",
    "x:y\n::stop-commands::t",
    "x:y$(id)",
    "x:",
    ":y",
    "x:y z",
    "x:y\x1b[2J",
    "--pdb",
    "x:\u202ey",
]


@pytest.mark.parametrize("target", TARGETS, ids=repr)
@pytest.mark.parametrize("command", ["show", "repro", "compile --case"])
def test_only_a_target_is_offered_for_copying(target: str, command: str) -> None:
    output = attnfuzz(*ON_CASES[command], stored(kernel="acme.absent", found={"target": target}))
    assert not obeyed(output)
    assert "--kernel" not in output
    assert target not in output


@pytest.mark.parametrize("command", ["show", "repro"])
def test_a_target_is_offered_for_copying(command: str) -> None:
    output = attnfuzz(*ON_CASES[command], stored(kernel="acme.absent", found={"target": "my_package.attention:KERNELS.fast"}))
    assert " --kernel my_package.attention:KERNELS.fast\n" in output


def test_a_path_to_copy_is_a_word_of_the_shell() -> None:
    import subprocess

    from attnfuzz.harness.campaign.corpus import quoted

    for path in ("a b", "-x", "a\nb", "it's \\ \x1b[2J", "\u202eé", "\udce9", "\x9b"):
        word = quoted(path)
        assert texts.one_line(word) == word
        echoed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
        assert echoed.decode("utf-8", "surrogateescape") == (f"./{path}" if path.startswith("-") else path)


# --- kernels


class Talkative(Spoilt):
    """A kernel that speaks where it can."""

    def __init__(self, name: str = "test.spoilt", **says: str) -> None:
        super().__init__(right, name)
        self.says = says

    def unavailable(self, device: Any) -> str | None:
        return self.says.get("unavailable")

    def build(self, problem: Any, config: Any, device: Any) -> Any:
        if text := self.says.get("build"):
            raise RuntimeError(text)
        return _Talking(super().build(problem, config, device), self.says)


class _Talking:
    def __init__(self, built: Any, says: dict[str, str]) -> None:
        self.built, self.says = built, says

    def forward(self, inputs: Any) -> Any:
        if text := self.says.get("forward"):
            raise type(f"Error{MARK}", (Exception,), {})(text)
        if text := self.says.get("stdout"):
            sys.stdout.write(text)
        return self.built.forward(inputs)

    def backward(self, inputs: Any, o: Any, lse: Any) -> Any:
        return self.built.backward(inputs, o, lse)


RUN = ["--device", "cpu", "--in-process", "--max-examples", "1", "--max-failures", "1"]
KERNEL_ROWS: dict[str, tuple[dict[str, str], list[str]]] = {
    "run, forward raises": ({"forward": EVERYTHING}, ["run", "test.spoilt", *RUN]),
    "run --json, forward raises": ({"forward": EVERYTHING}, ["run", "test.spoilt", *RUN, "--json"]),
    "run, build raises": ({"build": EVERYTHING}, ["run", "test.spoilt", *RUN]),
    "run, cannot run here": ({"unavailable": EVERYTHING}, ["run", "test.spoilt", "torch.reference_cpu", *RUN]),
    "run, nothing can run here": ({"unavailable": EVERYTHING}, ["run", "test.spoilt", *RUN]),
    "run, an unknown kernel": ({}, ["run", NO_COLON]),
    "run, an unknown target": ({}, ["run", EVERYTHING]),
    "run, an option's value": ({}, ["run", "--device", EVERYTHING]),
    "run, an unknown option": ({}, ["run", f"--{EVERYTHING}"]),
    "run, a number": ({}, ["run", "--seed", EVERYTHING]),
    "run --json, an unknown kernel": ({}, ["run", NO_COLON, "--json"]),
    "an unknown command": ({}, [EVERYTHING]),
    "list": ({"unavailable": EVERYTHING}, ["list"]),
    "list KERNEL": ({"unavailable": EVERYTHING}, ["list", "test.spoilt"]),
    "list --json": ({"unavailable": EVERYTHING}, ["list", "test.spoilt", "--json"]),
    "list NAME": ({}, ["list", NO_COLON]),
    "check-adapter": ({"unavailable": EVERYTHING}, ["check-adapter", "test.spoilt", "--device", "cpu", "--in-process"]),
    "check-adapter --json": (
        {"unavailable": EVERYTHING},
        ["check-adapter", "test.spoilt", "--device", "cpu", "--in-process", "--json"],
    ),
    "repro --repeat": ({"forward": EVERYTHING}, ["repro", "case.json", *RUN[:3], "--repeat", "2"]),
    "repro --shrink": ({"forward": EVERYTHING}, ["repro", "case.json", *RUN[:3], "--shrink", "--budget", "1s"]),
    "repro": ({"forward": EVERYTHING}, ["repro", "case.json", *RUN[:3]]),
    "repro --json": ({"forward": EVERYTHING}, ["repro", "case.json", *RUN[:3], "--json"]),
    "repro --plot": ({"forward": EVERYTHING}, ["repro", "case.json", *RUN[:3], "--plot", "p.png"]),
}


@pytest.mark.parametrize(("says", "arguments"), KERNEL_ROWS.values(), ids=KERNEL_ROWS)
def test_kernels(says: dict[str, str], arguments: list[str]) -> None:
    registry.register(Talkative(**says))
    stored(kernel="test.spoilt", config={"tile_m": 16, "tile_n": 32})
    assert_spelled(attnfuzz(*arguments))


NAMES = [EVERYTHING, *PAYLOADS.values()]


@pytest.mark.parametrize("name", [each for each in NAMES if not each.isprintable()], ids=repr)
def test_a_name_that_cannot_be_printed_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadArgument, match="must be printable text") as caught:
        registry.register(Talkative(name))
    assert not obeyed(str(caught.value), on_page=True)
    assert registry._registered == {}


def test_a_target_whose_kernel_has_such_a_name_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    lines = [
        "from attnfuzz.kernels import registry",
        "class Named(type(registry.get('torch.reference_cpu'))):",
        f"    name = {EVERYTHING!a}",
        "KERNEL = Named()",
    ]
    Path("spoken.py").write_text("\n".join(lines))
    words = {"list": "must be printable text", "run": "must be printable text", "check-adapter": "breaks the contract"}
    for command, expected in words.items():
        output = attnfuzz(command, "spoken:KERNEL", *(RUN[:3] if command == "check-adapter" else RUN if command == "run" else ()))
        assert expected in output
        assert_spelled(output)


LEDGER_ROWS = {
    "kernel": 'kernel = "%s"\nkind = "mismatch"\nissue = "#1"\nexpires = DAY',
    "issue": 'kernel = "test.spoilt"\nkind = "mismatch"\nissue = "%s"\nexpires = DAY',
    "kind": 'kernel = "test.spoilt"\nkind = "%s"\nissue = "#1"\nexpires = DAY',
    "output": 'kernel = "test.spoilt"\nkind = "mismatch"\noutput = "%s"\nissue = "#1"\nexpires = DAY',
    "expires": 'kernel = "test.spoilt"\nkind = "mismatch"\nissue = "#1"\nexpires = "%s"',
    "an unknown name": '"%s" = 1\nkernel = "test.spoilt"\nkind = "mismatch"\nissue = "#1"\nexpires = DAY',
}


@pytest.mark.parametrize("entry", LEDGER_ROWS.values(), ids=LEDGER_ROWS)
def test_ledgers(entry: str) -> None:
    registry.register(Talkative())
    text = "".join(f"\\u{ord(each):04x}" if ord(each) < 0x10000 else f"\\U{ord(each):08x}" for each in EVERYTHING)
    day = (date.today() + timedelta(days=100)).isoformat()
    Path("l.toml").write_text(f"[[known]]\n{entry.replace('%s', text).replace('DAY', day)}\n")
    assert_spelled(attnfuzz("run", "test.spoilt", *RUN, "--ledger", "l.toml"))


# --- run files

RUN_FILES: dict[str, Callable[[str], dict[str, Any]]] = {
    "kernel": lambda text: {"kernels": [kernel_record(text)], "failures": [failure(1, text)]},
    "title": lambda text: {"failures": [failure(title=text)]},
    "message": lambda text: {"failures": [failure(messages=[text])]},
    "pattern": lambda text: {"failures": [failure(pattern=text)]},
    "detail": lambda text: {"failures": [failure(detail=text)]},
    "described": lambda text: {"failures": [failure(told=[(text, text)])]},
    "path": lambda text: {"failures": [failure(path=text)]},
    "repro": lambda text: {"failures": [failure(repro=shlex.join(["attnfuzz", "repro", text]))]},
    "maps": lambda text: {"failures": [failure(maps=text)]},
    "no maps": lambda text: {"failures": [failure(no_maps=text)]},
    "case": lambda text: {"failures": [failure(case={text: text})]},
    "settings": lambda text: {"settings": {text: text}},
    "device": lambda text: {"environment": {"device": text, "versions": {text: text}}},
    "error": lambda text: {"state": "error", "error": text},
    "lost": lambda text: {"lost": text},
    "features": lambda text: {"kernels": [kernel_record(features={text: 1}, drawn={"dtype": {text: 1}})]},
}


@pytest.mark.parametrize("fields", RUN_FILES.values(), ids=RUN_FILES)
def test_report(fields: Callable[[str], dict[str, Any]]) -> None:
    pytest.importorskip("jinja2")
    written(Path("runs-of"), record(**fields(EVERYTHING)))
    assert not obeyed(attnfuzz("report", "runs-of", "--pictures", "5"))
    assert_spelled(Path("runs-of/report.html").read_text(encoding="utf-8"), on_page=True)


@pytest.mark.parametrize("name", ["kernel", "title", "error", "lost"])
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_merge(name: str, as_json: list[str]) -> None:
    written(Path("one"), record(**RUN_FILES[name](EVERYTHING)))
    assert_spelled(attnfuzz("merge", "out", "one", *as_json))


@pytest.mark.parametrize("content", [EVERYTHING, json.dumps({"format": f"\x1b{MARK}\u202e"})], ids=["no JSON", "a format"])
def test_a_broken_run_file(content: str) -> None:
    folder = written(Path("one"), record())
    (folder / "runs" / f"{NO_COLON.replace(chr(0), '').replace('/', '')[:200]}.json").write_text(content)
    assert_spelled(attnfuzz("report", "one", "--pictures", "0"))


# --- the gate

FINDING = Finding(
    "campaign", "acme.flash", "m", "mismatch", "dk", "element", case="c.json", blob="AF1-abc=", described=(("a", "b"),)
)
GATE_PARTS: dict[str, Callable[[str], Gate]] = {
    "kernel": lambda text: gated(kernel=text),
    "why": lambda text: gated(why=text),
    "file": lambda text: gated(file=text),
    "summary": lambda text: gated(summary=text),
    "message": lambda text: gated(dataclasses.replace(FINDING, message=text)),
    "finding's kernel": lambda text: gated(dataclasses.replace(FINDING, kernel=text)),
    "described": lambda text: gated(dataclasses.replace(FINDING, described=((text, text),))),
    "detail": lambda text: gated(dataclasses.replace(FINDING, part="load", detail=text)),
    "case": lambda text: gated(dataclasses.replace(FINDING, case=text)),
    "issue": lambda text: gated(dataclasses.replace(FINDING, waiver=Waiver(2, text, "2999-01-01"))),
    "ledger entry": lambda text: gated(ledger="l.toml", stale=((text, 3),)),
    "ledger file": lambda text: gated(ledger=text, stale=(("entry 1", 3),)),
    "note": lambda text: gated(notes=(text,)),
    "against": lambda text: gated(against=text),
    "versions": lambda text: gated(environment={"versions": {text: text}}),
}


def gated(
    *findings: Finding, kernel: str = "acme.flash", why: str = "w", file: str = "k.py", summary: str = "s", **of: Any
) -> Gate:
    parts = (Part("campaign", "fail", summary, findings), Part("speed", "error", summary))
    return Gate(**{"against": "main", "kernels": (KernelGate(kernel, why, parts, file, 1),), "seconds": 1.0, **of})


@pytest.mark.parametrize("part", GATE_PARTS.values(), ids=GATE_PARTS)
def test_gate(part: Callable[[str], Gate], capsys: pytest.CaptureFixture[str]) -> None:
    done = part(EVERYTHING)
    show_gate(console(), done)
    outputs = {"terminal": capsys.readouterr().out, "JSON": texts.dumps(gate_object(done))}
    outputs["annotations"] = "\n".join(github.annotation_lines(done))
    pages = {"JUnit": junit(done), "Markdown": markdown(done)}
    for name, output in outputs.items():
        assert not obeyed(output, annotated=name == "annotations"), (name, output)
    for name, output in pages.items():
        assert not obeyed(output, on_page=True), (name, output)
    assert any(MARK in each for each in (*outputs.values(), *pages.values()))


def test_the_gates_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with GateProgress(console()) as progress:
        progress(PartProgress(NO_COLON, "campaign", EVERYTHING))
        progress(PartFinished(EVERYTHING, Part("campaign", "pass", EVERYTHING)))
    assert_spelled(capsys.readouterr().out)


# --- listeners, and tables of the other commands

EVENTS = {
    "a kernel that cannot run": KernelSkipped(EVERYTHING, EVERYTHING),
    "a case that is not tried": CaseSkipped(EVERYTHING, EVERYTHING),
    "a kernel that breaks": KernelBroke(EVERYTHING, EVERYTHING),
    "a case that is not kept": CaseNotKept(
        case_from_object({"format": 1, "kernel": NO_COLON, "problem": PROBLEM, "config": {"tile": EVERYTHING}}),
        EVERYTHING,
        True,
    ),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_events(event: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(console(), live=False)(event)
    assert_spelled(capsys.readouterr().out)


def row_of_compile(**changed: Any) -> Row:
    given = {"kernel": "k", "key": "k", "config": {"a": 1}, "arch": "sm_90a", "function": "f", "ok": False, "seconds": 1.0}
    return Row(**{**given, "shared_limit": 1024, "error": "e", "kind": "compile-error", **changed})


COMPILED = {
    name: row_of_compile(**{name: EVERYTHING}) for name in ("kernel", "key", "arch", "function", "error", "kind", "case")
} | {"config": row_of_compile(config={EVERYTHING: EVERYTHING}), "races": row_of_compile(ok=True, races=[EVERYTHING])}


@pytest.mark.parametrize("row", COMPILED.values(), ids=COMPILED)
def test_compile(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    left = (Left("k", EVERYTHING),)
    show_compiled(console(), [row], left)
    assert_spelled(capsys.readouterr().out)
    assert_spelled(compile_markdown([row], left, {"nvcc": EVERYTHING}, "attnfuzz compile"), on_page=True)


def test_check_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    done = Conformance(EVERYTHING, "cpu", (Check(EVERYTHING, "wrong", EVERYTHING, EVERYTHING),), 1.0)
    show_conformance(console(), done)
    assert_spelled(capsys.readouterr().out)
    assert_spelled(texts.dumps(conformance_object(done)))


def test_selftest(capsys: pytest.CaptureFixture[str]) -> None:
    row = FaultRow("k", EVERYTHING, "x", EVERYTHING, EVERYTHING, EVERYTHING, 1, 1, None, (EVERYTHING,))
    show_faults(console(), Faults((row,), Leaks(1, 1.0, (1, 1), (1, 1), (EVERYTHING,)), 1.0))
    assert_spelled(capsys.readouterr().out)
    memory_row = MemoryRow(*[EVERYTHING] * 7, 1, (EVERYTHING,))
    show_memory(console(), MemoryTried((memory_row,), (CleanRow("k", 1, (EVERYTHING,)),), 1.0, {"unchecked": EVERYTHING}))
    assert_spelled(capsys.readouterr().out)


# --- the console


def printed(show: Callable[[SafeConsole], None], **options: Any) -> str:
    text = StringIO()
    show(SafeConsole(file=text, width=60, **options))
    return text.getvalue()


def _in_a_table(screen: SafeConsole) -> None:
    table = Table(EVERYTHING.replace("[", "("))
    table.add_row(Text(EVERYTHING))
    screen.print(table)


def _in_progress(screen: SafeConsole) -> None:
    with Progress(console=screen, auto_refresh=False) as progress:
        progress.add_task(EVERYTHING.replace("[", "("), total=1)
        progress.refresh()


WAYS: dict[str, Callable[[SafeConsole], None]] = {
    "a string": lambda screen: screen.print(EVERYTHING, markup=False),
    "a string that is wrapped": lambda screen: screen.print("x" * 59 + " ::stop-commands::a " + EVERYTHING, markup=False),
    "a string without line breaks": lambda screen: screen.print(EVERYTHING, markup=False, soft_wrap=True, highlight=False),
    "a Text": lambda screen: screen.print(Text(EVERYTHING)),
    "an object": lambda screen: screen.print([EVERYTHING]),
    "a table": _in_a_table,
    "a rule": lambda screen: screen.rule(EVERYTHING.replace("[", "(")),
    "a log": lambda screen: screen.log(EVERYTHING, markup=False),
    "out": lambda screen: screen.out(EVERYTHING),
    "progress without a terminal": _in_progress,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_ways_to_print(way: Callable[[SafeConsole], None]) -> None:
    assert not obeyed(printed(way))


def test_colours_and_boxes_are_not_foreign() -> None:
    output = printed(lambda screen: screen.print("[bold]a\x1b[2J[/]│"), force_terminal=True, color_system="standard")
    assert output == "\x1b[1ma\\x1b\x1b[0m\x1b[1m[\x1b[0m\x1b[1;36m2J\x1b[0m\x1b[1m]\x1b[0m│\n" or "\x1b[1m" in output
    assert "\x1b[2J" not in output
    assert "│" in output


def test_progress_on_a_terminal_moves_the_cursor_by_richs_own_codes_only() -> None:
    output = printed(_in_progress, force_terminal=True, color_system=None)
    assert "\x1b]52" not in output
    assert "\u202e" not in output
    assert "\x07" not in output


def test_a_reader_understands_what_was_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "boom\n  ::error file=x::pwn\na ##[group]b"
    assert printed(lambda screen: screen.print(text, markup=False)) == "boom\n  \\::error file=x::pwn\na #\\#[group]b\n"
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert printed(lambda screen: screen.print(text, markup=False)) == f"{text}\n"


def test_text_is_no_picture() -> None:
    assert printed(lambda screen: screen.print(":boom:")) == ":boom:\n"


# --- one place

PRINTERS = {
    "echo": {"harness/cli/streams.py"},
    "Console": {"harness/report/console.py"},
    "secho": set[str](),
    "Markup": set[str](),
}
"""Who may call what prints text as it is."""
WRITERS = {
    "harness/cli/start.py",
    "harness/repro/script/runtime.py",
    "harness/compile/child.py",
    "kernels/triton/machine_code/lower.py",
}
"""Modules that write to a stream: the start of the command, before anything is imported, in words of its own; a script that knows
no attnfuzz; and children whose output is read by their parent."""


def _calls() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "harness").rglob("*.py")):
        text = path.read_text()
        if not any(each in text for each in ("click", "Console", "stdout", "stderr", "command_github")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(ROOT)), ast.unparse(node.func)


def test_nothing_prints_around_the_printer() -> None:
    for path, call in _calls():
        name = call.rpartition(".")[2]
        if call.startswith("click.") or name in ("Console", "secho"):
            assert path in PRINTERS.get(name, {path}), f"{path}: {call}; use echo of harness/cli/streams.py, or SafeConsole"
        if call in ("sys.stdout.write", "sys.stderr.write"):
            assert path in WRITERS, f"{path}: {call}"
        if call == "command_github":
            assert path == "harness/cli/gate.py"
