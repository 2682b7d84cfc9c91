"""Identities: proof, text form, and the file that keeps one."""

from __future__ import annotations

import stat
from datetime import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p import tls
from shoal.p2p.identity import MAX_VERIFIED, Identity, PeerID, _Verified


def test_a_signature_holds_for_its_data_and_signer_only():
    identity, other = Identity(), Identity()
    signature = identity.sign(b"data")
    assert identity.peer_id.verify(b"data", signature)
    assert not identity.peer_id.verify(b"other data", signature)
    assert not other.peer_id.verify(b"data", signature)
    assert not identity.peer_id.verify(b"data", signature[:-1])
    assert not identity.peer_id.verify(b"data", bytes(64))


def test_a_signature_that_was_good_once_makes_no_other_good(monkeypatch):
    identity, other = Identity(), Identity()
    signature = identity.sign(b"data")
    assert identity.peer_id.verify(b"data", signature)
    monkeypatch.setattr(PeerID, "public_key", lambda _: pytest.fail("it was verified before"))
    assert identity.peer_id.verify(b"data", signature)
    monkeypatch.undo()
    assert not identity.peer_id.verify(b"dat", b"a" + signature[:-1])
    assert not identity.peer_id.verify(b"datb", signature)
    assert not other.peer_id.verify(b"data", signature)
    assert not identity.peer_id.verify(b"data", signature[:-1] + bytes([signature[-1] ^ 1]))


def test_so_many_signatures_are_remembered_and_no_more():
    remembered = _Verified()
    for number in range(10 * MAX_VERIFIED):
        remembered.add(number.to_bytes(8))
        assert number.to_bytes(8) in remembered
        assert max(0, number - MAX_VERIFIED // 2 + 1).to_bytes(8) in remembered
        assert len(remembered._names) + len(remembered._older) <= MAX_VERIFIED


def test_the_text_form_is_libp2ps():
    # By hand from libp2p's peer id specification: CIDv1, libp2p-key, identity multihash, protobuf of a key.
    text = str(PeerID(bytes(32)))
    assert text == "bafzaajaiaejca" + "a" * 51
    assert PeerID.parse(text) == PeerID(bytes(32))


@given(st.binary(min_size=32, max_size=32))
def test_the_text_form_is_read_back(key):
    peer = PeerID(key)
    assert PeerID.parse(str(peer)) == peer


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


def test_an_identity_file_of_before_is_the_same_peer(tmp_path):
    """The 32 bytes of the seed, as PyNaCl kept them; RFC 8032's first test vector."""
    path = tmp_path / "identity"
    path.write_bytes(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    identity = Identity.from_file(path)
    assert identity.peer_id.key.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert identity.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901")


def test_nothing_is_proven_by_a_peer_id_that_is_no_key():
    assert not PeerID(b"\xff" * 32).verify(b"data", bytes(64))


def test_a_certificate_names_its_peer():
    context, certificate = tls.listening(identity := Identity())
    assert tls.peer_of(certificate) == identity.peer_id
    assert context.num_tickets == 0
    assert tls.peer_of(b"no certificate") is None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    times = datetime(2020, 1, 1), datetime(2030, 1, 1)
    other = x509.CertificateBuilder(name, name, key.public_key(), 1, *times).sign(key, SHA256())
    assert tls.peer_of(other.public_bytes(Encoding.DER)) is None


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_certificate_is_an_error():
    _, certificate = tls.listening(Identity())
    for place in range(len(certificate)):
        for changed in range(256):
            tls.peer_of(certificate[:place] + bytes([changed]) + certificate[place + 1 :])


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
