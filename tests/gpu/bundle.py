"""Collect what the CUDA suite needs on a machine with no network: wheels in one folder, for `run.sh` there.

The machine brings Python 3.12, PyTorch, Triton, NumPy, transformers and pytest. What else it may lack is listed
here in full, since `pip` isn't to look for it there; the adapters are built from this tree.

    python tests/gpu/bundle.py [--out .gpu-bundle] [NAME ...]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing-extensions")
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(names: list[str], out: Path) -> None:
    """Wheels of the versions installed here, for the machine's Python and platform."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(out), *(f"{name}=={version(name)}" for name in names)], check=True)


def build_adapters(out: Path) -> None:
    """A wheel of each adapter: an entry point has to be installed to be found."""
    for project in sorted((ROOT / "adapters").glob("*/pyproject.toml")):
        command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(project.parent),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="more packages that the machine lacks")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-bundle")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    download([*PACKAGES, *args.names], args.out)
    build_adapters(args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: {len(list(args.out.iterdir()))} wheels, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
