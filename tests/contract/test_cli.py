"""The command line's promises that hold for every command."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
import typer

from mrv2.cli.app import COMMANDS
from mrv2.errors import Mrv2Error, all_error_classes

NO_SOCKETS = """
import socket
class Refused(socket.socket):
    def __init__(self, *args, **kwargs):
        raise OSError("sockets are refused")
socket.socket = Refused
def refuse(*args, **kwargs):
    raise OSError("sockets are refused")
socket.create_connection = socket.getaddrinfo = refuse
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_sentence_two_examples_and_exit_codes(site, name):
    done = site.mrv2(name, "--help")
    assert done.code == 0, done.err
    lines = [line.strip() for line in done.out.splitlines()]
    start = lines.index("Examples:")
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == [
        "MRV2_CATALOG=team.json" if "MRV2_CATALOG" in line else "mrv2" for line in lines[start + 1 : start + 3]
    ]
    assert re.search(r"Exit codes: 0 .*2 wrong use", " ".join(done.out.split()))
    assert "--json" in done.out


def test_root_help_lists_every_command_and_no_argument_means_help(site):
    done = site.mrv2("--help")
    assert done.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.out, re.M)
    bare = site.mrv2()
    assert (bare.code, bare.out) == (2, done.out)
    assert re.fullmatch(r"mrv2 \d+\.\d+\.\d+\n", site.mrv2("--version").out)


@pytest.mark.parametrize(
    "argv", [["lits"], ["list", "--no-such"], ["show"], ["explain", "MRV2-999"], ["show", "nobody"]]
)
def test_wrong_use_is_exit_code_2_with_a_typed_error_on_the_right_stream(site, argv):
    plain = site.mrv2(*argv)
    assert (plain.code, plain.out) == (2, "")
    assert re.match(r"MRV2-\d{3} ", plain.err)
    assert "Traceback" not in plain.err
    as_json = site.mrv2(*argv, "--json")
    assert (as_json.code, as_json.err) == (2, "")
    assert set(as_json.json()["error"]) == {"code", "title", "what", "where", "fix", "docs"}


def test_explain_knows_every_code(site):
    codes = {cls.code: cls for cls in all_error_classes()}
    listed = site.mrv2("explain", "--json").json()["errors"]
    assert {e["code"] for e in listed} == set(codes)
    for spelling in ("MRV2-101", "mrv2-101", "101"):
        done = site.mrv2("explain", spelling)
        assert "unknown architecture" in done.out
        assert "never guessed" in done.out


OWN = '''
import mrv2
raise SystemExit("imported")

class TankError(mrv2.Mrv2Error):
    """The tank is empty.

    Fill it.
    """

    code = "ACME-7"
    title = "empty tank"
    exit_code: int = 1
'''


def test_explain_knows_adapters_own_codes_and_imports_nothing(site, tmp_path):
    """Their errors print `mrv2 explain CODE`, so it has to lead somewhere (O3)."""
    site.add("acme", model=OWN)
    local = site.add_package("local", model=OWN.replace("ACME", "LOCAL"), root=tmp_path)
    (local / "broken.py").write_text("class (")
    done = site.mrv2("explain", "acme-7")
    assert done.code == 0
    assert done.out.startswith(
        "ACME-7 empty tank (exit code 1)\n\nThe tank is empty.\n\nFill it.\n\nof acme (acme-adapter 1.0)"
    )
    assert "acme_pkg/model.py:5" in done.out
    found = site.mrv2("explain", "LOCAL-7", "--adapter", str(local), "--json").json()
    assert (found["code"], found["title"], found["text"]) == ("LOCAL-7", "empty tank", "The tank is empty.\n\nFill it.")
    listed = {e["code"]: e["adapter"] for e in site.mrv2("explain", "--json").json()["errors"]}
    assert listed["ACME-7"].startswith("acme ")
    assert listed["MRV2-101"] is None
    unknown = site.mrv2("explain", "LOCAL-7").err
    assert "'LOCAL-7' is no error of mrv2, nor of an adapter here (acme (" in unknown
    assert "add --adapter PATH" in unknown
    assert site.mrv2("explain", MRV2_PREFER="?").code == 0


