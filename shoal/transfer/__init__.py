"""The transfer of a whole state to a newcomer: `manifest` names the state, `donor` serves it, and `transfer` downloads
it and checks every chunk. Depends on `swarm`, `p2p`, `flat` and `compression`.
"""
