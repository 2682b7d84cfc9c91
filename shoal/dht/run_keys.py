"""The keys that belong to a run. Their records need an owner, so that nobody writes in another peer's name."""

from __future__ import annotations

from shoal.dht.records import NO_SUBKEY, DHTRecord, encode_key, owners_in, owners_of

MEMBERS = "/members"  # appended to a run's id: the key under which its members are listed
HEALTH = "/health"  # the key of the health records that peers write about themselves
_ENDINGS = (MEMBERS.encode(), HEALTH.encode())
_TEXT = frozenset({*range(0xA0, 0xC0), 0xD9, 0xDA})  # the first byte of a msgpack string of up to 64 KiB
# Anybody may write a health record, so these records are small and short-lived, and a later one never displaces an
# earlier one. An attacker with many identities can keep new peers out of a key, but can't make others leave it.
MAX_HEALTH_RECORDS = 256  # of one key
MAX_HEALTH_BYTES = 2 << 10  # of one record, see `DHTRecord.size`
MAX_HEALTH_SECONDS = 90.0  # from now to its expiration time: a record lives 30 s, and clocks differ


def members_key(run_id: str) -> str:
    """The key under which the members of a run are listed."""
    return run_id + MEMBERS


def health_key(run_id: str, shard: str = "") -> str:
    """The key under which the peers of a run publish their health records. Large runs have one key for each `shard`."""
    return f"{run_id}/{shard}{HEALTH}" if shard else run_id + HEALTH


def is_health(record: DHTRecord) -> bool:
    """Whether this is a health record, which a peer writes about itself."""
    return record.key.endswith(_ENDINGS[1]) and record.key[0] in _TEXT


def is_excessive(record: DHTRecord, now: float) -> bool:
    """Whether this is a health record that is too large or expires too late."""
    return is_health(record) and (record.size > MAX_HEALTH_BYTES or record.expiration_time > now + MAX_HEALTH_SECONDS)


def is_misplaced(record: DHTRecord) -> bool:
    """Whether `record` is under a run's key but has no owner, or is not at the one subkey that its owner has there."""
    if not (record.key.endswith(_ENDINGS) and record.key[0] in _TEXT):
        return False
    owners = owners_of(record)
    if len(owners) != 1:
        return True
    if record.subkey == NO_SUBKEY:
        return False  # the key names the owner
    return not owners_in(record.key) and record.subkey != encode_key(f"[owner:{owners[0].decode(errors='replace')}]")
