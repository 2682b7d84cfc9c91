"""A record of this peer's own that a rule refuses is one warning: the key, the rule, and the type of the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import pytest

from shoal.dht.records import DHTRecord
from shoal.dht.validation import BytesWithPublicKey, RecordValidator, SchemaValidator, owner_marker
from shoal.membership.owner import OwnerKey
from shoal.p2p.identity import Identity
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.dht.swarms import join

Whole = Annotated[int, msgspec.Meta(ge=0)]


class Metrics(msgspec.Struct):
    """As in hivemind's ALBERT example, whose pydantic schema has StrictInt and StrictFloat."""

    step: Whole
    samples_per_second: float
    samples_accumulated: Whole


class Even(RecordValidator):
    """A rule of a user."""

    def validate(self, record: DHTRecord) -> bool:
        return len(record.value) % 2 == 0


def told(
    caplog: pytest.LogCaptureFixture,
    rules: Sequence[RecordValidator],
    value: Any,
    *,
    key: str = "run_metrics",
    own: bool = False,
    subkey: Any = None,
) -> list[str]:
    async def scenario() -> bool:
        world = World(1)
        node = await join(world)
        node.add_validators(rules)
        place = owner_marker(node.peer_id) if own else subkey
        return await node.store(key, value, world.wall_clock() + 60, place)

    assert not run(scenario())
    return [record.getMessage() for record in caplog.records]


def test_of_a_schema_it_names_the_field(caplog: pytest.LogCaptureFixture) -> None:
    schema = SchemaValidator({"metrics": dict[BytesWithPublicKey, Metrics]}, prefix="run")
    [line] = told(caplog, [schema], {"step": 1, "samples_per_second": 2.0, "samples_accumulated": 8.0}, own=True)
    assert line.startswith("1 records are not stored: key 'run_metrics', subkey '[owner:")
    assert "value of type dict (step: int, samples_per_second: float, samples_accumulated: float): " in line
    assert "the schema wants dict[" in line
    assert "Metrics]: Expected `int`, got `float` - at `$[...].samples_accumulated`" in line


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        (SchemaValidator({"run_metrics": int}), 8.0, "value of type float: the schema wants int: Expected `int`"),
        (SchemaValidator({"run_metrics": Whole}), -1, "value of type int: the schema wants typing.Annotated[int, "),
        (SchemaValidator({"other": int}, allow_extra_keys=False), "x", "value of type str: the schema has no such key"),
        (SchemaValidator({"run_metrics": dict[str, int]}), {"a": 1}, "value of type dict (a: int): the schema has"),
        (Even(), True, "value of type bool: Even refuses it"),
    ],
)  # fmt: skip
def test_of_each_rule(caplog: pytest.LogCaptureFixture, schema: RecordValidator, value: Any, said: str) -> None:
    [line] = told(caplog, [schema], value)
    assert line.startswith(f"1 records are not stored: key 'run_metrics', {said}")


def test_two_types_of_a_key_are_both_named(caplog: pytest.LogCaptureFixture) -> None:
    [line] = told(caplog, [SchemaValidator({"run_metrics": int}), SchemaValidator({"run_metrics": str})], 1.5)
    assert "the schema wants int or str: Expected `int`, got `float`; Expected `str`, got `float`" in line


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (str, "the schema wants str: there is one value there: give no subkey"),
        (list[str], "the schema wants list[str]: there is one value there: give no subkey"),
        (dict[str, int], "the schema wants dict[str, int]: Expected `int`, got `object` - at"),
    ],
)
def test_a_subkey_where_the_schema_has_one_value(caplog: pytest.LogCaptureFixture, wanted: Any, said: str) -> None:
    [line] = told(caplog, [SchemaValidator({"run_metrics": wanted})], {"a": "x"}, subkey="me")
    assert said in line


def test_keys_of_dictionaries_are_short_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    value = {"k" * 1000: (1,), "a\nERROR forged \x1b[2J": 1, 3: 2.0, b"\xff\n": None}
    [line] = told(caplog, [SchemaValidator({"run_metrics": int})], value)
    assert f"value of type dict ({'k' * 40}…: list or tuple, 'a\\nERROR forged \\x1b[2J': int, 3: float, b'" in line
    assert line.isprintable()
    assert len(line) < 400


@pytest.mark.parametrize("size", [1, 100])
def test_of_a_record_of_another_peer(caplog: pytest.LogCaptureFixture, size: int) -> None:
    other = Identity(bytes([1]) * 32).peer_id
    [line] = told(caplog, [], "x" * size, subkey=owner_marker(other))
    assert "value of type str: only its owner can write it" in line
    assert line.count(str(other)) == 2


def test_of_a_closed_run(caplog: pytest.LogCaptureFixture) -> None:
    [line] = told(caplog, [], ("me", ""), key=f"{OwnerKey('mine').run.run_id}/members", own=True)
    assert "value of type list or tuple: the run is closed" in line
