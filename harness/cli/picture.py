"""`attnfuzz repro CASE --plot FILE`: error maps of one Case, drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnfuzz.harness.cli.options import writable
from attnfuzz.kernels.errors import reject

if TYPE_CHECKING:
    from rich.console import Console

    from attnfuzz.harness.campaign.corpus import CaseFile
    from attnfuzz.harness.repro.reproduce import Reproduction, Where

__all__ = ["Picture"]


class Picture:
    """The picture file of a case file's error maps: `target`, or in the folder `target` named like the case file.

    Raises:
        BadArgument: matplotlib is not installed, or the file has no known format or cannot be written. Checked before any run.
    """

    def __init__(self, target: str, stored: CaseFile) -> None:
        from attnfuzz.harness.report import plots

        plots.needs_matplotlib()
        path = Path(target)
        if path.is_dir() or target.endswith("/"):
            path = path / f"{stored.path.stem}.png"
        if path.suffix not in plots.SUFFIXES:
            remedy = f"give a file that ends with {', '.join(plots.SUFFIXES)}, or a folder"
            raise reject("plot", target, "no such format", remedy)
        self.path, self._stored = writable(str(path), "plot"), stored

    def draw(self, done: Reproduction, where: Where) -> dict[str, Any]:
        """Run the Case once more, as it was run, and draw it: {"plot": path}, or {"plot": None, "no_plot": why}."""
        from attnfuzz.harness.report import plots
        from attnfuzz.harness.repro.reproduce import map_errors

        maps = map_errors(self._stored.case, replace(where, device=done.device), rate=self._stored.rate)
        if isinstance(maps, str):
            return {"plot": None, "no_plot": maps}
        failure = done.verdict.failure
        title = str(failure.identity) if failure else f"{self._stored.case.kernel}: nothing wrong"
        plots.save(maps, self.path, title, plots.subtitle(maps))
        return {"plot": str(self.path)}

    def show(self, console: Console, done: Reproduction, where: Where) -> None:
        """Draw it, and print its path or why there is none."""
        result = self.draw(done, where)
        line = f"plot: {result['plot']}" if result["plot"] else f"no plot: {result['no_plot']}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)
