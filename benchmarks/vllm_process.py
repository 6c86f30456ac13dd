"""An arm of vllm_host.py, seen from outside: a process of `vllm_arm.py` that takes commands one by one."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

START_SECONDS, STEP_SECONDS = 360, 90
"""Longest that an engine may take to start, and anything else."""


class ArmError(Exception):
    """An arm failed, or didn't answer in time."""


class Arm:
    """A process of `vllm_arm.py`.

    Args:
        name: for messages.
        settings: of its engine.
        env: environment.
        log: file for what it prints.
    """

    def __init__(self, name: str, settings: dict[str, Any], env: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                # -P: what lies beside the script isn't importable; libraries look for packages of such names.
                [sys.executable, "-P", str(Path(__file__).with_name("vllm_arm.py")), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=env,
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, do: str, **arguments: Any) -> None:
        """Give a command; `answer` waits for what comes of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("isn't running any more") from error

    def answer(self, seconds: float) -> Any:
        """What came of the command.

        Raises:
            ArmError: it failed, or took longer.
        """
        try:
            line = self._lines.get(timeout=max(seconds, 1))
        except queue.Empty:
            raise self._failed(f"didn't answer in {seconds:.0f} s") from None
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer["ok"]

    def ask(self, do: str, seconds: float = STEP_SECONDS, **arguments: Any) -> Any:
        """`send` and `answer`."""
        self.send(do, **arguments)
        return self.answer(seconds)

    def _failed(self, what: str) -> ArmError:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
        print(f"--- {self.name} {what}; the end of its log:\n{tail}\n---", flush=True)
        self.close()
        return ArmError(f"{self.name}: {what}")

    def close(self) -> None:
        """End it, with all processes that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
