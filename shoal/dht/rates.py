"""How much one identity may have a node of the DHT do.

An honest peer stores one record in 15 s for each of its runs, and passes on the records of others when nodes come and
go. The rates are far above that. One identity that uses them up takes 1 s of one core at first, and then some percent.
What is refused of a node that has very many records to pass on is stored anew minutes later, by it or another.
"""

from __future__ import annotations

from shoal.p2p.quota import Rate

STORED_RECORDS = Rate(512, 8192)  # that one peer asks a node to store
STORED_BYTES = Rate(1 << 20, 16 << 20)
VERIFIED = Rate(256, 4096)  # signatures of records that one peer sends, in requests and in replies
OWNED_RECORDS = Rate(32, 1024)  # that are stored anew for one owner, whoever sends them
