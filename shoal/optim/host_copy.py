"""The copy of the parameters on the host that an optimizer steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.flat import FlatBuffer, Listed, MemoryWatch, names_of_members, parameters_of
from shoal.optim.trainable import SHOWN


class HostCopy:
    """The optimizer's own copy of the parameters, on the host. The optimizer steps this copy, and the device keeps only
    parameters and gradients. The trainer continues with the old parameters until `publish` sets the new ones.

    [Note: what users write] Whatever is in the model when a step begins is the model: `follow` takes it. Writes through
    `.data` or numpy change no address and raise no count. So on the host `follow` copies the model, which takes less
    time than to compare it. On a device it asks a `MemoryWatch`, and reads one number. What is written during a step in
    the background is overwritten, and `publish` tells of it.

    Args:
        params: the argument of an optimizer: tensors, (name, tensor) pairs, or parameter groups of either. They move
            into flat memory when `adopt` has found that an optimizer fits.
        precise: make the copy in float32 where the model has fewer bits.
        in_background: whether the trainer goes on with the model while the copy is stepped.
        frozen: copy frozen parameters, too, because they are part of the state. Otherwise the optimizer gets the
            model's own, which it does not step.
        memory: the flat memory in which the parameters are, if they are in one.

    Attributes:
        params: `params` with the copies in place of the parameters, from which the optimizer is made.
        given: the model's parameters, in the order in which `params` has them, from `adopt` on in the optimizer's.
        model: those that are copied, in the same order.
        pinned: whether the copies should be in pinned memory, because some of the model's parameters are on a GPU.
        aside: while a step in the background uses the options in the optimizer's groups: other options, which users
            read and write. Else None.
        lock: held while an option is written, and while `aside` changes.

    Raises:
        ValueError: if `params` has anything but tensors.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        precise: bool = False,
        in_background: bool = False,
        frozen: bool = False,
        memory: FlatBuffer | None = None,
    ) -> None:
        listed, self._precise, self._in_background, self._frozen = Listed(params), precise, in_background, frozen
        self.given = [parameter for _, parameter in listed.named]
        self._own = [self._host(parameter) for parameter in self.given]  # what the optimizer gets
        self.model = [parameter for parameter, own in zip(self.given, self._own, strict=True) if own is not parameter]
        self.params = listed.like_given(self._own)
        self.pinned = any(tensor.device.type == "cuda" for tensor in self.model)
        self._memory = memory
        self._watch = MemoryWatch()
        self.aside: list[dict[str, Any]] | None = None
        self.lock = threading.Lock()

    def _host(self, parameter: Tensor) -> Tensor:
        if not (parameter.requires_grad or self._frozen):
            return parameter
        fewer = self._precise and parameter.is_floating_point() and parameter.element_size() < 4
        copy = parameter.detach().to("cpu", torch.float32 if fewer else parameter.dtype, copy=True)
        return nn.Parameter(copy, requires_grad=parameter.requires_grad)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the optimizer has all parameters of `params`, in any order, which becomes the order of the copy.
        Then move the model's parameters into flat memory, if they are not in one of that order.

        Raises:
            ValueError: as `check_all`, and as `FlatBuffer.adopt`.
        """
        own = parameters_of(optimizer)
        check_all(optimizer, Listed(self.params).named)
        model = [parameter for parameter, copy in self._in_order(own) if copy is not parameter]
        if self._memory is None or list(map(id, model)) != list(map(id, self.model)):
            self._memory = FlatBuffer.adopt(model)
        self.given, self._own, self.model = [parameter for parameter, _ in self._in_order(own)], own, model
        self._watch = MemoryWatch(sparse=not self._is_elsewhere)  # on the host, only a warning depends on it

    def _in_order(self, own: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The model's parameters, each with what the optimizer gets for it, in the order of the latter."""
        given = {id(copy): parameter for parameter, copy in zip(self.given, self._own, strict=True)}
        return [(given[id(copy)], copy) for copy in own]

    @property
    def memory(self) -> FlatBuffer:
        """The flat memory of the model's parameters. There is none before `adopt`."""
        assert self._memory is not None
        return self._memory

    @property
    def _is_elsewhere(self) -> bool:
        """Whether some of the model's parameters are not on the host."""
        return any(flat.device.type != "cpu" for flat in self.memory.flat)

    def follow(self, own: FlatBuffer) -> None:
        """Set the copy to the model's parameters, whoever has written them, because a step begins.

        Args:
            own: the flat memory of the copy.
        """
        if self._is_elsewhere and not self._watch.is_written(self.memory.flat):
            return
        self.copy(self.memory, own)
        if self._is_elsewhere or self._in_background:
            self._watch.keep(self.memory.flat)

    def publish(self, own: FlatBuffer) -> bool:
        """Set the model's parameters to the copy.

        Returns:
            Whether somebody has written to the model since `follow`, while a step was under way in the background.
        """
        model = self.memory.flat
        was_written = self._in_background and self._watch.is_on and self._watch.is_written(model)
        self.copy(own, self.memory)
        if self._is_elsewhere:
            self._watch.keep(model)
        else:
            self._watch.forget()
        return was_written

    @torch.no_grad()
    def copy(self, source: FlatBuffer, target: FlatBuffer) -> None:
        """Set the model's parameters to those on the host, or the other way round. `source` and `target` are the flat
        memory of the two."""
        dtypes = [[buffer.dtype for buffer in memory.layout.buffers] for memory in (source, target)]
        alike = dtypes[0] == dtypes[1]  # not with several devices, or another precision
        pairs = zip(*((source.flat, target.flat) if alike else (source.views(), target.views())), strict=True)
        for theirs, mine in pairs:
            mine.copy_(theirs, non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()

    def stepped(self) -> dict[Tensor, Tensor]:
        """For each of the model's parameters, what the optimizer gets."""
        return dict(zip(self.given, self._own, strict=True))

    @contextlib.contextmanager
    def set_aside(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within this context, users read and write a copy of the options in `param_groups`, because the optimizer may
        be stepping in another thread. Afterwards the optimizer gets their changes."""
        with self.lock:
            before = [dict(group) for group in optimizer.param_groups]
            self.aside = [dict(group) for group in before]
        try:
            yield
        finally:
            with self.lock:
                for group, old, written in zip(optimizer.param_groups, before, self.aside, strict=True):
                    group.update({k: v for k, v in written.items() if k not in old or v is not old[k]})
                    for removed in old.keys() - written.keys():
                        group.pop(removed, None)
                self.aside = None


def names_in(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of all parameters of an optimizer's groups, in order; [] unless every group has names."""
    found = [group.get("param_names") for group in groups if len(group["params"])]
    return [name for names in found if names is not None for name in names] if None not in found else []


def is_on_host(params: Listed) -> bool:
    """Whether all parameters are on the host. Raises ValueError if one is no tensor."""
    return all(parameter.device.type == "cpu" for _, parameter in params.named)


def check_order(optimizer: torch.optim.Optimizer, own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Check that an optimizer, which a function has made, has the parameters that the function was given, in order.

    Args:
        optimizer: the optimizer.
        own: the parameters of the optimizer.
        given: the parameters that the function was given.

    Raises:
        ValueError: if some are missing, or if they are in another order.
    """
    if list(map(id, own)) != list(map(id, given)):
        raise ValueError(
            f"the function made a {type(optimizer).__name__} that does not have all parameters, or has them in "
            "another order than they were given: divide them into groups before, in params="
        )


def check_all(optimizer: torch.optim.Optimizer, given: Sequence[tuple[str, Tensor]]) -> None:
    """Check that an optimizer, which a function has made, has exactly the parameters that the function was given, in
    any order.

    Args:
        optimizer: the optimizer.
        given: the parameters that the function was given, from `Listed.named`.

    Raises:
        ValueError: if some are missing, with their names; or if there are others.
    """
    check_none_missing(optimizer, given)
    own = parameters_of(optimizer)
    if sorted(map(id, own)) != sorted(id(parameter) for _, parameter in given):
        raise ValueError(
            f"the function made a {names_of_members(optimizer)} over other parameters than it was given: make it over "
            "those of its argument, each once"
        )


def check_none_missing(optimizer: torch.optim.Optimizer, given: Sequence[tuple[str, Tensor]]) -> None:
    """Check that an optimizer, which a function has made, has all of these parameters. For the arguments, see
    `check_all`.

    Raises:
        ValueError: if some are missing, with their names.
    """
    found = set(map(id, parameters_of(optimizer)))
    missing = [
        repr(name) if name else f"one of shape {tuple(parameter.shape)}"
        for name, parameter in given
        if id(parameter) not in found
    ]
    if missing:
        more = [f"{len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
        raise ValueError(
            f"the function made a {names_of_members(optimizer)} that does not have all parameters of params=: it "
            f"leaves out {', '.join([*missing[:SHOWN], *more])}: give each to an optimizer, or leave it out of params="
        )
