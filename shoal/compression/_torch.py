"""The private names of torch that this room uses. No other file of the room uses one. The column "torch has it since"
comes from the sources of torch 2.0.1, 2.4.0 and 2.6.0. Shoal supports 2.6 and later.

| name | what for | torch has it since | where it is missing |
|---|---|---|---|
| ``torch._foreach_copy_`` | one operation that copies the pieces of many small tensors | 2.4, not in 2.0 | importing the room raises AttributeError |
"""  # noqa: E501  # a table has no other way to break its lines

from __future__ import annotations

import torch

foreach_copy_ = torch._foreach_copy_
