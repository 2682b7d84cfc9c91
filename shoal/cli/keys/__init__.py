"""``shoal keys``: commands for the owner of a closed run; see ``shoal.membership``."""
