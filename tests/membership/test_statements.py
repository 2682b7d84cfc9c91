"""What an owner signs is read back only as it was signed, of that run and kind; everything else is refused."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest

from shoal.membership.membership import MEMBERSHIP, Membership, Part
from shoal.membership.owner import OwnerKey
from shoal.membership.pin import PIN, Pin, tip_text
from shoal.membership.revocations import MAX_REVOKED, REVOCATIONS, Revocations
from shoal.membership.run import ClosedRun
from shoal.p2p.identity import Identity, PeerID

NOW = 1_800_000_000.0
OWNER = OwnerKey("albert", Identity(bytes(31) + b"o"))
PEER = Identity(bytes(31) + b"p").peer_id
TIP = tip_text(3, 192.5, bytes(range(32)))


def membership(*parts: Part, days: float = 30.0) -> Membership:
    return MEMBERSHIP.read(OWNER.admit(PEER, parts or (Part.TRAIN,), days, NOW), OWNER.run)


def test_a_run_id_names_its_owner() -> None:
    run = OWNER.run
    assert run.run_id.startswith("albert@")
    assert len(run.run_id) == len("albert@") + 52
    assert ClosedRun.of(run.run_id) == run
    for within in ("/grad", "_progress", "/grad.01", ".0101"):
        assert ClosedRun.of(run.run_id + within) == run
    assert ClosedRun.of("albert") is None


@pytest.mark.parametrize("change", [lambda i: i[:-1], lambda i: i + "a", lambda i: i[:-1] + "7", lambda i: "@" + i,
                                    lambda i: i.upper(), lambda i: "x@y"])  # fmt: skip
def test_a_mistyped_run_id_is_not_an_open_run(change: object) -> None:
    with pytest.raises(ValueError, match="shoal keys run"):
        ClosedRun.of(change(OWNER.run.run_id))


@pytest.mark.parametrize("name", ["", "a b", "-a", "x" * 48, "a@b", "a/b", "ä"])
def test_names_that_no_run_can_have(name: str) -> None:
    with pytest.raises(ValueError, match="can't be named"):
        OwnerKey(name)


def test_a_membership_is_one_line_that_is_read_back() -> None:
    text = OWNER.admit(PEER, [Part.TRAIN, Part.TRAIN], 30, NOW)
    assert text.startswith("shoal-membership-1:")
    assert "\n" not in text
    assert len(text) < 400
    found = MEMBERSHIP.read(f" {text}\n", OWNER.run)
    assert (found.peer_id, found.parts) == (PEER, (Part.TRAIN,))
    assert (found.issued, found.expires) == (NOW, NOW + 30 * 86400)
    assert found.is_valid(NOW)
    assert not found.is_valid(NOW + 30 * 86400)
    assert MEMBERSHIP.read_any(text) == found


def test_every_byte_of_a_statement_is_under_the_signature() -> None:
    text = OWNER.admit(PEER, [Part.WATCH], 1, NOW)
    body = text.removeprefix(MEMBERSHIP.prefix)
    data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(ValueError, match="this"):
            MEMBERSHIP.read(MEMBERSHIP.prefix + base64.urlsafe_b64encode(changed).decode(), OWNER.run)


@pytest.mark.parametrize(
    "text", ["", "x", "shoal-pin-1:AAAA", *(MEMBERSHIP.prefix + end for end in ("", "!!", "A" * 300, "A" * 100_000))]
)
def test_what_is_no_statement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="this"):
        MEMBERSHIP.read(text, OWNER.run)


def test_another_owner_or_run_or_kind_is_refused() -> None:
    other = OwnerKey("albert")
    with pytest.raises(ValueError, match="is of the run"):
        MEMBERSHIP.read(other.admit(PEER, [Part.TRAIN], 1, NOW), OWNER.run)
    # Signed by another owner, in the name of this run.
    forged = Membership(OWNER.run.run_id, PEER.key, (Part.TRAIN,), int(NOW), int(NOW) + 1, 1)
    with pytest.raises(ValueError, match="not a run of this owner"):
        MEMBERSHIP.sign(other.identity, forged)
    signed = OWNER.admit(PEER, [Part.TRAIN], 1, NOW)
    with pytest.raises(ValueError, match="no pin"):
        PIN.read(signed, OWNER.run)
    with pytest.raises(ValueError, match="this pin"):
        PIN.read(signed.replace("membership", "pin"), OWNER.run)


def test_what_each_part_includes() -> None:
    assert all(membership(Part.TRAIN).permits(part) for part in Part)
    client, auxiliary, watcher = membership(Part.CLIENT), membership(Part.AUXILIARY), membership(Part.WATCH)
    assert [p for p in Part if client.permits(p)] == [Part.CLIENT, Part.WATCH]
    assert [p for p in Part if auxiliary.permits(p)] == [Part.AUXILIARY, Part.WATCH]
    assert [p for p in Part if watcher.permits(p)] == [Part.WATCH]


@pytest.mark.parametrize("days", [0, -1, 367, float("nan"), float("inf")])
def test_a_membership_has_an_end(days: float) -> None:
    with pytest.raises(ValueError, match="days"):
        OWNER.admit(PEER, [Part.TRAIN], days, NOW)


def test_a_revoked_peer_can_be_admitted_again() -> None:
    text = OWNER.revoke([PEER], None, NOW)
    revocations = REVOCATIONS.read(text, OWNER.run)
    assert revocations.voids(membership())
    again = MEMBERSHIP.read(OWNER.admit(PEER, [Part.TRAIN], 1, NOW + 1), OWNER.run)
    assert not revocations.voids(again)
    later = REVOCATIONS.read(OWNER.revoke([OWNER.identity.peer_id], revocations, NOW), OWNER.run)
    assert later.number > revocations.number
    assert later.of_peer(PEER.key) is not None
    # A year later no membership of then is valid any more: the entry is dropped.
    assert Revocations.after(later, OWNER.run.run_id, [], NOW + 367 * 86400).revoked == ()


def test_the_list_of_revocations_is_bounded() -> None:
    peers = [PeerID(bytes(28) + number.to_bytes(4)) for number in range(MAX_REVOKED)]
    full = REVOCATIONS.read(OWNER.revoke(peers, None, NOW), OWNER.run)
    assert len(full.revoked) == MAX_REVOKED
    with pytest.raises(ValueError, match="begin a new run"):
        OWNER.revoke([PEER], full, NOW)


def test_a_pin_has_the_text_form_of_its_tip() -> None:
    pin = PIN.read(OWNER.pin(TIP, None, NOW), OWNER.run)
    assert (pin.epoch, pin.samples, pin.lineage, pin.tip, pin.rewind) == (3, 192.5, bytes(range(32)), TIP, False)
    later = PIN.read(OWNER.pin(TIP, pin, NOW, rewind=True), OWNER.run)
    assert later.number == pin.number + 1
    assert later.rewind


@pytest.mark.parametrize("tip", ["", "3", "3:1", "a:1:00", "3:1:00", "3:inf:" + "0" * 64, "3:nan:" + "0" * 64,
                                 "-1:1:" + "0" * 64, "1:-1:" + "0" * 64, "1:1:" + "g" * 64])  # fmt: skip
def test_what_is_no_tip_is_refused(tip: str) -> None:
    with pytest.raises(ValueError, match="is not a tip"):
        Pin.of_text(OWNER.run.run_id, 1, tip)


def test_a_key_is_kept_in_a_file_that_others_cannot_read_and_nothing_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "key"
    OWNER.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        OWNER.save(path)
    assert OwnerKey.load(path, OWNER.run).run == OWNER.run
    with pytest.raises(ValueError, match="is not the key of"):
        OwnerKey.load(path, OwnerKey("other").run)
