#!/usr/bin/env python3
"""Make a folder that, first on PYTHONPATH, replaces the installed CPU build of vLLM by another release.

    python tools/vllm_overlay.py 0.33.0 FOLDER          # in an environment of tools/vllm_env.sh
    PYTHONPATH=FOLDER python -m pytest tests/bridge/test_versions.py

There are no CPU builds of some releases. Their Python code runs with the compiled library of the installed one, as far
as the functions it calls are the same: the tests with tiny models call few. The wheel (about 300 MB) is fetched with
pip and deleted; what stays is its Python code and data (about 50 MB).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

KEPT = {".py", ".json", ".jinja", ".typed", ".txt"}


def main(argv: Sequence[str] | None = None) -> int:
    """Make one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of vLLM, for example 0.33.0")
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument("--wheel", type=Path, help="of that version, if it is here already")
    args = parser.parse_args(argv)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        parser.error("vLLM isn't installed in this environment")
    installed = Path(spec.origin).parent
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    with tempfile.TemporaryDirectory(prefix="vllm-wheel-") as work:
        made = Path(work) / "overlay"
        unpack(args.wheel or fetch(args.version, Path(work)), made)
        link_compiled(installed, made / "vllm")
        write_metadata(args.version, made)
        shutil.move(made, args.folder)  # whole or not at all
    print(args.folder)
    return 0


def fetch(version: str, folder: Path) -> Path:
    """The wheel, from the package index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), f"vllm=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Python code and data."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and PurePosixPath(name).suffix in KEPT:
                archive.extract(name, folder)


def link_compiled(installed: Path, package: Path) -> None:
    """The installed build's compiled modules."""
    for library in installed.rglob("*.so"):
        target = package / library.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(library)


def write_metadata(version: str, folder: Path) -> None:
    """A distribution called vllm: by its version vLLM finds out that it is for CPUs."""
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("overlay\n")


if __name__ == "__main__":
    sys.exit(main())
