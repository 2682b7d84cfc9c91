"""``python -m shoal`` is the ``shoal`` command."""

from __future__ import annotations

from shoal.cli import app

app(prog_name="shoal")
