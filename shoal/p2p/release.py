"""The release of Shoal that this peer runs, and what a peer with another protocol is told to install.

The version is written in one place, `shoal.__version__`. The package's metadata is built from it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import msgspec

RELEASE = version("shoal")

# What another peer says is shown as a part of a command. So it holds only what a version may hold (PEP 440).
MAX_RELEASE = 64
Release = Annotated[str, msgspec.Meta(max_length=MAX_RELEASE, pattern=r"^([0-9][0-9A-Za-z.+!]*)?\Z")]  # "": not said


def how_to_match(release: Release) -> str:
    """What to install in order to train with a peer that runs that release.

    Args:
        release: as that peer says; "" if it does not say it.
    """
    if not release:
        return "install the same version of Shoal on both machines"
    return f"to train together, install the same version on both machines: pip install 'shoal=={release}'"
