"""Addresses: what is read, what is written, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import MAX_LENGTH, Multiaddr

PEER = PeerID(bytes(range(32)))
GOOD = [
    "/ip4/127.0.0.1/tcp/31337",
    "/ip4/0.0.0.0/tcp/0",
    "/ip6/::1/tcp/65535",
    "/dns/example.org/tcp/80",
    "/dns4/a-b.example/tcp/1",
    "/dns6/localhost/tcp/1",
]


@pytest.mark.parametrize("text", GOOD)
@pytest.mark.parametrize("tail", ["", f"/p2p/{PEER}"])
def test_an_address_is_written_as_it_was_read(text, tail):
    address = Multiaddr(text + tail)
    assert str(address) == text + tail
    assert address.peer_id == (PEER if tail else None)
    assert Multiaddr(address) == address
    assert str(address.with_peer(PEER).with_port(7)).endswith(f"/tcp/7/p2p/{PEER}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "use /ip4/<address>/tcp/<port>"),
        ("127.0.0.1:31337", "use /ip4/<address>/tcp/<port>"),
        ("/ip4/127.0.0.1/udp/31337", "use /ip4/<address>/tcp/<port>"),
        ("/ip4/127.0.0.1/tcp/31337/quic/x", "use /ip4/<address>/tcp/<port>"),
        ("/ip4/127.0.0.1/tcp/65536", "'65536' is not a TCP port"),
        ("/ip4/127.0.0.1/tcp/-1", "'-1' is not a TCP port"),
        ("/ip4/127.0.0.1/tcp/1_0", "'1_0' is not a TCP port"),
        ("/ip4/127.0.0.1/tcp/", "'' is not a TCP port"),
        ("/ip4/::1/tcp/1", "not an ip4 address"),
        ("/ip6/127.0.0.1/tcp/1", "not an ip6 address"),
        ("/ip6/fe80::1%eth0/tcp/1", "not an ip6 address"),
        ("/ip4/127.0.0.256/tcp/1", "127.0.0.256"),
        ("/dns/exa mple/tcp/1", "not a host name"),
        ("/dns/example\n/tcp/1", "not a host name"),
        ("/dns//tcp/1", "not a host name"),
        ("/onion/abc/tcp/1", "use ip4, ip6, dns"),
        ("/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "is not a peer id"),
        ("/ip4/127.0.0.1/tcp/1/p2p/" + "b" * MAX_LENGTH, "is not an address"),
    ],
)
def test_what_is_wrong_is_said(text, complaint):
    with pytest.raises(ValueError, match="is not an address") as caught:
        Multiaddr(text)
    assert complaint in str(caught.value)


PIECES = st.sampled_from(
    ["", "/", "ip4", "ip6", "dns", "tcp", "p2p", "127.0.0.1", "::1", "%", "80", "a.b", "\x00", str(PEER)]
)


@given(st.text(max_size=600) | st.lists(PIECES | st.text(max_size=5), max_size=9).map("/".join))
def test_reading_anything_gives_an_address_or_a_valueerror(text):
    try:
        address = Multiaddr(text)
    except ValueError:
        return
    assert Multiaddr(str(address)) == address


def test_parts_of_an_address_as_in_py_multiaddr():
    address = Multiaddr("/dns4/example.org/tcp/80")
    whole = address.encapsulate(f"/p2p/{PEER}")
    assert whole == Multiaddr(f"/dns4/example.org/tcp/80/p2p/{PEER}")
    assert whole.decapsulate(f"/p2p/{PEER}") == address
    assert whole.decapsulate(f"/p2p/{PEER.to_base58()}") == address
    assert [whole.value_for_protocol(name) for name in ("dns4", "tcp", "p2p")] == ["example.org", "80", str(PEER)]
    with pytest.raises(LookupError, match=r"there is no /p2p/ in /dns4/example\.org/tcp/80"):
        address.value_for_protocol("p2p")
    with pytest.raises(ValueError, match="is not an address"):
        whole.encapsulate("/tcp/1")
    with pytest.raises(ValueError, match="/tcp/8 is not in"):
        whole.decapsulate("/tcp/8")
    with pytest.raises(ValueError, match="is not an address"):
        whole.decapsulate("/tcp/80")
