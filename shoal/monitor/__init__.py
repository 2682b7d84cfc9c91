"""Monitoring: a peer that trains nothing reads the health records of the others and shows them.

What this room promises to its users:

- It shows only what signed health records say, and what this process sees of its own connections. A record that breaks
  a rule is ignored (`shoal.health`).
- Monitoring changes nothing: no trainer acts on any message that this room sends.

Where to find what: `watcher` joins the DHT and passes records and lost connections to `picture`, which makes snapshots
of them. `findings` says which peers are not well, `verdict` sums that up in one sentence, and `advice` says how to
shorten epochs. These four do no I/O, and time is an argument. `top` draws snapshots in a terminal, `history` keeps them
in a file, and `web` serves them as a page and as Prometheus metrics. Imports no torch; depends on `health`, `swarm` and
`dht`. `web` needs the extra `shoal[monitor]`.
"""

from __future__ import annotations

from shoal.monitor.snapshot import PeerView as PeerView
from shoal.monitor.snapshot import Snapshot as Snapshot
from shoal.monitor.watcher import Watcher as Watcher
