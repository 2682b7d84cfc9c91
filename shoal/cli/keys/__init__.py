"""``shoal keys``: what the owner of a closed run does; see ``shoal.membership``."""
