"""What only `make soak` runs: tests that take long, and show with another mode or role what CI shows already."""

from __future__ import annotations

import os

import pytest

only_in_soak = pytest.mark.skipif("SHOAL_KILLS" not in os.environ, reason="only in make soak")
