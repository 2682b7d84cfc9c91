"""Who may take part in a closed run: what its owner signs, and how that is checked.

It promises to `swarm` and the rooms above: every statement is checked as a whole (kind, bounds, run, signature of the
owner) before any of it is returned; time is an argument; there is no I/O but that of `OwnerKey`'s file. It imports
nothing but identities.
"""

from shoal.membership.membership import Membership as Membership
from shoal.membership.membership import Part as Part
from shoal.membership.owner import OwnerKey as OwnerKey
from shoal.membership.pin import Pin as Pin
from shoal.membership.pin import tip_text as tip_text
from shoal.membership.revocations import Revocations as Revocations
from shoal.membership.run import ClosedRun as ClosedRun
