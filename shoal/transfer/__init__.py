"""Handing a whole state to a newcomer: the manifest that names it, the donor that serves it, the download that checks
every chunk. Depends on `swarm`, `p2p`, `flat` and `compression`.
"""
