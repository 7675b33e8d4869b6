"""The case files of a folder: listed, pruned of what is not needed any more, and minimised."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from attnfuzz.harness.campaign.corpus import CaseFile, Corpus, read_case
from attnfuzz.harness.isolation.child import ChildError
from attnfuzz.harness.isolation.outcomes import ExecutionError
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.harness.repro.reproduce import Where, outcome_of, verdict_or_lost
from attnfuzz.harness.repro.reshrink import shrink_further
from attnfuzz.harness.trial.supports import why_not_case
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["Entry", "Listing", "Minimised", "Pruning", "Removal", "listed", "minimise", "prune", "remove", "size_of"]

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A case file that was read. `stamp`: (inode, time) of the file then, so that another in its place is never removed."""

    stored: CaseFile
    written: float
    """Seconds since the epoch: when a run last wrote it, since it failed."""
    stamp: tuple[int, int]

    @property
    def identity(self) -> Identity | None:
        """The failure's identity, where the file has one."""
        return self.stored.finding.identity

    @property
    def last_seen(self) -> str:
        """Date and time, UTC, at which a run last saw it fail."""
        return datetime.fromtimestamp(self.written, UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Listing:
    """The case files of a folder. `unreadable`: (file, reason) of those that are left alone."""

    folder: Path
    entries: tuple[Entry, ...]
    unreadable: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """A case file that is not needed, and why."""

    entry: Entry
    reason: str


@dataclass(slots=True)
class Pruning:
    """What may be removed, what still fails, and what is left for another reason: (file, reason)."""

    removals: list[Removal] = field(default_factory=list)
    failing: list[Entry] = field(default_factory=list)
    left: list[tuple[Path, str]] = field(default_factory=list)
    interrupted: bool = False


@dataclass(slots=True)
class Minimised:
    """The smaller files that were written, (before, after); what they and simpler ones replace; and what is left as it was."""

    smaller: list[tuple[Path, Path]] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    left: list[tuple[Path, str]] = field(default_factory=list)
    interrupted: bool = False


def listed(out: Path | str, kernels: Sequence[str] = ()) -> Listing:
    """Read the case files of `out`/cases, sorted by kernel and name, by default those of all kernels.

    Raises:
        BadArgument: there is no folder `out`, or no case of a kernel that is named.
    """
    if not Path(out).is_dir():
        raise reject("out", str(out), "there is no such folder", "give the --out of a run")
    folder = Corpus(out).folder
    entries, unreadable = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            state = path.stat()
            entries.append(Entry(read_case(path), state.st_mtime, (state.st_ino, state.st_mtime_ns)))
        except (BadArgument, OSError) as error:
            unreadable.append((path, str(error)))
    entries.sort(key=lambda each: (each.stored.case.kernel, each.stored.path.name))
    there = {each.stored.case.kernel for each in entries}
    if absent := [name for name in kernels if name not in there]:
        reason = f"no case of it is in {folder}"
        raise reject("kernel", absent[0], reason, f"kernels there: {', '.join(sorted(there)) or 'none'}")
    chosen = tuple(each for each in entries if not kernels or each.stored.case.kernel in kernels)
    return Listing(folder, chosen, tuple(unreadable))


def size_of(entry: Entry) -> int:
    """Elements of q, k and v, by which the simplest of several Cases is chosen."""
    p = entry.stored.case.problem
    return p.heads * p.total_q * p.dim_qk + p.kv_heads * p.total_k * (p.dim_qk + p.dim_v)


def prune(listing: Listing, where: Where, note: Note = lambda _: None) -> Pruning:
    """Run each Case, and say which files are not needed; nothing is removed. Ctrl-C ends it with the result until then.

    A file is not needed if no kernel has its name, if its Case passes, or if it fails as a simpler one does. What cannot be
    run is left, since nothing is known of it.
    """
    done = Pruning()
    try:
        for kernel, entries in _by_kernel(listing.entries):
            if reason := _why_unknown(kernel, entries):
                if any(each.stored.finding.target for each in entries):
                    # It may be elsewhere: the file says where, and is not trusted.
                    done.left += [(each.stored.path, reason) for each in entries]
                else:
                    done.removals += [Removal(each, f"no kernel is called {kernel!r} any more") for each in entries]
                continue
            _run(entries, where, done, note)
    except KeyboardInterrupt:
        done.interrupted = True
    done.removals += list(_duplicates(done.failing))
    return done


def _by_kernel(entries: Iterable[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    groups: dict[str, list[Entry]] = {}
    for each in entries:
        groups.setdefault(each.stored.case.kernel, []).append(each)
    yield from groups.items()


def _why_unknown(kernel: str, entries: Sequence[Entry]) -> str | None:
    """Why there is no kernel of a name, or None. Errors of one that is there are left to its run."""
    try:
        registry.get(kernel)
    except registry.UnknownKernel as error:
        target = next((each.stored.finding.target for each in entries if each.stored.finding.target), None)
        return f"not run: it was found at {target}: add --kernel {shlex.quote(target)}" if target else str(error)
    except BadArgument:
        return None
    return None


def _run(entries: Sequence[Entry], where: Where, done: Pruning, note: Note) -> None:
    """Run the Cases of one kernel in one runner, in a new one after the device was lost."""
    rest = list(entries)
    while rest:
        try:
            device, kernel = where.device_for(rest[0].stored.case)
            with where.runner(device, kernel) as runner:
                lost = False
                while rest and not lost:
                    entry = rest[0]
                    case, identity = entry.stored.case, entry.identity
                    note(entry.stored.path.name)
                    if reason := why_not_case(kernel, case, device):
                        done.left.append((entry.stored.path, f"not run: {kernel.name} does not support it: {reason}"))
                        rest.pop(0)
                        continue
                    verdict, lost = verdict_or_lost(runner, case, entry.stored.rate)
                    rest.pop(0)
                    outcome = outcome_of(verdict, identity.output if identity else None)
                    if outcome == "FIXED":
                        done.removals.append(Removal(entry, f"it passes on {device}"))
                    elif outcome == "UNJUDGED":
                        done.left.append((entry.stored.path, "the output that was wrong cannot be judged any more"))
                    else:
                        done.failing.append(entry)
        except (BadArgument, ChildError, ExecutionError, OSError) as error:
            entry = rest.pop(0)
            done.left.append((entry.stored.path, f"not run: {error}"))


def _duplicates(failing: Sequence[Entry]) -> Iterator[Removal]:
    """Those that fail as a simpler one does; files without an identity have no duplicates."""
    for entries in _by_identity(failing):
        first, *others = sorted(entries, key=_simplest)
        for each in others:
            yield Removal(each, f"the same failure as {first.stored.path.name}, which is simpler")


def _by_identity(entries: Iterable[Entry]) -> list[list[Entry]]:
    groups: dict[object, list[Entry]] = {}
    for each in entries:
        groups.setdefault(each.identity or each.stored.path, []).append(each)
    return list(groups.values())


def _simplest(entry: Entry) -> tuple[int, int, str]:
    return size_of(entry), len(entry.stored.case.canonical()), entry.stored.path.name


def minimise(listing: Listing, seconds: float, where: Where, note: Note = lambda _: None) -> Minimised:
    """Shrink the simplest Case of each identity further, for an equal share of `seconds`; say which files are replaced by it.

    A smaller Case's file is written beside the others; nothing is removed. The other Cases of an identity are not needed if the
    simplest still fails. Ctrl-C ends it with the result until then.
    """
    done, end = Minimised(), time.monotonic() + seconds
    groups = _by_identity(listing.entries)
    for number, entries in enumerate(groups):
        first, *others = sorted(entries, key=_simplest)
        path = first.stored.path
        share = max(1.0, (end - time.monotonic()) / (len(groups) - number))
        note(path.name)
        try:
            result = shrink_further(first.stored, share, where, listing.folder)
        except KeyboardInterrupt:
            done.interrupted = True
            return done
        except (BadArgument, ChildError, ExecutionError, OSError) as error:
            done.left += [(each.stored.path, f"not run: {error}") for each in entries]
            continue
        if result.outcome == "FIXED" or result.identity != (first.identity or result.identity):
            reason = "it passes: attnfuzz corpus prune removes it" if result.outcome == "FIXED" else "it fails in another way now"
            done.left.append((path, reason))
            done.left += [(each.stored.path, f"not run: {path.name} does not show their failure") for each in others]
            continue
        kept = Path(result.path) if result.path else path
        if kept != path:
            done.smaller.append((path, kept))
            done.removals.append(Removal(first, f"replaced by {kept.name}, which is smaller"))
        reason = f"the same failure as {kept.name}, which is simpler"
        done.removals += [Removal(each, reason) for each in others if each.stored.path != kept]
        if result.partly and result.seconds < share * 0.8:
            # Ctrl-C ends shrinking, and the rest.
            done.interrupted = True
            return done
    return done


def remove(removals: Iterable[Removal]) -> Iterator[tuple[Removal, str | None]]:
    """Remove files; yield each with why it could not be removed, or None. One that a run has written since is left."""
    for each in removals:
        path = each.entry.stored.path
        try:
            state = path.lstat() if not path.is_symlink() else path.stat()
            if (state.st_ino, state.st_mtime_ns) != each.entry.stamp:
                yield each, "left: it has changed since it was read"
                continue
            path.unlink()
        except FileNotFoundError:
            yield each, "left: it is not there any more"
        except OSError as error:
            yield each, f"left: it cannot be removed ({error.strerror})"
        else:
            yield each, None
