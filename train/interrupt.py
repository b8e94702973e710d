"""SIGTERM and SIGINT as a wish to stop after the current step, once everything is saved; also of child processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Self

from ..progress import say


class StopRequest:
    """Context in which the first SIGTERM or SIGINT only sets `signal`; a second SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, signals keep their usual meaning. Who left in order exits
    with 0 after either.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_passing_signals(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Run a command whose output goes to standard error, and hand the first signal that asks to stop on to it.

    It gets a session of its own: a terminal's Ctrl-C would reach it a second time. A closed terminal (SIGHUP) is handed
    on as SIGTERM. Later signals change nothing: the command is given the time that it needs.

    Returns:
        Its exit status, and the signal, None where there was none.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) > 1 and process is not None:
            say(f"the processes are still saving; 'kill -9 {process.pid}' leaves them to themselves")
        elif process is not None:
            process.send_signal(_passed_on(number))

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's
                before[number] = signal.signal(number, note)
    try:
        process = subprocess.Popen(command, env=dict(environment), stdout=sys.stderr, start_new_session=True)
        if asked:  # before there was a process
            process.send_signal(_passed_on(asked[0]))
        return process.wait(), asked[0] if asked else None
    finally:
        for handled, handler in before.items():
            signal.signal(handled, handler)


def _passed_on(number: int) -> int:
    return signal.SIGTERM if number == signal.SIGHUP else number
