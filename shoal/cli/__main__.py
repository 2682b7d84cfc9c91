"""``python -m shoal.cli`` is the ``shoal`` command."""

from __future__ import annotations

from shoal.cli import app

if __name__ == "__main__":  # the demo's processes import this module, too
    app()
