"""Training together: the optimizer that users hold, and what it is made of. Leans on every room below it.

What this room promises to its users:

- N peers that split one batch end where one process with that batch ends, to float rounding, and bit-identical to each
  other on machines that compute alike;
- `step` may raise only what is the caller's to mend; what goes wrong on the network is dealt with and logged;
- a peer that is late, or has fallen out of step, downloads the state and goes on; a step that failed changes nothing.

How to read it: `optimizer.py` is the public face and `settings.py` its options; `update.py` ends an epoch, at once or
in the background; `vector.py` says what a round averages: `gradients.py` (or `own_gradients.py`) and `shared.py`;
`replica.py` is this peer's state (`state.py`), which may be on the host (`offload.py`); `run.py` is its part in the
run, `progress.py` counts samples. `gradient_averager.py`, `power_sgd.py`, `training_state_averager.py` and
`progress_tracker.py` are for those who train without an `Optimizer`.
"""
