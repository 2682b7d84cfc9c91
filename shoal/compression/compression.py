"""What can be given wherever an option asks how tensors travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shoal.compression.info import CompressionInfo, TensorRole

if TYPE_CHECKING:
    from shoal.compression.codec import Codec
    from shoal.compression.plan import CodecPlan, FlatLayout


class Compression(ABC):
    """A codec, or a choice of a codec for each tensor. A value: it compares, hashes and prints by its options."""

    __slots__ = ()

    @property
    @abstractmethod
    def spec(self) -> str:
        """The compression with its options, as peers compare it when they join. Equal exactly when they are; another
        peer makes an equal one of it with :func:`compression_by_spec`."""

    @abstractmethod
    def choose_compression(self, info: CompressionInfo) -> Codec:
        """The codec for that tensor.

        Raises:
            ValueError: if none is given for it.
        """

    def plan(
        self,
        layout: FlatLayout,
        roles: TensorRole | Sequence[TensorRole] = TensorRole.UNSPECIFIED,
        keys: Sequence[str | int] | None = None,
        exact: Collection[int] = (),
        kinds: Sequence[str] | None = None,
    ) -> CodecPlan:
        """Which codec is for which elements of the flat buffers of a layout. The same on all peers that are given the
        same.

        Scalars (of shape ``()``) are never compressed, whatever this is: nothing would be gained, and optimizers keep
        the counts of their steps in them. Statistics of optimizers are encoded so that what is positive stays positive
        (see ``shoal.compression.statistic``). Tensors of different roles or kinds share no blocks and no codebooks;
        those of one kind do.

        Args:
            layout: where the tensors are.
            roles: one for all tensors, or one for each.
            keys: of each tensor; its position in the layout by default.
            exact: positions of tensors that are never compressed either.
            kinds: of each tensor, such as the name of a statistic; by default all tensors of a role are of one.

        Raises:
            ValueError: if there is not one role, one key and one kind for each tensor, or no codec is given for a
                tensor.
        """
        from shoal.compression.kind import KindCodec  # these need Codec, which is a Compression
        from shoal.compression.none import NoCompression
        from shoal.compression.plan import CodecPlan
        from shoal.compression.statistic import StatisticCodec

        count = len(layout.entries)
        roles = [roles] * count if isinstance(roles, TensorRole) else roles
        keys = range(count) if keys is None else keys
        kinds = [""] * count if kinds is None else kinds
        if len(roles) != count or len(keys) != count or len(kinds) != count:
            raise ValueError(
                f"the layout has {count} tensors, but there are {len(roles)} roles, {len(keys)} keys and "
                f"{len(kinds)} kinds"
            )
        numbers: dict[tuple[TensorRole, str], int] = {}
        codecs: list[Codec] = []
        for position, (key, entry, role, kind) in enumerate(zip(keys, layout.entries, roles, kinds, strict=True)):
            info = CompressionInfo(key, entry.shape, layout.buffers[entry.buffer].dtype, role, kind)
            number = numbers.setdefault((role, kind), len(numbers))
            codec = NoCompression() if not info.shape or position in exact else self.choose_compression(info)
            if codec.lossy and role is TensorRole.OPTIMIZER:
                codec = StatisticCodec(codec)
            codecs.append(KindCodec(codec, number) if codec.lossy and number else codec)
        return CodecPlan.of(layout, codecs)
