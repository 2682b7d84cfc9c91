"""How much work one identity may cause a node of the DHT.

An honest peer stores one record every 15 s for each of its runs, and passes on the records of others when nodes come
and go. The rates are far above that. One identity that uses them up takes one core for 1 s at first, and some percent
of a core after that. A node that has very many records to pass on can exceed the rates. The refused records are stored
again minutes later, by that node or another.
"""

from __future__ import annotations

from shoal.p2p.quota import Rate

STORED_RECORDS = Rate(512, 8192)  # records that one peer may ask a node to store
STORED_BYTES = Rate(1 << 20, 16 << 20)
VERIFIED = Rate(256, 4096)  # signatures to check of records that one peer sends, in requests and in replies
OWNED_RECORDS = Rate(32, 1024)  # new records of one owner, from any sender
