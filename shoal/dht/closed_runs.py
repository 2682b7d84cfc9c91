"""What nodes of the DHT keep under the keys of closed runs: only what a member, or the run's owner, has written.

A node needs no membership for that, and need not be in the run: the owner's public key is in the run's id.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from shoal.dht.records import DHTRecord, decode_value, owners_of
from shoal.dht.run_keys import HEALTH, MEMBERS
from shoal.dht.validation import RecordValidator
from shoal.membership.membership import MEMBERSHIP
from shoal.membership.pin import PIN
from shoal.membership.revocations import REVOCATIONS
from shoal.membership.run import ClosedRun
from shoal.p2p.identity import PeerID

OWNER = "/owner"  # after a run's id: the key of what its owner says
MAX_KNOWN = 8192  # records whose signatures were looked into


class ClosedRunValidator(RecordValidator):
    """Under `<run id>…/members` and `<run id>…/health` of a closed run, a record is of a peer that the run's owner has
    admitted, and carries its membership: (what it says, membership). Under `<run id>/owner` it is what the owner has
    signed: (revocations, pin). All have an owner, who has signed the record (`SignatureValidator`). Other keys are left
    alone.

    That a membership has not expired, and was not revoked, is for those to look at who read it.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def validate(self, record: DHTRecord) -> bool:
        if b"@" not in record.key:
            return True
        try:
            key = _keys.decode(record.key)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return True
        end = next((end for end in (MEMBERS, HEALTH, OWNER) if key.endswith(end)), "")
        try:
            run = ClosedRun.of(key) if end else None
        except ValueError:
            return True  # of an application that names its keys so
        if run is None:
            return True
        digest = blake3(record.key + b"\0" + record.subkey + b"\0" + record.value).digest(length=16)
        if digest not in self._known:
            self._known[digest] = self._is_signed(record, run, end)
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return self._known[digest]

    def _is_signed(self, record: DHTRecord, run: ClosedRun, end: str) -> bool:
        owners = owners_of(record)
        if len(owners) != 1:
            return False
        try:
            said = decode_value(record.value)
            if end != OWNER:
                _, membership = _listed.decode(said)
                return MEMBERSHIP.read(membership, run).peer == PeerID.parse(owners[0].decode()).key
            revocations, pin = _words.decode(said)
            for kind, text in ((REVOCATIONS, revocations), (PIN, pin)):
                if text:
                    kind.read(text, run)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            return False
        return True

    def merge_with(self, other: RecordValidator) -> bool:
        """One is enough."""
        return isinstance(other, ClosedRunValidator)


_keys = msgspec.msgpack.Decoder(str)
_listed = msgspec.msgpack.Decoder(tuple[msgspec.Raw, str])
_words = msgspec.msgpack.Decoder(tuple[str, str])
