"""How others reach a peer: whether they can, at which address, and how relays, circuits and hole punching help if not.

This room promises to the rooms above it:

- A peer believes what others say about its reachability if two hosts agree, where there are two to ask. One host that
  lies alone changes nothing.
- A node dials back only to the asker's own address, and only the asker can answer there.
- A relay passes on bytes that it can't read. TLS and seals are those of the two peers, and each peer proves its id to
  the other, whichever of them opened the connections.
- The connections, the memory and the bytes per second that a relay spends on others are bounded.
- Losing a relay costs the same as losing a link: nothing waits for it.

This room uses only p2p, and no torch.
"""
