"""What a round averages: the flat memory that this peer brings, and that of the result."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.averaging.exchange import Exchange
from shoal.compression import CodecPlan, Compression, CompressionInfo, plan_codecs
from shoal.flat import FlatBuffer, Layout
from shoal.swarm.protocol.contribution import Fault, SendTo
from shoal.swarm.protocol.messages import Begin


class Vector:
    """Inputs and outputs of the rounds of one layout, apart from each other: a round that fails has changed no input.

    Args:
        layout: of what is averaged, on the host.
        compression: how it travels.
        infos: names and roles of the tensors, in the layout's order; by default their positions, and none.
        inputs: memory of that layout; new memory if None.
    """

    def __init__(
        self,
        layout: Layout,
        compression: Compression,
        infos: Sequence[CompressionInfo] | None = None,
        inputs: FlatBuffer | None = None,
    ) -> None:
        self.layout = layout
        self.inputs = FlatBuffer(layout) if inputs is None else inputs
        self.outputs = FlatBuffer(layout)
        self._codecs = plan_of(compression, layout, infos)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each flat buffer."""
        return tuple(spec.numel for spec in self.layout.buffers)

    def open(self, me: bytes, begin: Begin, send: SendTo, fault: Fault) -> Exchange:
        """The exchange of a round of this vector."""
        return Exchange.of(me, begin, self.inputs.flat, self.outputs.flat, self._codecs, send, fault)


def plan_of(compression: Compression, layout: Layout, infos: Sequence[CompressionInfo] | None) -> CodecPlan:
    """The codecs of a layout whose tensors have these names, roles and kinds, or none."""
    if infos is None:
        return plan_codecs(compression, layout)
    roles, keys, kinds = zip(*((info.role, info.key, info.kind) for info in infos), strict=True) if infos else ((),) * 3
    return plan_codecs(compression, layout, roles, keys, kinds=kinds)
