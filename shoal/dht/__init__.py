"""The DHT: a Kademlia key-value store of small public records, by which peers find each other. Imports no torch; uses
`p2p`.

This room promises to the rooms above it:

- A record is stored on the `num_replicas` nodes nearest to its key, until its expiration time. Every node can find it,
  even after a third of the nodes is killed at once. With 32 nodes, 10 of them killed and the default of 10 replicas, a
  key is lost with probability C(10, 10) / C(32, 10) = 1.6e-8 (see `DHTNode`).
- Many peers can write one dictionary, each under a subkey of its own. Of two values, every node keeps the one that
  expires later.
- Only the peer `<peer id>` can write a key or subkey that contains `[owner:<peer id>]`. Every node checks this for
  every record.
- Every operation has a deadline. The records that a node keeps are bounded in number and in bytes.

The DHT is for finding peers, not for bulk data and not for speed: `averaging` publishes the members of a run here,
`monitor` its metrics. `routing`, `lookup`, `storage`, `replication` and `validation` do no I/O and get the time as an
argument. `DHTNode` drives them on the loop of a `p2p.Node` (the reactor's loop, or the virtual loop of the simulation).
Users hold a `DHT`.
"""

from __future__ import annotations

from shoal.dht.created import CreatedNode as DHTNode
from shoal.dht.dht import DHT
from shoal.dht.records import ValueWithExpiration, get_dht_time
from shoal.dht.validation import BytesWithPublicKey, RecordValidator, SchemaValidator, SignatureValidator

__all__ = [
    "DHT",
    "BytesWithPublicKey",
    "DHTNode",
    "RecordValidator",
    "SchemaValidator",
    "SignatureValidator",
    "ValueWithExpiration",
    "get_dht_time",
]
