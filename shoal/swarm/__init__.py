"""One peer's part in a run: it knows the other members, counts samples with them, and takes part in rounds.

Depends on `p2p` and `dht`, and imports no torch: the interface `BytesExchange` hides the tensors of a round.
`protocol/` makes the decisions; the files of this folder carry them out, on the asyncio loop of a `shoal.p2p.Node`.
"""
