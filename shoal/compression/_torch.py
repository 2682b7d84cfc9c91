"""The private names of torch that this room uses. No other file of the room reaches for one.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``torch._foreach_copy_`` | one operation that copies the pieces of many small tensors | 2.1 | importing the room raises AttributeError |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

import torch

foreach_copy_ = torch._foreach_copy_
