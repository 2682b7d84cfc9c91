"""Identities: proof, text form, and the file that keeps one."""

from __future__ import annotations

import stat

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from shoal.p2p.identity import Identity, PeerID


def test_a_signature_holds_for_its_data_and_signer_only():
    identity, other = Identity(), Identity()
    signature = identity.sign(b"data")
    assert identity.peer_id.verify(b"data", signature)
    assert not identity.peer_id.verify(b"other data", signature)
    assert not other.peer_id.verify(b"data", signature)
    assert not identity.peer_id.verify(b"data", signature[:-1])
    assert not identity.peer_id.verify(b"data", bytes(64))


def test_the_text_form_is_libp2ps():
    # By hand from libp2p's peer id specification: CIDv1, libp2p-key, identity multihash, protobuf of a key.
    text = str(PeerID(bytes(32)))
    assert text == "bafzaajaiaejca" + "a" * 51
    assert PeerID.parse(text) == PeerID(bytes(32))


@given(st.binary(min_size=32, max_size=32))
def test_the_text_form_is_read_back(key):
    peer = PeerID(key)
    assert PeerID.parse(str(peer)) == peer
    assert str(peer).endswith(peer.short)


@given(st.text() | st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567=", max_size=80))
def test_other_text_is_refused_with_a_valueerror(text):
    with pytest.raises(ValueError, match="is not a peer id"):
        PeerID.parse(text)


def test_libp2ps_bytes_and_its_older_text_form():
    old = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"  # an example of libp2p's specification of peer ids
    peer = PeerID.from_base58(old)
    assert PeerID.parse(old) == PeerID.parse(str(peer)) == PeerID(peer.to_bytes()) == peer
    assert peer.to_base58() == old
    assert peer.to_bytes()[:6].hex() == "002408011220"


@given(st.binary(min_size=32, max_size=32))
def test_base58_is_read_back(key):
    assert PeerID.from_base58(PeerID(key).to_base58()) == PeerID(key)


@pytest.mark.parametrize("text", ["", "1", "1" * 52, "z" * 52, "12D3KooW" + "0" * 44, "12D3KooW" + "z" * 43, "é" * 52])
def test_other_base58_is_refused_with_a_valueerror(text):
    with pytest.raises(ValueError, match="is not a peer id: expected '12D3KooW"):
        PeerID.from_base58(text)


def test_a_peer_id_is_32_bytes():
    with pytest.raises(ValueError, match="32 bytes"):
        PeerID(b"short")


def test_anybody_derives_the_transport_key_from_the_peer_id():
    identity = Identity()
    public, secret = identity.curve_keys()
    assert public == identity.peer_id.curve_key()
    assert zmq.curve_public(z85.encode(secret)) == z85.encode(public)


def test_a_peer_id_that_is_no_key_has_no_transport_key():
    with pytest.raises(ValueError, match="not a valid ed25519"):
        PeerID(b"\xff" * 32).curve_key()


def test_an_identity_is_kept_in_a_file(tmp_path):
    path = tmp_path / "identity"
    first = Identity.from_file(path)
    assert Identity.from_file(str(path)).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 32


def test_a_file_that_holds_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("important")
    with pytest.raises(ValueError, match=r"notes\.txt holds 9 bytes"):
        Identity.from_file(path)
    assert path.read_text() == "important"


def test_a_folder_that_does_not_exist_is_an_oserror(tmp_path):
    with pytest.raises(OSError, match="missing"):
        Identity.from_file(tmp_path / "missing" / "identity")
