"""A training loop with Accelerate as a peer of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

import shoal
from shoal.integrations.member import Joiner, own_scaler
from shoal.integrations.mixing import mix, refuse_mixed
from shoal.integrations.ranks import Clusters, LaunchedRanks
from shoal.integrations.samples import Samples, size_of
from shoal.integrations.terms import JoinTerms, refuse_many, refuse_plateau, refuse_scaler

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError("Accelerate is missing, or too old: pip install 'shoal[accelerate]'") from error


def swarm(
    accelerator: Accelerator,
    *args: Any,
    dht: shoal.DHT | None,
    run_id: str,
    target_batch_size: int,
    max_grad_norm: float | None = None,
    cluster: Clusters | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Join a run, in place of `accelerator.prepare(model, optimizer, data, scheduler)`.

    >>> model, optimizer, data, scheduler = swarm(
    ...     accelerator, model, optimizer, data, scheduler, dht=dht, run_id="my run", target_batch_size=4096
    ... )

    `scheduler.step()` follows the epochs of the run, and `optimizer.optimizer.local_epoch` counts them.
    `accelerator.end_training()` leaves the run.

    Args:
        accelerator: of the script.
        args: as for `prepare`: one optimizer, the data loader, and what else there is.
        dht: this peer's place in the DHT, started. With `cluster`, each process has one; with `strands=1`, the main
            process.
        run_id: names the run.
        target_batch_size: samples of all peers per epoch.
        max_grad_norm: the norm to which the average is clipped, that of `accelerator.clip_grad_norm_` in the script.
        cluster: a function that makes a `shoal.Cluster`, or one: the processes of the Accelerator are one peer. A
            process that is alone gives it, too, where other peers of the run have strands.
        options: arguments of `shoal.Optimizer`, and `on_event`, a function that is called with each event.

    Returns:
        `args`, prepared, in their order.

    Raises:
        ValueError: if Accelerate is set up for several processes without `cluster`, or was given before; for none or
            several optimizers; for ReduceLROnPlateau; for options that the script gives, or that need a loop without
            Accelerate; with `cluster`, for fp16.
        ClusterError: if another process of the cluster is lost, or has raised an error.
    """
    terms = JoinTerms(dht, run_id, target_batch_size, options)
    refuse_mixed(accelerator, InSwarm)
    ranks = LaunchedRanks.of(cluster, accelerator.num_processes, "`accelerate launch` (--num_processes)")
    if accelerator.distributed_type not in _REPLICATES:
        raise ValueError(f"{accelerator.distributed_type} owns the optimizer, and a run needs it: leave it out")
    optimizers = [given for given in args if isinstance(given, torch.optim.Optimizer)]
    refuse_many(optimizers)
    refuse_plateau(*(given for given in args if isinstance(given, LRScheduler)))
    if ranks.cluster is not None:
        refuse_scaler(accelerator.scaler)
    seed = ranks.seed(dht)
    if accelerator.scaler is not None:
        accelerator.scaler = own_scaler(accelerator.scaler, accelerator.device.type)
    accelerator.step_scheduler_with_optimizer = False  # the schedule knows by itself when the epoch has moved
    # First the model, which goes to its device; what is left of the order does not matter.
    prepared = {id(given): accelerator.prepare(given) for given in args if not isinstance(given, _LATER)}
    member = Joiner(terms, optimizers[0], max_grad_norm, ranks)
    try:
        mix(accelerator, InSwarm)
        accelerator._member, accelerator._samples = member, Samples(ranks)
        accelerator._max_grad_norm = None if terms.clips_locally else max_grad_norm
        accelerator._clips_locally = terms.clips_locally
        stepped = prepared[id(optimizers[0])] = accelerator.prepare(member.optimizer)
        mix(stepped, CountedOptimizer)
        stepped._accelerator = accelerator
        for given in args:
            if isinstance(given, LRScheduler):
                prepared[id(given)] = accelerator.prepare(shoal.EpochScheduler(given))
            elif isinstance(given, torch.utils.data.DataLoader):
                prepared[id(given)] = CountedData(prepared[id(given)], accelerator._samples)
    except BaseException:  # the others must not wait for a peer that does not train
        member.leave()
        raise
    torch.manual_seed(seed)
    return tuple(prepared[id(given)] for given in args)


