"""Training together: the optimizer that users hold, and what it is made of. Leans on every room below it.

What this room promises to its users:

- N peers that split one batch end where one process with that batch ends, to float rounding, and bit-identical to each
  other on machines that compute alike;
- `step` may raise only what is the caller's to mend; what goes wrong on the network is dealt with and logged;
- a peer that is late, or has fallen out of step, downloads the state and goes on; a step that failed changes nothing.
"""
