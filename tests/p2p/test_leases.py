"""Memory that a chunk is opened into is its owner's again when it was withdrawn, wherever the reader is."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Expected, Leases
from shoal.p2p.sealing import Opener
from tests.p2p.lane_ends import PATIENCE, End, Raw, name

ONE, OTHER = PeerID(b"1" * 32), PeerID(b"2" * 32)


def test_a_target_is_leased_for_its_name_source_and_size_and_once():
    leases = Leases()
    target = leases.register(name(1), ONE, memoryview(bytearray(8)))
    assert leases.lease(name(2), ONE, 8) is None
    assert leases.lease(name(1), OTHER, 8) is None
    assert leases.lease(name(1), ONE, 7) is None
    assert leases.lease(name(1), ONE, 8) is target
    assert leases.lease(name(1), ONE, 8) is None
    leases.give_back(target, True)
    assert leases.lease(name(1), ONE, 8) is None


def test_a_target_whose_opening_failed_waits_for_its_chunk():
    leases = Leases()
    target = leases.register(name(1), ONE, memoryview(bytearray(8)))
    assert leases.lease(name(1), ONE, 8) is target
    leases.give_back(target, False)
    assert leases.lease(name(1), ONE, 8) is target


def test_a_chunk_has_one_source_at_a_time():
    leases, memory = Leases(), memoryview(bytearray(8))
    target = leases.register(name(1), ONE, memory)
    with pytest.raises(ValueError, match="waited for"):
        leases.register(name(1), OTHER, memory)
    leases.withdraw([target])
    assert leases.lease(name(1), ONE, 8) is None
    again = leases.register(name(1), OTHER, memory)
    leases.withdraw([target])  # which is none any more
    assert leases.lease(name(1), OTHER, 8) is again


def test_who_withdraws_waits_for_the_opening_and_the_next_source_for_both():
    leases = Leases()
    target = leases.register(name(1), ONE, memoryview(bytearray(8)))
    leases.lease(name(1), ONE, 8)
    waiting = threading.Thread(target=leases.withdraw, args=([target],))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    leases.give_back(target, False)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert leases.lease(name(1), ONE, 8) is None


class Steps:
    """Stops a thread at each step, until it is let on."""

    def __init__(self) -> None:
        self.reached: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._on: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.free = False

    def stop(self, label: str) -> None:
        if not self.free:
            self.reached.put(label)
            self._on.get(timeout=PATIENCE)

    def let_on(self) -> str:
        """Let it on to its next step, and say which that is."""
        self._on.put(None)
        return self.reached.get(timeout=PATIENCE)

    def set_free(self) -> None:
        self.free = True
        self._on.put(None)


class SteppedSocket:
    """A socket that gives a few bytes at a time, and stops before and after each call."""

    def __init__(self, real: Any, steps: Steps, piece: int) -> None:
        self._real, self._steps, self._piece = real, steps, piece

    def recv_into(self, memory: memoryview, nbytes: int, flags: int) -> int:
        self._steps.stop("before bytes come")
        got: int = self._real.recv_into(memory[: self._piece], nbytes, flags)
        self._steps.stop("bytes have come")
        return got

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real, attribute)


SIZE, SENTINEL = 1000, 0xEE
OPENING = ("before the opening", "half is written", "opened")


def receive(monkeypatch: pytest.MonkeyPatch, withdrawn_at: int, tampered: bool) -> list[str]:
    """A chunk of SIZE bytes comes, and its memory is withdrawn at that step. Returns the steps that there were."""
    steps, labels = Steps(), []
    memory = bytearray(SIZE)
    original = Opener.payload

    def stepped_payload(self: Opener, sealed: memoryview, out: memoryview) -> None:
        steps.stop("before the opening")
        if out.obj is not sealed.obj:
            out[: len(out) // 2] = b"\x11" * (len(out) // 2)  # as a cipher does that has not come to the tag
        steps.stop("half is written")
        try:
            original(self, sealed, out)
        finally:
            steps.stop("opened")

    steps.free = True
    with End(1) as end, monkeypatch.context() as patch:
        patch.setattr(Opener, "payload", stepped_payload)
        came, leases = end._came, end.shared.leases

        def stepped_lease(*args: Any) -> Any:
            steps.stop("before the lease")
            return Leases.lease(leases, *args)

        def stepped_give_back(*args: Any) -> None:
            steps.stop("before it is given back")
            Leases.give_back(leases, *args)
            steps.stop("given back")

        def stepped_arrival(*arrival: Any) -> None:
            steps.stop("before it is delivered")
            came(*arrival)

        patch.setattr(leases, "lease", stepped_lease)
        patch.setattr(leases, "give_back", stepped_give_back)
        patch.setattr(end, "_came", stepped_arrival)
        peer = PeerID(bytes([7]) * 32)
        with Raw(end, peer) as raw:
            (connection,) = raw.lane._connections
            # It waits for the next header in the real socket; from the chunk after the first, it is stepped.
            raw.socket.sendall(raw.chunk(0, b"first"))
            end.arrival()
            steps.free = False
            connection.socket = SteppedSocket(connection.socket, steps, 300)  # type: ignore[assignment]
            raw.socket.sendall(raw.chunk(1, b"second"))  # its header still comes through the real socket
            while (label := steps.reached.get(timeout=PATIENCE)) != "before it is delivered":
                steps._on.put(None)
            target = leases.register(name(2), peer, memoryview(memory))
            frame = bytearray(raw.chunk(2, b"\x22" * SIZE))
            frame[-1] ^= tampered
            raw.socket.sendall(frame)
            end_of_all = {"given back" if tampered else "before it is delivered"}
            while True:
                label = steps.let_on()
                labels.append(label)
                if len(labels) == withdrawn_at:
                    waiting = threading.Thread(target=leases.withdraw, args=([target],))
                    waiting.start()
                    leased = label in (*OPENING, "before it is given back")
                    while leased and label != "given back":
                        waiting.join(0.02)
                        assert waiting.is_alive(), f"withdrawn at {label!r}"
                        label = steps.let_on()
                        labels.append(label)
                    waiting.join(PATIENCE)
                    assert not waiting.is_alive(), f"not withdrawn at {label!r}"
                    memory[:] = bytes([SENTINEL]) * SIZE
                if tampered and labels[withdrawn_at - 1 :][:1] and "before the lease" not in labels[: withdrawn_at - 1]:
                    end_of_all = {"opened"}  # of the scratch that it came to
                if label in end_of_all:
                    break
            steps.set_free()
            if not tampered:
                end.arrival()  # "second"
                arrival = end.arrival()
                assert (arrival.memory is target.memory) == (
                    labels.index("before the lease") < withdrawn_at - 1 or not withdrawn_at
                )
            else:
                assert "does not open" in end.loss()
                end.arrival()
                assert end.arrivals.empty()
        if withdrawn_at:
            assert memory == bytes([SENTINEL]) * SIZE
        else:
            assert tampered or memory == b"\x22" * SIZE
    return labels


@pytest.mark.parametrize("tampered", [False, True])
def test_no_byte_lands_after_a_withdrawal_at_any_step(monkeypatch: pytest.MonkeyPatch, tampered):
    labels = receive(monkeypatch, 0, tampered)
    assert set(OPENING) < set(labels)
    for step in range(1, len(labels) + 1):
        receive(monkeypatch, step, tampered)


def test_chunks_of_a_transfer_are_expected_by_number_from_one_source_each():
    leases = Leases()
    expected = Expected(leases)
    for number in range(3):
        expected.expect(number, name(number), ONE, memoryview(bytearray(8)))
    expected.expect(0, name(0), OTHER, memoryview(bytearray(8)))
    assert leases.lease(name(0), ONE, 8) is None
    target = leases.lease(name(0), OTHER, 8)
    assert target is not None
    leases.give_back(target, True)
    assert not expected.stop(0, ONE)
    assert expected.stop(0, OTHER)
    assert not expected.stop(1), "it has not arrived"
    assert [number in expected for number in range(4)] == [False, False, True, False]
    expected.close()
    assert leases.lease(name(2), ONE, 8) is None
