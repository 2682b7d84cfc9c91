"""``shoal doctor``: what would stop this machine from taking part, each with the way out."""
