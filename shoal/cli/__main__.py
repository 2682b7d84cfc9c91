"""``python -m shoal.cli`` is the ``shoal`` command."""

from __future__ import annotations

from shoal.cli import app

app()
