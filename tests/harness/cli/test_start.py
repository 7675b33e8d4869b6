"""The commands start fast: what they import, and how long that takes."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys

import pytest
import torch

HEAVY = {"torch", "triton", "tilelang", "hypothesis", "numpy", "pytest", "matplotlib", "jinja2", "rich.table", "rich.progress"}


def imported(*arguments: str) -> set[str]:
    """All modules of a process that ran `attnfuzz` with `arguments`."""
    program = "import sys\nfrom attnfuzz.harness.cli.main import main\ntry: main()\nfinally: print('\\n', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("repro", "--help"), ("list",)], ids=" ".join)
def test_what_is_imported(arguments: tuple[str, ...]) -> None:
    if arguments == ("list",) and torch.cuda.is_available():
        pytest.skip("kernels ask torch about the device")
    assert not HEAVY & imported(*arguments)


@pytest.mark.parametrize(("arguments", "limit"), [(("--help",), 0.4), (("list",), 2.0)], ids=["help", "list"])
def test_how_long_it_takes(arguments: tuple[str, ...], limit: float) -> None:
    """Thrice the limits of an idle machine, in time of a core: other tests run at the same time."""
    if arguments == ("list",) and torch.cuda.is_available():
        pytest.skip("kernels ask torch about the device, whose import takes most of the time")
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "attnfuzz.harness.cli", *arguments], capture_output=True, check=True, cwd="/")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert sorted(seconds)[1] < 3 * limit


@pytest.mark.parametrize(
    "arguments",
    [("run", "triton.varlen", "--device", "cpu"), ("run", "no.such:KERNEL"), ("gate", "--base", "main", "--device", "cpu")],
    ids=" ".join,
)
def test_the_first_line_comes_before_torch_and_within_half_a_second(arguments: tuple[str, ...]) -> None:
    """The limit is in time of a core, as above: other tests run at the same time."""
    program = """if True:
        import os, resource, sys

        class Out:
            encoding = "utf-8"

            def write(self, text):
                used = resource.getrusage(resource.RUSAGE_SELF)
                loaded = {"torch", "triton", "tilelang", "rich.table", "rich.progress"} & set(sys.modules)
                if not text:  # click asks whether bytes can be written
                    return 0
                text = text if isinstance(text, str) else text.decode()
                os.write(2, repr((text, sorted(loaded), used.ru_utime + used.ru_stime)).encode())
                os._exit(0)

            def flush(self):
                pass

            def isatty(self):
                return False

        sys.stdout = Out()
        from attnfuzz.harness.cli.main import main
        main()
    """
    seconds = []
    for _ in range(3):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
        text, loaded, used = ast.literal_eval(done.stderr)
        assert text.startswith("attnfuzz ")
        assert loaded == []
        seconds.append(used)
    assert sorted(seconds)[1] < 3 * 0.5
