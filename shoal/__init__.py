"""Shoal: train with the PyTorch optimizer that you already use on whatever machines you have.

Importing this package starts nothing: no thread, no process, no socket.
"""

from __future__ import annotations

__version__ = "0.1.0"
