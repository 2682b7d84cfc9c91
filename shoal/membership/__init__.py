"""Membership of closed runs: the statements that a run's owner signs, and how they are checked.

This room promises to `swarm` and the rooms above: every statement is checked as a whole (kind, bounds, run, signature
of the owner) before any part of it is returned. Time is an argument. There is no I/O except for the file of an
`OwnerKey` and of a `Holder`. It imports only identities.
"""

from shoal.membership.membership import Membership as Membership
from shoal.membership.membership import Part as Part
from shoal.membership.owner import OwnerKey as OwnerKey
from shoal.membership.pin import Pin as Pin
from shoal.membership.pin import tip_text as tip_text
from shoal.membership.revocations import Revocations as Revocations
from shoal.membership.run import ClosedRun as ClosedRun
