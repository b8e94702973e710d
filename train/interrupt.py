"""SIGTERM and SIGINT as a wish to stop after the current step, once everything is saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopRequest:
    """Context in which the first SIGTERM or SIGINT only sets `signal`; a second SIGINT interrupts at once.

    Outside the main thread, where Python allows no handlers, signals keep their usual meaning.
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

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM (asked to leave, left in order), 130 after Ctrl-C."""
        return 130 if self.signal == signal.SIGINT else 0
