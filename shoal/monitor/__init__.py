"""Seeing a run from outside: a peer that trains nothing, reads what the others say of themselves, and shows it.

What this room promises to whoever looks:

- What is shown is what signed health records say, and what this process sees of its own connections; a record that
  breaks a rule shows nowhere (`shoal.health`).
- `picture` makes of records and losses what is shown, `verdict` one sentence of it, and `advice` what to do about the
  time of a round. They do no I/O, and are told the time.
- Watching changes nothing: there is no message here that a trainer acts on, and no right to give orders.

How to read it: `watcher` joins the DHT and feeds the `picture`; `top` draws its snapshots in a terminal, `history`
keeps them in a file, `web` serves them as a page and as Prometheus' metrics. Imports no torch; leans on `health`,
`swarm` and `dht`. `web` needs the extra `shoal[monitor]`.
"""

from __future__ import annotations

from shoal.monitor.snapshot import PeerView as PeerView
from shoal.monitor.snapshot import Snapshot as Snapshot
from shoal.monitor.watcher import Watcher as Watcher
