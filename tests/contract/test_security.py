"""Which command runs whose code: adapters here leave a mark when they are imported. `docs/security.md` cites these."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from mrv2.errors import TargetError
from mrv2.testing import recorded_reference

MARK = "import os\nopen({folder!r} + '/{name}.mark', 'a').write(str(os.getpid()) + '\\n')\n"


@pytest.fixture
def marked(site):
    """Two good adapters that leave marks, and a function that runs a command: its pid, and pids by adapter imported."""
    marks = site.root.parent
    for name in ("acme", "rival"):
        names = {"package": f"{name}_pkg", "architecture": site.architecture(name)}
        hooks = MARK.format(folder=str(marks), name=name) + (
            "import mrv2\n\n@mrv2.hookimpl\ndef mrv2_model(ctx):\n"
            "    from {package}.model import {architecture}\n    return {architecture}\n".format(**names)
        )
        site.add(name, hooks=hooks)

    def run(*argv, **env):
        for file in marks.glob("*.mark"):
            file.unlink()
        code = f"import os\nprint('pid', os.getpid(), flush=True)\nfrom mrv2.cli.app import run\nrun({list(argv)!r})\n"
        done = site.python("-P", "-c", code, **env)
        pid = int(re.match(r"pid (\d+)\n", done.out)[1])
        return pid, {f.stem: [int(p) for p in f.read_text().split()] for f in marks.glob("*.mark")}, done

    return run


def checkpoint(site, name):
    """A folder with a config of an adapter's architecture."""
    folder = site.root / f"model-{name}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [site.architecture(name)], "model_type": name}))
    return str(folder)


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["list"],
        ["list", "--json"],
        ["catalog"],
        ["explain", "101"],
        ["explain"],
        ["new-adapter", "third", "--kind", "decoder"],
    ],
)
def test_commands_that_only_look_import_no_adapter(marked, command):
    _, imported, done = marked(*command)
    assert (imported, done.err) == ({}, "")


def test_show_and_generate_import_the_one_adapter_concerned(marked, site):
    pid, imported, _ = marked("show", "acme")
    assert set(imported) == {"acme"}
    assert pid not in imported["acme"]
    pid, imported, done = marked("generate", checkpoint(site, "rival"), "x")
    assert set(imported) == {"rival"}, done.err
    assert imported["rival"] == [pid]


def test_doctor_imports_each_in_another_process(marked):
    pid, imported, _ = marked("doctor")
    assert {"acme", "rival"} <= set(imported)
    pids = imported["acme"] + imported["rival"]
    assert len(set(pids)) == len(pids)
    assert pid not in pids


def test_an_adapter_that_is_not_listed_is_never_imported(marked, site):
    model = checkpoint(site, "acme")
    for command in (["doctor"], ["show", "acme"], ["generate", model, "x"], ["check", "acme"]):
        _, imported, done = marked(*command, MRV2_ADAPTERS="rival-adapter")
        assert "acme" not in imported, command
        assert command == ["doctor"] or re.search("MRV2-1(01|12)", done.err), done.err


def test_a_local_adapter_runs_only_when_named(marked, site):
    header = "".join(f"# {line}\n" for line in site.manifest("mine").splitlines())
    mark = MARK.format(folder=str(site.root.parent), name="mine")
    (site.root / "mine.py").write_text(f"# /// adapter\n{header}# ///\n{mark}")
    model = checkpoint(site, "mine")
    for command in (["list"], ["doctor"], ["generate", model, "x"]):
        _, imported, _ = marked(*command)
        assert "mine" not in imported
    _, imported, _ = marked("generate", model, "x", "--adapter", "./mine.py", MRV2_ADAPTERS="rival-adapter")
    assert set(imported) == {"mine"}


class _Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_an_npz_with_objects_is_refused_unread(tmp_path):
    np.savez(tmp_path / "recorded.npz", ids_0=np.array([_Trap(str(tmp_path / "ran"))], dtype=object))
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(TargetError):
        recorded_reference(tmp_path / "recorded.npz")(tmp_path)
    assert not (tmp_path / "ran").exists()
