"""Which keys belong to a run: their records need an owner, so that nobody writes in the name of others."""

from __future__ import annotations

from shoal.dht.records import NO_SUBKEY, DHTRecord, encode_key, owners_in, owners_of

MEMBERS = "/members"  # after a run's id: the key of the records of its members
HEALTH = "/health"  # the key of what they say of themselves
_ENDINGS = (MEMBERS.encode(), HEALTH.encode())
_TEXT = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA})  # what msgpack begins a text with
# Anybody may write a health record. So they are small and live a short time, and those that are there first stay: who
# comes later, with however many identities, can keep newcomers out of a key and not make others go.
MAX_HEALTH_RECORDS = 256  # of one key
MAX_HEALTH_BYTES = 2 << 10  # of one, see `DHTRecord.size`
MAX_HEALTH_SECONDS = 90.0  # from now to its expiration time: it lives 30 s, and clocks differ


def members_key(run_id: str) -> str:
    """The key under which the members of a run are listed."""
    return run_id + MEMBERS


def health_key(run_id: str, shard: str = "") -> str:
    """The key under which the peers of a run say how they are; large runs have one for each `shard`."""
    return f"{run_id}/{shard}{HEALTH}" if shard else run_id + HEALTH


def is_health(record: DHTRecord) -> bool:
    """Whether it is a record of what a peer says of itself."""
    return record.key.endswith(_ENDINGS[1]) and record.key[0] in _TEXT


def is_excessive(record: DHTRecord, now: float) -> bool:
    """Whether it is a health record that is larger, or would stay longer, than one may."""
    return is_health(record) and (record.size > MAX_HEALTH_BYTES or record.expiration_time > now + MAX_HEALTH_SECONDS)


def is_misplaced(record: DHTRecord) -> bool:
    """Whether `record` is under a run's key and is nobody's, or is not at the one place that its owner has there."""
    if not (record.key.endswith(_ENDINGS) and record.key[0] in _TEXT):
        return False
    owners = owners_of(record)
    if len(owners) != 1:
        return True
    if record.subkey == NO_SUBKEY:
        return False  # the key names the owner
    return not owners_in(record.key) and record.subkey != encode_key(f"[owner:{owners[0].decode(errors='replace')}]")
