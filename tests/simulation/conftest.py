"""Under the virtual clock a wait costs nothing, so peers wait as those of users do."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_for_users(others_are_awaited: None) -> None:
    """See `others_are_awaited`."""
