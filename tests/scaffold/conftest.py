"""Fresh environments: new folders for packages and commands, over what this one has installed."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from mrv2.cli.app import run

ROOT = Path(__file__).parents[2]
SHIM = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'
PIP = """#!/bin/sh
command="$1"; shift
case "$command" in install|wheel) set -- --no-deps --no-build-isolation --disable-pip-version-check -q "$@";; esac
exec "{python}" -m pip "$command" "$@"
"""


class Fresh:
    """An environment of its own, and a folder outside of the repository.

    Args:
        home: for both.
        cache: of the type checker, shared: most of its work is torch.
    """

    def __init__(self, home: Path, cache: Path) -> None:
        self.work = home / "work"
        self.work.mkdir(parents=True)
        venv.create(home / "env", with_pip=False)
        self.bin = home / "env" / "bin"
        python = self.bin / "python"
        site = Path(sysconfig.get_path("purelib", vars={"base": str(home / "env"), "platbase": str(home / "env")}))
        ours = sysconfig.get_path("purelib")
        (site / "below.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        for name in ("pytest", "mypy"):
            self._script(name, SHIM.format(python=python, module=name))
        self._script("pip", PIP.format(python=python))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MRV2_", "PYTEST_", "MYPY", "PIP_"))}
        self.env = kept | {
            "PATH": os.pathsep.join((str(self.bin), str(Path(sys.executable).parent), os.environ["PATH"])),
            "MYPY_CACHE_DIR": str(cache),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.bash(f"pip install -e '{ROOT}'")

    def _script(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def bash(self, script: str, cwd: Path | None = None) -> str:
        """What commands print, all of which have to succeed; the working folder carries over to the next call."""
        where = self.bin / "cwd"
        text = f"set -euo pipefail\n{script}\npwd > '{where}'\n"
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=cwd or self.cwd,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        self.cwd = Path(where.read_text().strip())
        return done.stdout

    @property
    def cwd(self) -> Path:
        """Where the next commands run."""
        return getattr(self, "_cwd", self.work)

    @cwd.setter
    def cwd(self, value: Path) -> None:
        self._cwd = value


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Where packages are made."""
    return Fresh(tmp_path_factory.mktemp("fresh"), tmp_path_factory.mktemp("mypy"))


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """Where their wheels are installed."""
    return Fresh(tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("mypy"))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """The current folder, empty."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def contents():
    """Every file of a folder by its path, empty folders too."""

    def read(folder):
        folder = Path(folder)
        paths = sorted(folder.rglob("*"))
        empty = {f"{p.relative_to(folder)}/": "" for p in paths if p.is_dir() and not any(p.iterdir())}
        return empty | {p.relative_to(folder).as_posix(): p.read_text(errors="replace") for p in paths if p.is_file()}

    return read


@pytest.fixture
def make():
    """`mrv2 new-adapter`, which has to succeed."""

    def new_adapter(*argv):
        assert run(["new-adapter", *argv]) == 0

    return new_adapter


@pytest.fixture
def refused(capsys, contents):
    """The message of a refusal; nothing may have changed."""

    def refuse(*argv):
        before = contents(".")
        assert run(["new-adapter", *argv]) == 2
        assert contents(".") == before
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return refuse
