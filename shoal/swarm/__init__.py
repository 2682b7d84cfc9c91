"""One peer's part in a run: it knows the other members, counts samples with them, and takes part in rounds.

Depends on `p2p` and `dht`, and imports no torch: the bytes of a round are behind an interface. `protocol/` decides; the
files of this folder perform what it decides, on the asyncio loop of a `shoal.p2p.Node`.
"""
