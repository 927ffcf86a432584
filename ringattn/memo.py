"""Memo: results that are kept under a key, the least recently used one dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_ABSENT: Any = object()


class Memo(Generic[T]):
    """Keep the results of at most ``limit`` keys.

    Threads may share one: two that ask for the same new key at the same time may both make it, and one result stays.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, default: T | None = None) -> T | None:
        """Return the result kept under ``key``, or else ``default``."""
        kept = self._kept
        result: T = kept.get(key, _ABSENT)
        if result is _ABSENT:
            return default
        # Order matters only near the limit; moving hashes the key a second time, which costs as much as the look-up.
        if 2 * len(kept) > self.limit:
            with suppress(KeyError):  # another thread has just dropped it
                kept.move_to_end(key)
        return result

    def put(self, key: Hashable, result: T) -> T:
        """Keep ``result`` under ``key`` as the latest and return it."""
        self._kept.pop(key, None)
        self._kept[key] = result
        while len(self._kept) > self.limit:
            with suppress(KeyError):  # another thread emptied it
                self._kept.popitem(last=False)
        return result

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result kept under ``key``, or else that of ``make``, which is then kept, None too."""
        result: Any = self.get(key, _ABSENT)
        return self.put(key, make()) if result is _ABSENT else result

    def drop(self, condition: Callable[[T], bool]) -> None:
        """Forget the results that fulfil a condition."""
        for key in [key for key, result in list(self._kept.items()) if condition(result)]:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)
