"""A git checkout: what changed since another commit, and that commit's files in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["Changes", "Checkout", "changes_since", "checkout_at", "first_changed_line", "worktree"]

_PREFIX = "attnfuzz-gate-"
_OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""Variables that git sets for its hooks; with them, our calls would apply to another folder than the one they run in."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """The working tree of a git repository: its top folder and the commit checked out, "" if there is none yet."""

    root: Path
    head: str

    def git(self, *arguments: str) -> str:
        """Run `git ARGUMENTS` in the checkout and return its output.

        Raises:
            BadArgument: git failed; the text is git's own.
        """
        return _git(self.root, *arguments)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the checkout's files since commit `base`, uncommitted ones included. Paths are relative to its root."""

    base: str
    label: str
    """The commit for reports: "3f2a91c4d0 (main)"."""
    changed: frozenset[str]
    """Files that were modified, renamed or added."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """New name -> name in `base`."""
    new: frozenset[str] = frozenset()
    deleted: frozenset[str] = frozenset()


def checkout_at(folder: Path) -> Checkout:
    """Return the checkout that `folder` lies in.

    Raises:
        BadArgument: `folder` is not in a checkout, or git is not installed.
    """
    try:
        root = _git(folder, "rev-parse", "--show-toplevel").strip()
    except BadArgument as error:
        if "not a git repository" not in str(error) and "must be run in a work tree" not in str(error):
            raise
        reason = "it is not in a git checkout"
        raise reject("folder", str(folder), reason, "run the gate in a clone, or compare with --baseline FILE") from None
    try:
        head = _git(Path(root), "rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
    except BadArgument:
        head = ""
    return Checkout(Path(root).resolve(), head)


def changes_since(checkout: Checkout, ref: str) -> Changes:
    """Return what changed since the merge base of the checkout and `ref`.

    Raises:
        BadArgument: `ref` is not a commit here, or has no commit in common with the checkout.
    """
    if not checkout.head:
        raise reject("base", ref, "the checkout has no commit yet", "commit something first")
    base = _merge_base(checkout, _commit(checkout, ref))
    changed, renamed, new, deleted = set[str](), dict[str, str](), set[str](), set[str]()
    words = iter(checkout.git("diff", "--name-status", "-z", "--find-renames", "--no-ext-diff", base, "--").split("\0"))
    for status in words:
        if not status:
            continue
        name = next(words)
        if status[0] in "RC":
            former, name = name, next(words)
            renamed[name] = former
            if status[0] == "R":
                deleted.add(former)
        elif status[0] == "A":
            new.add(name)
        if status[0] == "D":
            deleted.add(name)
        else:
            changed.add(name)
    listed = checkout.git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
    # An environment in the checkout that git does not ignore.
    environment = Path(sys.prefix).resolve()
    untracked = {each for each in listed if each and not (checkout.root / each).is_relative_to(environment)}
    return Changes(
        base=base,
        label=f"{base[:10]} ({ref})" if not base.startswith(ref) else base[:10],
        changed=frozenset(changed | untracked),
        renamed=renamed,
        new=frozenset(new | untracked),
        deleted=frozenset(deleted - changed - untracked),
    )


def first_changed_line(checkout: Checkout, changes: Changes, file: str) -> int:
    """Return the first line of `file` that differs from `changes.base`; 1 if unknown."""
    former = changes.renamed.get(file, file)
    try:
        diff = checkout.git(
            "diff", "--unified=0", "--no-color", "--no-ext-diff", "--find-renames", changes.base, "--", former, file
        )
    except BadArgument:
        return 1
    hunk = re.search(r"^@@ -\S+ \+(\d+)", diff, re.MULTILINE)
    return max(1, int(hunk[1])) if hunk else 1


@contextlib.contextmanager
def worktree(checkout: Checkout, commit: str) -> Iterator[Path]:
    """Yield a temporary worktree with the files of `commit`, removed at the end in any case.

    Raises:
        BadArgument: git could not create it (a full disk, a read-only repository).
    """
    _clear_left_behind(checkout)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")).resolve()
    files = folder / "base"
    try:
        try:
            # The repository's hooks must not run for this.
            checkout.git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--force", str(files), commit)
        except BadArgument as error:
            raise BadArgument(f"base: its files cannot be checked out into {folder}: {error}") from None
        yield files
    finally:
        _remove(checkout, folder)


def _remove(checkout: Checkout, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(BadArgument):
        checkout.git("worktree", "prune")


def _clear_left_behind(checkout: Checkout) -> None:
    """Remove worktrees of gates that were killed before they could."""
    for line in checkout.git("worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree ")).parent
        if (
            line.startswith("worktree ")
            and (name := re.fullmatch(rf"{_PREFIX}(\d+)-\w+", folder.name))
            and not _lives(int(name[1]))
        ):
            _remove(checkout, folder)


def _lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def _commit(checkout: Checkout, ref: str) -> str:
    try:
        if ref.startswith("-"):
            raise BadArgument(ref)
        return checkout.git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
    except BadArgument:
        remedy = "fetch it first (git fetch origin BRANCH), and name it as git does: origin/main, a tag, a commit"
        if _is_shallow(checkout):
            remedy = "this clone is shallow: fetch the rest (git fetch --unshallow origin; for actions/checkout: fetch-depth: 0)"
        raise reject("base", ref, "git knows no such commit here", remedy) from None


def _merge_base(checkout: Checkout, commit: str) -> str:
    try:
        return checkout.git("merge-base", commit, checkout.head).strip()
    except BadArgument:
        if _is_shallow(checkout):
            remedy = "fetch the rest of it (git fetch --unshallow origin; for actions/checkout: fetch-depth: 0)"
            raise reject("base", commit[:10], "this clone is too shallow to find their merge base", remedy) from None
        remedy = "name a commit of the same history"
        raise reject("base", commit[:10], "it has no commit in common with the checkout", remedy) from None


def _is_shallow(checkout: Checkout) -> bool:
    return checkout.git("rev-parse", "--is-shallow-repository").strip() == "true"


def _git(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in _OWN} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            # A terminal's Ctrl-C is for the gate, which then still needs git to clear up.
            start_new_session=True,
        )
    except FileNotFoundError:
        if not folder.is_dir():
            raise reject("folder", str(folder), "there is none", "run the gate in a git checkout") from None
        raise BadArgument("git: it is not installed; install it, or compare with --baseline FILE") from None
    if done.returncode:
        said = done.stderr.strip().removeprefix("fatal: ") or f"git {arguments[0]} ended with exit code {done.returncode}"
        raise BadArgument(f"git: {said}")
    return done.stdout
