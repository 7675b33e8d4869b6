"""Git checkouts of every state, the files that a kernel is made of, and modules as another commit has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import gate as support_gate
from support.gate import Repository, git

from attnfuzz.harness.campaign.corpus import repro_line
from attnfuzz.harness.gate.base.checkout import Changes, Checkout, changes_since, checkout_at, first_changed_line, worktree
from attnfuzz.harness.gate.side import base_environment
from attnfuzz.harness.gate.subjects import files_of, named, why_absent
from attnfuzz.kernels import registry
from attnfuzz.kernels.errors import BadArgument


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.create(tmp_path, "one", "two")


@pytest.fixture
def importable(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """The package `acme` of the repository can be imported in this process."""
    monkeypatch.syspath_prepend(str(repository.root / "src"))
    for table in ("_registered", "_loaded", "_origins"):
        monkeypatch.setattr(registry, table, {})
    yield repository
    for name in [each for each in sys.modules if each.split(".")[0] == "acme"]:
        del sys.modules[name]


def since(repository: Repository, ref: str) -> Changes:
    return changes_since(checkout_at(repository.root), ref)


def test_committed_staged_unstaged_and_new_files_count_as_head(repository: Repository) -> None:
    base = git(repository.root, "rev-parse", "HEAD").strip()
    repository.write("src/acme/committed.py", "")
    repository.commit("more")
    repository.edit("one", *support_gate.HARMLESS)
    repository.edit("two", *support_gate.HARMLESS)
    git(repository.root, "add", "src/acme/two.py")
    repository.write("src/acme/untracked.py", "")
    repository.write(".gitignore", "*.log\n")
    repository.write("x.log", "")
    found = since(repository, base)
    assert found.base == base
    assert found.changed == {f"src/acme/{name}.py" for name in ("committed", "one", "two", "untracked")} | {".gitignore"}
    assert found.new == {"src/acme/committed.py", "src/acme/untracked.py", ".gitignore"}


def test_what_base_did_meanwhile_is_no_change_of_ours(repository: Repository) -> None:
    git(repository.root, "checkout", "-qb", "work")
    repository.edit("one", *support_gate.HARMLESS)
    repository.commit("ours")
    git(repository.root, "checkout", "-q", "main")
    repository.edit("two", *support_gate.HARMLESS)
    repository.commit("theirs")
    git(repository.root, "checkout", "-q", "work")
    found = since(repository, "main")
    assert found.changed == {"src/acme/one.py"}
    assert found.label.endswith("(main)")


def test_renamed_and_deleted(repository: Repository) -> None:
    git(repository.root, "mv", "src/acme/one.py", "src/acme/uno.py")
    (repository.root / "src/acme/two.py").unlink()
    found = since(repository, "HEAD")
    assert found.renamed == {"src/acme/uno.py": "src/acme/one.py"}
    assert found.deleted == {"src/acme/one.py", "src/acme/two.py"}
    assert found.changed == {"src/acme/uno.py"}


def test_detached_head_and_a_subfolder(repository: Repository) -> None:
    git(repository.root, "checkout", "-q", "--detach")
    repository.edit("one", *support_gate.HARMLESS)
    checkout = checkout_at(repository.root / "src" / "acme")
    assert checkout.root == repository.root.resolve()
    changes = changes_since(checkout, "main")
    lines = (repository.root / "src/acme/one.py").read_text().splitlines()
    assert first_changed_line(checkout, changes, "src/acme/one.py") == 1 + lines.index(f"        {support_gate.HARMLESS[1]}")
    assert first_changed_line(checkout, changes, "src/acme/two.py") == 1


def test_an_unknown_ref_and_one_that_looks_like_an_option(repository: Repository) -> None:
    for ref in ("mian", "--all", "HEAD:src"):
        with pytest.raises(BadArgument, match=r"base='.*': git knows no such commit here; fetch it first"):
            since(repository, ref)


def test_no_checkout_no_commit_and_no_common_history(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    with pytest.raises(BadArgument, match="it is not in a git checkout; run the gate in a clone, or compare with --baseline"):
        checkout_at(outside)
    git(outside, "init", "-q")
    with pytest.raises(BadArgument, match="no commit yet"):
        changes_since(checkout_at(outside), "main")
    git(repository.root, "checkout", "-q", "--orphan", "other")
    repository.commit("anew")
    with pytest.raises(BadArgument, match="no commit in common"):
        since(repository, "main")


def test_a_shallow_clone_says_what_to_fetch(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> None:
    git(repository.root, "checkout", "-qb", "work")
    repository.edit("one", *support_gate.HARMLESS)
    repository.commit("ours")
    git(repository.root, "checkout", "-q", "main")
    repository.edit("two", *support_gate.HARMLESS)
    repository.commit("theirs")
    shallow = tmp_path_factory.mktemp("clones") / "shallow"
    git(shallow.parent, "clone", "-q", "--depth", "1", "--branch", "work", f"file://{repository.root}", "shallow")
    with pytest.raises(BadArgument, match="this clone is shallow: fetch the rest"):
        changes_since(checkout_at(shallow), "origin/main")
    git(shallow, "fetch", "-q", "--depth", "1", "origin", "main:refs/remotes/origin/main")
    with pytest.raises(BadArgument, match="too shallow to find their merge base; fetch the rest"):
        changes_since(checkout_at(shallow), "origin/main")
    git(shallow, "fetch", "-q", "--unshallow", "origin")
    assert changes_since(checkout_at(shallow), "origin/main").changed == {"src/acme/one.py"}


def test_a_worktree_goes_again_however_it_ends(repository: Repository) -> None:
    checkout = checkout_at(repository.root)
    # A hook of the repository's must not run.
    hook = repository.write(".git/hooks/post-checkout", "#!/bin/sh\ntouch hooked\n")
    hook.chmod(0o755)
    before = "src/acme/one.py"
    repository.edit("one", *support_gate.HARMLESS)
    seen: list[Path] = []

    def interrupted() -> None:
        with worktree(checkout, checkout.head) as files:
            seen.append(files)
            assert (files / before).read_text() != (repository.root / before).read_text()
            assert not (files / "hooked").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not seen[0].parent.exists()
    assert git(repository.root, "worktree", "list").count("\n") == 1


def test_a_worktree_of_a_gate_that_was_killed_goes_with_the_next(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkout = checkout_at(repository.root)
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = tmp_path_factory.mktemp("t") / f"attnfuzz-gate-{gone.pid}-abc"
    lives = left.with_name(f"attnfuzz-gate-{os.getpid()}-abc")
    for each in (left, lives):
        git(repository.root, "worktree", "add", "-q", "--detach", str(each / "base"))
    with worktree(checkout, checkout.head):
        assert not left.exists()
        assert lives.exists(), "another gate's"


def test_git_that_refuses_is_told_in_its_own_words(repository: Repository) -> None:
    with (
        pytest.raises(BadArgument, match=r"base: its files cannot be checked out into .*invalid reference: 0{40}"),
        worktree(checkout_at(repository.root), "0" * 40),
    ):
        pass
    with pytest.raises(BadArgument, match="there is none"):
        checkout_at(repository.root / "nowhere")


def test_the_files_of_a_kernel_are_those_that_it_declares_and_what_they_import(importable: Repository) -> None:
    importable.write("src/acme/tiles.py", "from . import sizes\n")
    importable.write("src/acme/sizes.py", "import acme.deep.leaf\n")
    importable.write("src/acme/deep/__init__.py", "")
    importable.write("src/acme/deep/leaf.py", "def broken(:\n")
    importable.write("src/acme/other.py", "")
    importable.edit("one", "import time", "import time\n\ndef later():\n    from acme.tiles import X")
    kernel = registry.get("acme.one:KERNEL")
    assert repro_line("c.json", kernel.name) == "attnfuzz repro c.json --kernel acme.one:KERNEL"
    root = importable.root.resolve()
    found = [each.relative_to(root / "src/acme").as_posix() for each in files_of(kernel, root)]
    assert found[0] == "one.py"
    expected = {"one.py", "__init__.py", "core.py", "tiles.py", "sizes.py", "deep/__init__.py", "deep/leaf.py"}
    assert set(found) == expected
    assert {each.name for each in files_of(kernel, None)} == {Path(each).name for each in expected}, "torch's are not among them"


def test_our_own_kernels_have_the_device_code_and_the_contract_among_their_files() -> None:
    kernel = registry.get("triton.varlen")
    found = {each.name for each in files_of(kernel, None)}
    assert {"varlen.py", "varlen_device.py", "contract.py", "problem.py"} <= found
    assert "dense.py" not in found


def test_which_kernels_are_gone_and_which_are_broken(importable: Repository) -> None:
    importable.write("src/acme/broken.py", "import no_such_package\nKERNEL = 1\n")
    importable.write("src/acme/typo.py", "def f(:\n")
    asked = ["acme.one:KERNEL", "acme.gone:KERNEL", "acme.two:NONE", "acme.broken:KERNEL", "acme.typo:KERNEL", "no.such.kernel"]
    found, broken = named(asked, importable.root)
    assert [each.name for each in found] == ["acme.one"]
    assert {name: why_absent(error) for name, error in broken.items()} == {
        "acme.gone:KERNEL": "there is no module acme.gone",
        "acme.two:NONE": "module acme.two has no NONE",
        "acme.broken:KERNEL": None,
        "acme.typo:KERNEL": None,
        "no.such.kernel": "no kernel of that name is known",
    }
    with pytest.raises(BadArgument, match=r"it is not of the form package.module:OBJECT"):
        registry.get(":KERNEL")


def in_base(repository: Repository, program: str) -> str:
    """What a Python process prints in which the modules are as they were in HEAD."""
    checkout: Checkout = checkout_at(repository.root)
    changes = changes_since(checkout, "HEAD")
    with worktree(checkout, changes.base) as files, base_environment(checkout, changes, files) as variables:
        environment = {**repository.environment(), **variables}
        environment["PYTHONPATH"] = os.pathsep.join(
            [variables["PYTHONPATH"].split(os.pathsep)[0], repository.environment()["PYTHONPATH"]]
        )
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=repository.root)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_as_they_were(repository: Repository) -> None:
    """Changed, renamed, deleted, new, unchanged; a namespace package; what git ignores stays."""
    repository.write("src/acme/plain.py", "NAME = 'base'\n")
    repository.write("src/acme/moved.py", "NAME = 'moved'\n" + "# the same\n" * 20)
    repository.write("src/acme/deleted.py", "NAME = 'deleted'\n")
    repository.write("src/space/inner.py", "NAME = 'inner'\n")
    repository.write("lone.py", "NAME = 'lone'\n")
    repository.write(".gitignore", "generated.py\n")
    repository.commit("before")
    repository.write("src/acme/plain.py", "NAME = 'head'\n")
    git(repository.root, "mv", "src/acme/moved.py", "src/acme/here.py")
    (repository.root / "src/acme/deleted.py").unlink()
    repository.write("src/acme/added.py", "")
    repository.write("src/acme/generated.py", "NAME = 'generated'\n")
    repository.write("src/space/inner.py", "NAME = 'inner in head'\n")
    repository.write("src/fresh.py", "")
    program = """
