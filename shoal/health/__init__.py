"""Health records: what each peer of a run publishes about itself, for monitoring. Imports no torch; depends on `swarm`,
`dht` and `membership`.

What this room promises to `optim`, which writes the records, and to `monitor`, which reads them:

- A `Health` record is bounded. Readers ignore records that are too large, or have a value that is out of range or not a
  number (`record`).
- Each record is signed by its peer and lives 30 s. In a closed run it carries the peer's membership (`board`).
- `shoal top`, the page of `shoal monitor` and Prometheus' metrics (`metrics`) all show the same records.

Records are rare, and of now. A trace (`trace`) is a file with all that a replica has done, for `shoal plot`.
"""

from __future__ import annotations
