"""Installing our wheels beside vLLM adds them and replaces nothing. What registers is in test_registration.py."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pip(*args):
    command = [sys.executable, "-m", "pip", *map(str, args), "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pip_would_replace_no_package(tmp_path):
    sources = [ROOT, *sorted(p.parent for p in ROOT.glob("adapters/*/pyproject.toml"))]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, *sources)
    wheels = sorted(tmp_path.glob("*.whl"))
    assert len(wheels) == len(sources)
    report = tmp_path / "report.json"
    pip("install", "--dry-run", "--report", report, *wheels)
    planned = {canonicalize_name(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}
    ours = {canonicalize_name(w.name.split("-")[0]) for w in wheels}
    assert planned >= ours
    there = {canonicalize_name(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    assert not (planned - ours) & there, "these would be replaced"
    assert not planned - ours, "the environment of the tests lacks these"
