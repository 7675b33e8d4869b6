"""The folders of several runs, as of the shards of one, put together in one folder: case files, run files, maps, Cases in flight.

All of it is read and checked before anything is written, so that a broken file leaves the result as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from attnfuzz.harness.campaign.corpus import UNEXPLAINED, CaseFile, content_of, quoted, read_case
from attnfuzz.harness.campaign.coverage import Worst
from attnfuzz.harness.campaign.events import CampaignFinished, Finding, KernelBroke, KernelSkipped, KernelSummary
from attnfuzz.harness.campaign.journal import copy_left_behind
from attnfuzz.harness.core.files import exists, write_whole
from attnfuzz.harness.core.text import counted
from attnfuzz.harness.judge.errormap import copy_maps
from attnfuzz.harness.judge.failure import CAPTURED_TITLES, Failure, Identity
from attnfuzz.harness.judge.verdict import Verdict
from attnfuzz.harness.report.merge import MergedRuns, merge_runs, select_runs, size_of, value
from attnfuzz.harness.report.runfile import Broken, FailureRecord, KernelRecord, RunRecord, runs_of, write_run
from attnfuzz.kernels.errors import BadArgument, reject
from attnfuzz.kernels.problem import OUTPUT_NAMES
from attnfuzz.strategies.case import BadCase, case_from_object

__all__ = ["MergedFolders", "merge_folders"]

_GAPS = 8
"""Runs of missing shards that are named."""


@dataclass(frozen=True, slots=True)
class MergedFolders:
    """What folders hold together: their latest runs as one, and what is missing from it."""

    finished: CampaignFinished
    runs: tuple[RunRecord, ...]
    case_files: int
    in_flight: int
    incomplete: tuple[str, ...]
    """Runs that did not finish, and shards that are in no folder: then the absence of failures says little."""
    without_case: tuple[str, ...]
    """Failures of which no Case is on disk."""
    left_out: tuple[str, ...] = ()
    """Error maps and Cases in flight that cannot be read, each with its path and the reason."""


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    runs: tuple[RunRecord, ...]
    latest: tuple[RunRecord, ...]
    cases: tuple[CaseFile, ...]


def merge_folders(out: Path, folders: Sequence[Path]) -> MergedFolders:
    """Merge `folders` into `out`, and add up the latest session of each.

    Of the Cases with one identity the smallest minimal one is kept, also among those that `out` has. The latest runs count as one
    session from then on, so that a report of `out` shows them together.

    Raises:
        BadArgument: a folder has no run, or a file in it is broken.
        OSError: something cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise reject("merge", str(out), "OUT is a file", "give a folder, which is made where there is none")
    for each in folders:
        if each.resolve() == out.resolve():
            raise reject("merge", str(each), "it is OUT as well", "give another folder for the result")
    sources = [_read(each) for each in folders]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise reject("merge", str(out), error.strerror or str(error), "give a folder that can be made and written") from None
    paths = _keep_cases(out, [*_cases_in(out), *(case for each in sources for case in each.cases)])
    in_flight, left_out = 0, list[str]()

    def leave_out(path: Path, reason: str) -> None:
        left_out.append(f"{path}: {reason}")

    for each in folders:
        left_out += _copy_maps(each, out)
        in_flight += len(copy_left_behind(each, out, leave_out))
        _copy_unexplained(each, out, leave_out)
    latest = _distinct(run for each in sources for run in each.latest)
    session = hashlib.sha256(" ".join(run.stamp for run in latest).encode()).hexdigest()[:16]
    for run in _distinct(run for each in sources for run in each.runs):
        own = session if run in latest else run.session
        write_run(out, msgspec.structs.replace(run, session=own, failures=[_moved(each, paths) for each in run.failures]))
    merged = merge_runs(latest)
    kept = {fingerprint: read_case(path) for fingerprint, path in paths.items()}
    findings = {(each.kernel, each.fingerprint): _finding(each, kept.get(each.fingerprint)) for each in merged.failures}
    without = [each.title for each in merged.failures if findings[each.kernel, each.fingerprint] is None]
    if merged.more_failures:
        without.append(f"{counted(merged.more_failures, 'failure')} beyond those that a run file holds")
    return MergedFolders(
        finished=_finished(merged, [each for each in findings.values() if each is not None]),
        runs=tuple(latest),
        case_files=len(list((out / "cases").glob("*.json"))),
        in_flight=in_flight,
        incomplete=(*_unfinished(merged), *_missing(latest)),
        without_case=tuple(without),
        left_out=tuple(left_out),
    )


