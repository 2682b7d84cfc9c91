"""What each peer of a run says of itself, for whoever watches. Imports no torch; leans on `swarm`, `dht`, `membership`.

What this room promises to `optim`, which writes, and to `monitor`, which reads:

- A `Health` record is bounded: what is too large, out of range or not a number reaches nobody (`record`).
- It is signed by the peer that it is of, lives 30 s, and in a closed run carries the peer's membership (`board`).
- The same record is the source of all that is shown: `top`, the page, and Prometheus' metrics (`metrics`).
"""

from __future__ import annotations
