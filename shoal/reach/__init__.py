"""How a peer is reached: whether others reach it, at which address, and what helps where they don't: relays, circuits
through them, holes in routers.

What this room promises to the rooms above it:

- What others say of this peer's reach is judged by two hosts where there are two to ask; one that lies alone changes
  nothing.
- A node dials back to the asker's own address only, and only the asker can answer there.
- A relay passes on bytes that it can't read: TLS and seals are those of the two peers, and each proves its id to the
  other, whoever has opened the connections.
- What a relay spends on others is bounded: connections, memory, and bytes per second.
- A relay that is lost costs what a lost link costs: nothing waits for it.

It leans on p2p only, and not on torch.
"""
