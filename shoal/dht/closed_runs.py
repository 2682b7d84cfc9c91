"""The rule for records of closed runs in the DHT: nodes keep only records that a member or the owner of the run has
written.

A node can check this without a membership, and without being in the run: the run's id contains the owner's public key.
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

OWNER = "/owner"  # appended to a run's id: the key of the owner's revocations and pin
MAX_KNOWN = 8192  # records whose verdicts are remembered


class ClosedRunValidator(RecordValidator):
    """The rule for records under the keys of a closed run.

    - Under `<run id>…/members` and `<run id>…/health`, a record belongs to a peer that the run's owner has admitted.
      Its value is (what the peer says, its membership).
    - Under `<run id>/owner`, the value is (revocations, pin), both signed by the run's owner.

    Each of these records names exactly one peer as its owner, who signs it (`SignatureValidator`). Records under other
    keys always pass.

    This rule does not check whether a membership has expired or was revoked. The readers of a record check that.
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
            return True  # an application's own key that happens to look like this
        if run is None:
            return True
        digest = blake3(record.key + b"\0" + record.subkey + b"\0" + record.value).digest(length=16)
        if digest not in self._known:
            self._known[digest] = self._is_signed(record, run, end)
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return self._known[digest]

    def refusal(self, record: DHTRecord) -> str:
        return "the run is closed: under its keys, members write with their membership, and its owner what is signed"

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
        """One `ClosedRunValidator` is enough: all of them apply the same rule."""
        return isinstance(other, ClosedRunValidator)


_keys = msgspec.msgpack.Decoder(str)
_listed = msgspec.msgpack.Decoder(tuple[msgspec.Raw, str])
_words = msgspec.msgpack.Decoder(tuple[str, str])
