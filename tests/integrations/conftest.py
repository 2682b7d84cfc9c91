from __future__ import annotations

import pytest

import shoal


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks Hugging Face for anything."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses that are told to whoever watches the run."""
    told: list[float] = []
    monkeypatch.setattr(shoal.Optimizer, "report", lambda _, loss: told.append(float(loss)))
    return told
