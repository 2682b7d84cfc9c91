"""What a token is good for, and how long."""

from __future__ import annotations

import itertools

from shoal.p2p.tokens import TOKEN_BYTES, TOKEN_SECONDS, Tokens


def counted() -> Tokens[str]:
    numbers = itertools.count()
    return Tokens(lambda nbytes: next(numbers).to_bytes(nbytes, "big"))


def test_a_token_is_good_once():
    tokens = counted()
    one, other = tokens.issue("one", 0.0), tokens.issue("other", 0.0)
    assert len(one) == len(other) == TOKEN_BYTES
    assert one[:1] == other[:1] == b"\0"
    assert tokens.redeem(other, 1.0) == "other"
    assert tokens.redeem(other, 1.0) is None
    assert tokens.redeem(one, 1.0) == "one"


def test_a_token_is_good_for_ten_seconds():
    tokens = counted()
    old, older = tokens.issue("old", 5.0), tokens.issue("older", 5.0)
    assert tokens.redeem(old, 5.0 + TOKEN_SECONDS - 0.01) == "old"
    assert tokens.redeem(older, 5.0 + TOKEN_SECONDS) is None


def test_an_unknown_token_is_good_for_nothing_and_old_ones_are_forgotten():
    tokens = counted()
    assert tokens.redeem(bytes(TOKEN_BYTES), 0.0) is None
    for second in range(100):
        tokens.issue("", float(second))
    assert len(tokens._grants) == TOKEN_SECONDS
