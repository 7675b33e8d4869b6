"""The failures of one kernel in one run: one finding for each identity, with its case file and its events."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from msgspec.structs import replace

from attnfuzz.harness.campaign.contrast import Contrast
from attnfuzz.harness.campaign.corpus import Corpus
from attnfuzz.harness.campaign.events import CaseNotKept, FailureFound, Finding, Listener, Shrunk
from attnfuzz.harness.campaign.explain import Explanation
from attnfuzz.harness.campaign.shared_failures import SharedFailures
from attnfuzz.harness.core.signals import uninterrupted
from attnfuzz.harness.judge.failure import OUTPUT_TITLES, Identity
from attnfuzz.kernels.contract import Kernel
from attnfuzz.strategies.case import Case

__all__ = ["Findings"]


class Findings:
    """Keeps each failure once.

    A finding is open while its Case is shrunk; its case file is written before that, and replaced when it is closed.

    Args:
        kernel: the one that fails.
        corpus: where case files go; None: nowhere.
        listener: called with an event for each finding.
        seed: of the run, for the case files.
        shared: failures that other shards keep are not kept here; None: there are no others.
    """

    def __init__(
        self, kernel: Kernel, corpus: Corpus | None, listener: Listener, seed: int, shared: SharedFailures | None = None
    ) -> None:
        self._kernel, self._corpus, self._listener, self._seed = kernel, corpus, listener, seed
        self._shared = shared
        self.closed: dict[Identity, Finding] = {}
        self._open: dict[Identity, Finding] = {}
        self._known: set[Identity] = set()
        self.elsewhere: dict[Identity, Finding] = {}
        """Failures that another shard keeps, each with the Case that showed it here."""
        self.not_kept: str | None = None
        """Why Cases could not be written to disk; None where they could. The run goes on, and events carry the Cases."""

    def knows(self, identity: Identity) -> bool:
        """Whether a failure is known: it is open, closed or ignored."""
        return identity in self._known or identity in self._open

    @property
    def ended(self) -> int:
        """Return the number of failures that are closed here, or that another shard keeps."""
        return len(self.closed) + len(self.elsewhere)

    @property
    def count(self) -> int:
        """Return the number of failures, those that are open too."""
        return len(self._open) + self.ended

    def ignore(self, identities: set[Identity]) -> None:
        """Count failures as known without keeping them."""
        self._known |= identities

    def claimed_elsewhere(self, finding: Finding) -> bool:
        """Claim a failure for this shard; returns whether another one has, by which it counts as known here."""
        if self._shared is None or self._shared.claim(finding.identity) is None:
            return False
        self.elsewhere[finding.identity] = finding
        self._known.add(finding.identity)
        return True

    def open(self, finding: Finding, seconds: float | None = None) -> Finding:
        """Write a new finding to disk at once, so that nothing that happens later can lose it; returns it with its path.

        `seconds`: the most that shrinking it may take.
        """
        # Ctrl-C is often pressed when the first failure is seen: it must not be lost then.
        with uninterrupted():
            finding = dataclasses.replace(finding, path=self.write(finding))
            if self._shared:
                self._shared.note([finding.identity], finding.path, shrunk=False)
            self._open[finding.identity] = finding
            self._listener(FailureFound(finding, seconds))
        return finding

    def update(self, before: Identity, finding: Finding) -> None:
        """Replace an open finding, first seen as `before`, by what shrinking has made of it."""
        self._open[before] = finding

    def close(self, before: Identity) -> Finding:
        """Replace the case file of an open finding, first seen as `before`, by that of the minimal Case."""
        with uninterrupted():
            return self._close(before)

    def _close(self, before: Identity) -> Finding:
        shrunk = self._open.pop(before)
        whole = shrunk if shrunk.shrunk else dataclasses.replace(shrunk, shrunk=True, partly=True)
        finding = self._labelled(whole)
        finding = dataclasses.replace(finding, path=self.write(finding))
        if finding.path is not None and shrunk.path is not None and shrunk.path != finding.path:
            self.remove(Path(shrunk.path))
        self.closed[finding.identity] = finding
        # The other failures of the minimal Case are the same bug.
        same = {finding.identity, before, *(each.identity for each in shrunk.verdict.failures)}
        self._known |= same
        if self._shared:
            self._shared.note(same, finding.path, shrunk=True)
        self._listener(Shrunk(finding, before))
        return finding

    def close_all(self) -> None:
        """Close every open finding as far as it is shrunk."""
        for before in list(self._open):
            self.close(before)

    def compare(self, contrast: Contrast) -> None:
        """Add to closed findings, and to their files, what their Cases have in common that passing Cases have not."""
        for identity, finding in self.closed.items():
            explanation = finding.explanation or Explanation()
            common = contrast.common(identity)
            if common == explanation.common:
                continue
            self.closed[identity] = dataclasses.replace(finding, explanation=replace(explanation, common=common))
            if finding.path is not None and Path(finding.path).exists():
                self.write(self.closed[identity])

    def keep(self, finding: Finding, *, minimal: bool = False) -> None:
        """Open and close a finding that is not to be shrunk, unless its failure is known."""
        if self.knows(finding.identity) or self.claimed_elsewhere(finding):
            return
        self.update(finding.identity, dataclasses.replace(self.open(finding), shrunk=True, partly=not minimal))
        self.close(finding.identity)

    def remove(self, path: Path) -> None:
        """Remove a case file that a smaller one replaces."""
        if self._corpus:
            self._corpus.remove(path)

    def announce_not_kept(self, case: Case, error: OSError, *, failing: bool = False) -> None:
        """Announce that a Case could not be written; the run goes on."""
        where = f" ({error.filename})" if error.filename else ""
        self.not_kept = self.not_kept or f"{error.strerror or error}{where}"
        self._listener(CaseNotKept(case, self.not_kept, failing))

    def write(self, finding: Finding) -> str | None:
        """Write a case file without announcing the finding; returns its path, None where it could not be written."""
        if self._corpus is None:
            return None
        try:
            return str(self._corpus.write(finding, self._seed))
        except OSError as error:
            self.announce_not_kept(finding.case, error, failing=True)
            return None

    def _labelled(self, finding: Finding) -> Finding:
        """The finding; where an output declared deterministic is wrong only sometimes, under an identity that says so."""
        failure, identity = finding.failure, finding.identity
        deterministic = identity.output in self._kernel.capabilities.deterministic
        numeric = failure is not None and failure.identity == identity and identity.kind in ("mismatch", "nonfinite")
        if finding.rate is None or failure is None or not deterministic or not numeric:
            return finding
        title = OUTPUT_TITLES[identity.output] if identity.output else ""
        message = f"{title} differs from run to run, though declared deterministic: {failure.message}"
        first = replace(failure, kind="nondeterministic", message=message)
        others = (each for each in finding.verdict.failures if each is not failure)
        verdict = replace(finding.verdict, failures=(first, *others))
        # An output may differ by NaN in one run and by numbers in another: two findings, of which one is called so.
        taken = first.identity in self.closed
        return finding if taken else dataclasses.replace(finding, identity=first.identity, verdict=verdict)
