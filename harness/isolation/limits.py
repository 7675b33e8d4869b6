"""Limits of this process (`ulimit`) under which children cannot be started: each is refused before anything runs."""

from __future__ import annotations

import errno
import resource

from attnfuzz.kernels.errors import BadArgument, reject

__all__ = ["check_open_files", "explained"]

_LEAST, _ENOUGH = 256, 1024
"""Open files that a child needs, whose own descriptors begin at 200; and those of a run with many children at once."""


def check_open_files() -> None:
    """Raise the soft limit on open files as far as children need it and the hard limit lets it.

    Raises:
        BadArgument: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH:
        return
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if wanted < _LEAST:
        reason = f"child processes need at least {_LEAST} open files each"
        raise reject("ulimit -n", hard, reason, f"raise the limit (ulimit -n {_ENOUGH}, or nofile in /etc/security/limits.conf)")
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def explained(error: OSError, what: str) -> BadArgument | OSError:
    """Return the error of a process that cannot be started: under a limit of this user, one that names the limit."""
    if error.errno == errno.EAGAIN:
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limit = "unlimited" if most == resource.RLIM_INFINITY else most
        return reject("ulimit -u", limit, f"{what} cannot be started", "end other processes, or raise the limit (ulimit -u)")
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reason = f"{what} cannot be started: too many open files"
        return reject("ulimit -n", most, reason, f"raise the limit (ulimit -n {4 * most})")
    return error