def test_an_adapters_own_error_keeps_its_code_in_doctor(site):
    hooks = "import mrv2\n" + OWN.partition('imported")')[2] + "\nraise TankError('none left', fix='fill it')\n"
    site.add("acme", hooks=hooks)
    done = site.mrv2("doctor", "acme")
    assert done.code == 1
    assert "ACME-7 empty tank: none left" in done.out


def test_error_codes_are_unique_and_documented():
    classes = list(all_error_classes())
    assert len({c.code for c in classes}) == len(classes)
    for cls in classes:
        assert re.fullmatch(r"MRV2-[1-7]\d\d", cls.code)
        assert cls.__doc__
        assert cls.title != Mrv2Error.title
        assert cls.exit_code in (1, 2)


def test_without_a_network_everything_about_adapters_works(site):
    (site.root / "sitecustomize.py").write_text(NO_SOCKETS)
    site.add("acme")
    assert site.python("-c", "import socket; socket.socket()").code == 1
    assert "acme" in site.mrv2("list").out
    assert site.mrv2("show", "acme").code == 0
    assert site.mrv2("doctor", "acme").code == 0
    assert site.mrv2("catalog").code == 0


def test_ctrl_c_stops_doctor_at_once_and_leaves_no_process(site):
    marker = site.root / "pid"
    site.add("slow", hooks=f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(999)\n")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mrv2", "doctor", "slow"],
        env=site.environ(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores the signal, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err == "stopped\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_reader_that_leaves_is_no_error(site):
    for k in range(300):
        site.add_dist(f"stale{k}")
    command = f"{sys.executable} -P -m mrv2 doctor --json | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=site.environ(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == '{\n  "versi'


def test_tables_are_plain_in_a_pipe_and_coloured_on_a_terminal(site):
    site.add("acme")
    assert "\x1b" not in site.mrv2("list").out
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mrv2", "list"],
        stdout=terminal,
        env=site.environ(TERM="xterm-256color", COLUMNS="200"),
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # the terminal closes with its last process
            break
        if not chunk:
            break
        seen += chunk
    os.close(controller)
    assert process.wait(10) == 0
    assert b"\x1b[1m" in seen
    assert b"AcmeForCausalLM" in seen


def test_completion_offers_commands_names_and_codes(site):
    site.add("acme")
    for line, expected in [("mrv2 sh", "show"), ("mrv2 show ac", "acme"), ("mrv2 explain MRV2-10", "MRV2-101")]:
        words = len(line.split()) - 1
        done = site.python(
            "-P",
            "-c",
            "from mrv2.cli import main; main()",
            _MRV2_COMPLETE="complete_bash",
            COMP_WORDS=line,
            COMP_CWORD=str(words),
        )
        assert expected in done.out.split(), (line, done.out, done.err)


def test_doctor_tells_what_changed_since_the_api_an_adapter_was_written_for(site):
    site.add("old", manifest=site.manifest("old", sdk_api="0.0"))
    done = site.mrv2("doctor", "old", "--json")
    assert done.code == 0, done.out
    assert done.json()["adapters"][0]["changes"] == ["0.1: first version"]
    assert json.loads(done.out)["problems"] == 0


def test_an_option_with_a_metavar_spells_its_name():
    """typer 0.27 would take the metavar for the name."""
    for name in COMMANDS:
        module = importlib.import_module(COMMANDS[name].target.partition(":")[0])
        for parameter in inspect.signature(module.command, eval_str=True).parameters.values():
            for option in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(option, typer.models.OptionInfo) and option.metavar:
                    # Within Annotated the first positional argument is a name, which typer sorts out later.
                    assert str(option.default).startswith("-"), (name, parameter.name)