import json
from importlib import import_module

import acme, acme.plain, acme.here, acme.deleted, acme.generated, space.inner

told = {"plain": acme.plain.NAME, "here": acme.here.NAME, "deleted": acme.deleted.NAME, "generated": acme.generated.NAME}
told["inner"] = space.inner.NAME
for name in ("acme.added", "fresh", "acme.never"):
    try:
        import_module(name)
        told[name] = "there"
    except ModuleNotFoundError as error:
        told[name] = error.name
import attnfuzz.kernels.contract
told["file"] = acme.plain.__file__
print(json.dumps(told))
"""
    told = json.loads(in_base(repository, program))
    assert not Path(told.pop("file")).is_relative_to(repository.root)
    assert told == {
        "plain": "base",
        "here": "moved",
        "deleted": "deleted",
        "generated": "generated",
        "inner": "inner",
        "acme.added": "acme.added",
        "fresh": "fresh",
        "acme.never": "acme.never",
    }


def test_of_attnfuzz_itself_only_the_kernels_are_as_they_were(tmp_path: Path) -> None:
    """A checkout of attnfuzz, installed as an editable one is: packages mapped to folders by a finder."""
    files = ("harness/run.py", "kernels/contract.py", "kernels/expressions/tree.py", "kernels/torch/flash.py")
    for folder in ("harness", "kernels", "kernels/expressions", "kernels/torch"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    for file in files:
        (tmp_path / file).write_text("SIDE = 'base'\n")
    git(tmp_path, "init", "-q")
    repository = Repository(tmp_path)
    repository.commit("before")
    for file in files:
        (tmp_path / file).write_text("SIDE = 'head'\n")
    program = f"""
import importlib, importlib.util, sys
from importlib.machinery import ModuleSpec, PathFinder

class Editable:
    def find_spec(self, name, path=None, target=None):
        if name == "attnfuzz":
            made = ModuleSpec(name, None, is_package=True)
            made.submodule_search_locations = []
            return made
        parent, _, last = name.rpartition(".")
        if parent == "attnfuzz":
            return PathFinder.find_spec(last, [{str(tmp_path)!r}]) and importlib.util.spec_from_file_location(
                name, {str(tmp_path)!r} + "/" + last + "/__init__.py",
                submodule_search_locations=[{str(tmp_path)!r} + "/" + last])
        return None

sys.meta_path.insert(1, Editable())
print(*[importlib.import_module("attnfuzz." + n).SIDE for n in {[file[:-3].replace("/", ".") for file in files]!r}])
"""
    assert in_base(repository, program).split() == ["head", "head", "head", "base"]
