"""``shoal doctor``: what would stop this machine from taking part in a run, and the way out of each."""
