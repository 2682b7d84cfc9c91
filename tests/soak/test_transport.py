"""A minute of the transport's soak; `make soak` runs thousands of its kills."""

from __future__ import annotations

import pytest

from tests.soak.transport import soak

pytestmark = [pytest.mark.alone, pytest.mark.long]


def test_nothing_is_left_of_who_was_cut_off_nor_of_strangers() -> None:
    soak(times=20, seed=1, pairs=0)
