"""A site folder with made-up adapters, and the command line run in a process that sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

GOOD_HOOKS = """
import mrv2

@mrv2.hookimpl
def mrv2_model(ctx):
    from {package}.model import {architecture}
    return {architecture}
"""

GOOD_MODEL = """
from torch import nn
from mrv2.layers.base import WeightMap

class {architecture}(nn.Module):
    weight_map = WeightMap()
    parts = ()
    recurrent = False

    def __init__(self, layers, config):
        super().__init__()

    def forward(self, input_ids, positions, ctx):
        return input_ids
"""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Site:
    """A folder on the path of a clean process."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)

    def manifest(self, name: str, /, **changes: Any) -> str:
        """Lines of an adapter.toml; a change of None leaves the field out."""
        fields: dict[str, Any] = {
            "name": name,
            "sdk_api": "0.1",
            "architectures": [self.architecture(name)],
            "model_types": [name],
            "owner": "nobody",
        }
        fields |= changes
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items() if value is not None)

    @staticmethod
    def architecture(name: str) -> str:
        return f"{name.title()}ForCausalLM"

    def add_dist(
        self,
        name: str,
        *,
        dist: str | None = None,
        version: str = "1.0",
        points: dict[str, str] | None = None,
        requires: str = "mrv2>=0.1,<0.2",
        root: Path | None = None,
    ) -> Path:
        """Installed metadata."""
        dist = dist or f"{name}-adapter"
        folder = (root or self.root) / f"{dist.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\nRequires-Dist: {requires}\n"
        )
        lines = "".join(f"{k} = {v}\n" for k, v in (points or {name: f"{name}_pkg"}).items())
        (folder / "entry_points.txt").write_text(f"[mrv2.adapters]\n{lines}")
        return folder

    def add_package(
        self,
        name: str,
        *,
        hooks: str | None = None,
        model: str | None = None,
        manifest: str | None = None,
        root: Path | None = None,
    ) -> Path:
        """A package with hooks, model and manifest; good ones unless given."""
        folder = (root or self.root) / f"{name}_pkg"
        folder.mkdir(parents=True, exist_ok=True)
        names = {"package": f"{name}_pkg", "architecture": self.architecture(name)}
        (folder / "__init__.py").write_text(GOOD_HOOKS.format(**names) if hooks is None else hooks)
        (folder / "model.py").write_text(GOOD_MODEL.format(**names) if model is None else model)
        (folder / "adapter.toml").write_text(self.manifest(name) if manifest is None else manifest)
        return folder

    def add(
        self, name: str, *, hooks: str | None = None, model: str | None = None, manifest: str | None = None
    ) -> None:
        """An installed adapter, good unless told otherwise."""
        self.add_dist(name)
        self.add_package(name, hooks=hooks, model=model, manifest=manifest)

    def add_zipped(self, name: str) -> Path:
        """A good adapter inside a zip file on the path."""
        inside = self.root / "unzipped"
        self.add_dist(name, root=inside)
        self.add_package(name, root=inside)
        archive = self.root / f"{name}.zip"
        with zipfile.ZipFile(archive, "w") as z:
            for file in inside.rglob("*"):
                if file.is_file():
                    z.write(file, file.relative_to(inside))
        return archive

    def environ(self, **env: str) -> dict[str, str]:
        """This process's environment, with the site on the path."""
        paths = [str(self.root), *filter(None, [self.env.get("EXTRA_PATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | env

    def python(self, *argv: str, timeout: float = 120, **env: str) -> Result:
        """Run Python there."""
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *argv],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environ(**env),
            cwd=self.root,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr, time.perf_counter() - start)

    def mrv2(self, *argv: str, **env: str) -> Result:
        """Run the command line there."""
        return self.python("-P", "-m", "mrv2", *argv, **env)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    root = tmp_path / "site"
    root.mkdir()
    return Site(root)


@pytest.fixture
def local_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The same, on the path of this process; packages imported from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(site.root))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if str(site.root.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
