"""Where peers find each other: a Kademlia key-value store of small public records. Imports no torch; leans on `p2p`.

What this room promises to the rooms above it:

- A record is stored on the `num_replicas` nodes nearest to its key, until its expiration time. It is found from every
  node, also after a third of the nodes was killed at once: with 32 nodes, 10 of them killed and the default of 10
  replicas, a key is lost with probability C(10, 10) / C(32, 10) = 1.6e-8 (see `DHTNode`).
- A dictionary is written by many peers, one subkey each; what expires later wins, on all nodes alike.
- A key or subkey that contains `[owner:<peer id>]` is written by that peer only; every node checks that, always.
- Everything has a deadline, and what a node keeps is bounded in number and in bytes.

It is for finding each other, not for bulk or for speed: `averaging` publishes its members here, `monitor` its metrics.
`routing`, `lookup`, `storage`, `replication` and `validation` do no I/O and are told the time; `DHTNode` drives them on
the loop of a `p2p.Node` (the reactor's, or the simulation's virtual one); `DHT` is what users hold.
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
