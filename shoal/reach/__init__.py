"""How a peer is reached: whether others reach it, at which address, and what helps where they don't.

What this room promises to the rooms above it:

- What others say of this peer's reach is judged by two hosts where there are two to ask; one that lies alone changes
  nothing.
- A node dials back to the asker's own address only, and only the asker can answer there.

It leans on p2p only, and not on torch.
"""
