"""The private names of Python that this room uses. No other file of the room reaches for one.

| name | what for | Python has it since | where it is missing |
|---|---|---|---|
| ``_signal`` | `getsignal` and `signal` without the conversions to enums of the public module, which take 20 times as long: a step asks for all handlers | 3.4 or before | importing the room raises ImportError |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

from _signal import getsignal, valid_signals  # type: ignore[import-not-found]
from _signal import signal as set_handler

__all__ = ["getsignal", "set_handler", "valid_signals"]
