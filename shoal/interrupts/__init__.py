"""A signal handler may raise an exception at any bytecode of the main thread. While the main thread is in a call of
Shoal, the user's handlers wait until Shoal's own work is whole, or until the call waits for others.

This room promises that what a handler raises comes out of the call as it is, and that nothing in the call catches it.
All rooms that users call in their own thread, and that wait there, use it.
"""

from shoal.interrupts.hold import Interrupted, check, held, holding, raised_by, unbroken, users_handlers
from shoal.interrupts.waiting import any_finished, finished, has_rung, result_of

__all__ = [
    "Interrupted",
    "any_finished",
    "check",
    "finished",
    "has_rung",
    "held",
    "holding",
    "raised_by",
    "result_of",
    "unbroken",
    "users_handlers",
]
