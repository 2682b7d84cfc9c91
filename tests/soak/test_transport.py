"""A minute of the transport's soak, where SHOAL_SOAK is set; `make soak` runs thousands of its kills."""

from __future__ import annotations

import os

import pytest

from tests.soak.transport import soak

pytestmark = [pytest.mark.timed, pytest.mark.long]


@pytest.mark.skipif("SHOAL_SOAK" not in os.environ, reason="a minute: set SHOAL_SOAK, or make soak")
def test_nothing_is_left_of_who_was_cut_off_nor_of_strangers() -> None:
    soak(times=20, seed=1, pairs=0)