def _read(folder: Path) -> _Folder:
    if not folder.is_dir():
        reason = "it is not a folder" if folder.exists() else "no such folder"
        raise reject("merge", str(folder), reason, "give folders that `attnfuzz run --out DIR` wrote to")
    records = list(runs_of(folder))
    if broken := [each.error for each in records if isinstance(each, Broken)]:
        raise BadArgument("\n".join(broken))
    runs = [each for each in records if isinstance(each, RunRecord)]
    if not runs:
        raise reject("merge", str(folder), "no run is recorded there", "give folders that `attnfuzz run --out DIR` wrote to")
    return _Folder(folder, tuple(runs), tuple(select_runs(runs, every=False)), tuple(_cases_in(folder)))


def _cases_in(folder: Path) -> list[CaseFile]:
    return [read_case(path) for path in sorted((folder / "cases").glob("*.json"))]


def _distinct(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the runs by stamp, each once: a folder may have been merged before."""
    return sorted({each.stamp: each for each in runs}.values(), key=lambda each: each.stamp)


def _keep_cases(out: Path, stored: Sequence[CaseFile]) -> dict[str, Path]:
    """Write the smallest minimal Case of each identity, and all without one; returns the files by the identity's fingerprint."""
    best: dict[Identity | str, CaseFile] = {}
    for each in stored:
        key = each.finding.identity or each.case.canonical()
        if key not in best or _order(each) < _order(best[key]):
            best[key] = each
    paths: dict[str, Path] = {}
    for key, each in best.items():
        path = out / "cases" / each.path.name
        if each.path != path:
            write_whole(path, content_of(each.path))
        if isinstance(key, Identity):
            paths[key.fingerprint] = path
    names = {each.path.name for each in best.values()}
    for each in stored:
        if each.path.parent == out / "cases" and each.path.name not in names:
            each.path.unlink(missing_ok=True)
    return paths


def _order(stored: CaseFile) -> tuple[bool, tuple[float, ...], str]:
    return stored.finding.minimal is not True, size_of(stored.case), stored.case.canonical()


def _copy_unexplained(source: Path, out: Path, leave_out: Callable[[Path, str], None]) -> None:
    for path in sorted((source / UNEXPLAINED).glob("*.json")):
        try:
            read_case(path)
            write_whole(out / UNEXPLAINED / path.name, content_of(path))
        except BadCase as error:
            leave_out(path, str(error))


def _copy_maps(source: Path, out: Path) -> list[str]:
    """Copy the error maps that are not in `out` yet; returns why others are left out."""
    left_out = []
    for path in sorted((source / "maps").glob("*.json")):
        target = out / "maps" / path.name
        if not exists(target):
            try:
                copy_maps(path, target)
            except BadArgument as error:
                left_out.append(str(error))
    return left_out


def _moved(failure: FailureRecord, paths: dict[str, Path]) -> FailureRecord:
    """Return the record of a failure with the path of its Case in the merged folder."""
    path = paths.get(failure.fingerprint)
    if path is None or failure.path is None:
        return failure
    repro = failure.repro and failure.repro.replace(quoted(failure.path), quoted(str(path)))
    return msgspec.structs.replace(failure, path=str(path), repro=repro)


def _finding(record: FailureRecord, stored: CaseFile | None) -> Finding | None:
    """Return the finding of a run file with the Case that is kept; None: no Case is known."""
    try:
        case = stored.case if stored else case_from_object(record.case)
        identity = stored.finding.identity if stored else None
        if identity is None:
            message = record.title.partition(" (")[2].removesuffix(")")
            data = {
                "kernel": record.kernel,
                "kind": record.kind,
                "output": record.output,
                "check": record.check,
                "message": message,
            }
            identity = msgspec.convert(data, Identity)
    except (BadCase, msgspec.ValidationError):
        return None
    seen = stored.finding if stored else None
    failure = Failure(
        kernel=identity.kernel,
        kind=identity.kind,
        check=identity.check,
        message=seen.message if seen else next(iter(record.messages), "").partition(": ")[2],
        output=identity.output,
        place=seen.place if seen else None,
        pattern=seen.pattern if seen else None,
    )
    return Finding(
        identity=identity,
        case=case,
        verdict=Verdict(
            status="fail", failures=(failure,), device=seen.device if seen else "", versions=seen.versions if seen else {}
        ),
        path=str(stored.path) if stored else None,
        cases_to_find=record.cases_to_find,
        seconds_to_find=record.seconds_to_find,
        shrunk=True,
        partly=seen.minimal is not True if seen else record.partly or not record.shrunk,
        shrink_trials=record.shrink_trials,
        rate=seen.rate if seen else record.rate,
    )


def _finished(merged: MergedRuns, findings: Sequence[Finding]) -> CampaignFinished:
    """Return the runs as the end of one: seconds are those of the longest, since shards run at the same time."""
    records = {each.kernel: each for each in merged.kernels}
    for each in findings:
        records.setdefault(each.identity.kernel, KernelRecord(kernel=each.identity.kernel))
    return CampaignFinished(
        summaries=tuple(
            _summary(record, [each for each in findings if each.identity.kernel == name])
            for name, record in sorted(records.items())
        ),
        skipped=tuple(KernelSkipped(each.what, each.reason) for each in merged.skipped),
        seconds=max((each.seconds for each in merged.runs), default=0.0),
        interrupted=any(each.state == "interrupted" for each in merged.runs),
        broken=tuple(KernelBroke(each.what, each.reason) for each in merged.broken),
        lost="; ".join(merged.lost) or None,
        seed=_seed(merged.runs),
    )


def _summary(record: KernelRecord, findings: Sequence[Finding]) -> KernelSummary:
    outputs = {
        name: Worst(
            cases=output.cases,
            unjudged=output.unjudged,
            worst=value(output.worst),
            failures=output.failures,
            sigmas=value(output.sigmas),
            r=value(output.r),
            z=value(output.z),
            doubted=output.doubted,
        )
        for name in OUTPUT_NAMES
        if (output := record.outputs.get(name)) is not None
    }
    return KernelSummary(
        kernel=record.kernel,
        cases=record.cases,
        shrink_cases=record.shrink_cases,
        reruns=record.reruns,
        seconds=record.seconds,
        compiles=record.compiles,
        compile_seconds=record.compile_seconds,
        refused=record.refused,
        failed_unjudged=record.failed_unjudged,
        unreached=record.unreached,
        replaced=record.replaced,
        outputs=outputs,
        captured={
            row: Worst(cases=each.cases, worst=value(each.worst), failures=each.failures)
            for row in CAPTURED_TITLES
            if (each := record.captured.get(row)) is not None
        },
        findings=tuple(findings),
        features=record.features,
        replayed=record.replayed,
        not_replayed=record.not_replayed,
        drawn=record.drawn,
        never_drawn={name: tuple(values) for name, values in record.never_drawn.items()},
    )


def _seed(runs: Sequence[RunRecord]) -> int | None:
    """Return the seed of all runs; None where they have several, or a file says something else."""
    seeds = {each.settings.get("seed", 0) for each in runs if isinstance(each.settings.get("seed", 0), int)}
    return next(iter(seeds)) if len(seeds) == 1 else None


def _unfinished(merged: MergedRuns) -> list[str]:
    """Describe each run that was killed, ended by an error or still runs; one that the user ended is no such run."""
    words = {"running": "it was killed or still runs", "error": "it ended by an error"}
    return [
        f"run {each.stamp}{_shard(each)} did not finish: {each.error or words[each.state]}"
        for each in merged.unfinished
        if each.state in words
    ]


def _shard(run: RunRecord) -> str:
    shard, shards = _numbers(run)
    return f" (shard {shard + 1}/{shards})" if shards > 1 else ""


def _missing(runs: Sequence[RunRecord]) -> list[str]:
    """Describe each shard that none of the runs is, and runs that are of different seeds or numbers of shards."""
    there: dict[tuple[str, int], set[int]] = {}
    for each in runs:
        shard, shards = _numbers(each)
        there.setdefault((str(each.settings.get("seed", 0)), shards), set()).add(shard)
    absent = [
        _in_no_folder(gaps, shards, seed) for (seed, shards), numbers in there.items() if (gaps := _gaps(sorted(numbers), shards))
    ]
    if len({shards for _, shards in there if shards > 1}) > 1 or (len(there) > 1 and any(shards > 1 for _, shards in there)):
        absent.append("the folders are of runs with different seeds or numbers of shards")
    return absent


def _gaps(numbers: Sequence[int], shards: int) -> list[tuple[int, int]]:
    """Return the first and last number of each run of shards, from 0, that `numbers`, which rise, do not name."""
    ends = (-1, *numbers, shards)
    return [(before + 1, after - 1) for before, after in pairwise(ends) if after - before > 1]


def _in_no_folder(gaps: Sequence[tuple[int, int]], shards: int, seed: str) -> str:
    """Describe missing shards in one line, however many there are."""
    count = sum(last - first + 1 for first, last in gaps)
    if count == 1:
        return f"shard {gaps[0][0] + 1}/{shards} of seed {seed} is in none of the folders"
    named = [str(first + 1) if first == last else f"{first + 1} to {last + 1}" for first, last in gaps]
    more = [f"{len(named) - _GAPS} more runs of them"] if len(named) > _GAPS else []
    return f"{count:,} of {shards:,} shards of seed {seed} are in none of the folders: {', '.join([*named[:_GAPS], *more])}"


def _numbers(run: RunRecord) -> tuple[int, int]:
    """Return the shard of a run, from 0, and the number of shards; a run file may say anything."""
    shard, shards = run.settings.get("shard", 0), run.settings.get("shards", 1)
    if isinstance(shard, int) and isinstance(shards, int) and 0 <= shard < shards:
        return shard, shards
    return 0, 1
