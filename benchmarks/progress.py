"""How much of a run is complete, with a progress bar if rich is installed and the output is a terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any


class Progress:
    def __init__(self, on: bool) -> None:
        self.on, self.done, self.total = on, 0, 0
        self.began = time.monotonic()
        self.bar: Any = None  # of rich
        self.task: Any = None

    def start(self, total: int) -> None:
        self.total, self.began = total, time.monotonic()
        if self.on and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.progress import Progress as Bar

            self.bar = Bar()
            self.task = self.bar.add_task("settings", total=total)
            self.bar.start()

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        elif self.on:
            print(text, flush=True)

    def step(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.advance(self.task)
        else:
            seconds = time.monotonic() - self.began
            left = seconds / self.done * (self.total - self.done)
            self.say(f"[{self.done} of {self.total} settings, {seconds:.0f} s, about {left:.0f} s left]")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
