"""Defects of PyTorch's own kernels that are kept as case files: what is known of a peer is told, and is no alarm.

A defect is known by its whole identity (kernel, kind, output, check, and the message of an exception or crash) and only with the
versions that it was found with: another torch may have mended it, or have another one in its place. What is wrong in our own
kernels is never known, it is mended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from attnfuzz.harness.campaign.corpus import CaseFile, read_case
from attnfuzz.harness.judge.failure import Identity
from attnfuzz.kernels.problem import reject

__all__ = ["Known", "found_at", "matching", "read_known"]

_PEERS: Final = "torch."
_USUAL: Final = Path("tests/corpus/peers")
_DECIDING: Final[dict[str, tuple[str, ...]]] = {"torch.flex": ("torch", "triton")}
"""Packages whose version decides whether a peer is the same; for all others torch alone."""


@dataclass(frozen=True, slots=True)
class Known:
    """One kept defect: its Case, what it is, and the versions that decide whether it is still the same kernel."""

    stored: CaseFile
    identity: Identity
    versions: tuple[tuple[str, str], ...]

    def holds_for(self, versions: Mapping[str, str]) -> bool:
        """Whether it was found with these `versions`."""
        return all(versions.get(package) == version for package, version in self.versions)


def read_known(folder: Path | str) -> tuple[Known, ...]:
    """The case files of `folder`, by name.

    Raises:
        BadArgument: a file that cannot be read, tells no failure with its versions, or is of another kernel than a peer.
    """
    return tuple(_known(read_case(path)) for path in sorted(Path(folder).glob("*.json")))


def found_at(folder: str | None) -> tuple[Known, ...]:
    """What is kept in `folder`; None: in tests/corpus/peers, if there is such a folder here.

    Raises:
        BadArgument: `folder` is none, or holds what is no kept defect.
    """
    if folder is None:
        return read_known(_USUAL)
    if not Path(folder).is_dir():
        raise reject("known", folder, "no such folder", "give a folder of case files, or leave it out")
    return read_known(folder)


def matching(known: Iterable[Known], identity: Identity, versions: Mapping[str, str]) -> Known | None:
    """The kept defect that `identity` is, found with `versions`; or None."""
    return next((each for each in known if each.identity == identity and each.holds_for(versions)), None)


def _known(stored: CaseFile) -> Known:
    path = str(stored.path)
    if not stored.case.kernel.startswith(_PEERS):
        reason = f"{stored.case.kernel} is no peer of PyTorch ({_PEERS}*)"
        raise reject("known", path, reason, "mend the kernel; only a peer's defects are kept")
    try:
        identity = msgspec.convert(stored.found.get("identity"), Identity)
    except msgspec.ValidationError as error:
        raise reject("known", path, f"it tells no failure ({error})", "keep a case file that `attnfuzz run` wrote") from None
    if identity.kernel != stored.case.kernel:
        raise reject(
            "known", path, f"its failure is of {identity.kernel}, its Case of {stored.case.kernel}", "keep it as written"
        )
    told: Any = stored.found.get("versions")
    packages = _DECIDING.get(stored.case.kernel, ("torch",))
    if not isinstance(told, dict) or not all(isinstance(told.get(package), str) for package in packages):
        remedy = "keep a case file that `attnfuzz run` wrote"
        raise reject("known", path, f"it does not tell the versions of {', '.join(packages)}", remedy)
    return Known(stored, identity, tuple((package, told[package]) for package in packages))