_LATER = (torch.optim.Optimizer, LRScheduler)
_REPLICATES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class InSwarm(Accelerator):
    """The methods of an Accelerator whose script is a peer. `swarm` adds it to the class of an Accelerator."""

    _member: Joiner
    _samples: Samples
    _max_grad_norm: float | None
    _clips_locally: bool

    def skip_first_batches(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; the batches of the new data loader count, too."""
        inner = dataloader.data if isinstance(dataloader, CountedData) else dataloader
        return CountedData(super().skip_first_batches(inner, *args, **kwargs), self._samples)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Count the batch."""
        super().backward(loss * self._samples.weight(), **kwargs)
        self._member.saw(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Return the norm, and change nothing: the run clips the average.

        Raises:
            ValueError: if `max_norm` is not that of the run, or `norm_type` is not 2.
        """
        if self._clips_locally or max_norm == math.inf:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if max_norm != self._max_grad_norm:
            raise ValueError(
                f"clip_grad_norm_(…, {max_norm}) would clip each batch of this peer, and a run clips the average: give "
                f"max_grad_norm={max_norm} to shoal.integrations.accelerate.swarm"
            )
        if norm_type != 2:
            raise ValueError(f"a run clips the norm of type 2, and not {norm_type}: leave norm_type= out")
        return super().clip_grad_norm_(parameters, math.inf, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As Accelerate's, with local updates.

        Raises:
            ValueError: without them, since a run clips the norm of the average.
        """
        if not self._clips_locally:
            raise ValueError(
                "clip_grad_value_(…) clips each batch of this peer, and a run clips the norm of the average: give "
                "max_grad_norm= to shoal.integrations.accelerate.swarm"
            )
        super().clip_grad_value_(parameters, clip_value)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """With the run's epoch and number of peers."""
        super().log({**values, **self._member.logs()}, *args, **kwargs)

    def end_training(self) -> None:
        """Leave the run."""
        self._member.finish()
        super().end_training()


class CountedData:
    """A data loader of Accelerate that says how many samples are in the batch that it gives.

    Args:
        data: the data loader, whose other attributes this one has.
        samples: told the size of each batch.
    """

    def __init__(self, data: Any, samples: Samples) -> None:
        self.data, self._samples = data, samples

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            self._samples.size = size_of(batch)
            yield batch

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name == "data":  # copy and pickle ask for methods before it is set: without this they recurse
            raise AttributeError(name)
        return getattr(self.data, name)


class CountedOptimizer(AcceleratedOptimizer):
    """Steps a `shoal.Optimizer` with the number of samples behind the step."""

    _accelerator: Any

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:
        """As Accelerate's: nothing, while gradients are accumulated.

        Raises:
            ValueError: if the script accumulates gradients by itself, and may have divided them as well.
        """
        if not self.gradient_state.sync_gradients:
            return
        accelerator, member = self._accelerator, self._accelerator._member
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        batches = accelerator.gradient_accumulation_steps
        if (found := accelerator._samples.batches) > batches:
            raise ValueError(
                f"{found} batches are behind this step, and the Accelerator divides by {batches}: give it "
                f"gradient_accumulation_steps={found}, and use accelerator.accumulate(model) and optimizer.zero_grad()"
            )
        member.optimizer.batch_size_per_step = accelerator._samples.finish(parameters, batches)
        super().step(closure)
        if self.step_was_skipped:  # by the gradient scaler; a round may be due all the same
            member.optimizer.step(batch_size=0)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As Accelerate's: nothing, while gradients are accumulated. Batches without a step are not counted."""
        if self.gradient_state.sync_gradients:
            self._accelerator._samples.forget()
        super().zero_grad(set_to_none)
