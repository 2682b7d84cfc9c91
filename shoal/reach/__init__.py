"""How a peer is reached that nobody can dial: relays, circuits through them, holes in routers. Imports no torch.

What this room promises to the rooms above it:

- A relay passes on bytes that it can't read: TLS and seals are those of the two peers, and each proves its id to the
  other, whoever has opened the connections.
- What a relay spends on others is bounded: connections, memory, and bytes per second.
- A relay that is lost costs what a lost link costs: nothing waits for it.
"""
