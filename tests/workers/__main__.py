"""A worker process of a test: makes its role, and calls its methods, as lines on stdin say; answers each with a line.

python -m tests.workers MODULE ROLE
"""

from __future__ import annotations

import logging
import sys
import traceback
from importlib import import_module
from typing import Any

import msgspec
import torch

from tests.telling import say
from tests.workers.commands import begun, commands_of


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig()
    logging.getLogger().handlers[0].setLevel(logging.ERROR)  # tests expect the rest
    role = getattr(import_module(sys.argv[1]), sys.argv[2])
    decoder = msgspec.json.Decoder(commands_of(role))
    actor: Any = None
    for line in sys.stdin:
        try:
            command = decoder.decode(line)
            name, given = type(command).__name__, msgspec.structs.asdict(command)
            if name == role.__name__:
                actor = role(**given)
                say(answer=begun(actor))
            else:
                say(answer=getattr(actor, name)(**given))
        except Exception:  # noqa: BLE001 (whatever it is, the test shows it)
            say(error=traceback.format_exc())


main()
