"""Lightning's `Trainer` as a peer of a run, by a strategy."""

from __future__ import annotations

from shoal.integrations import strategies

try:
    from lightning.pytorch import Callback, callbacks
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise ImportError("Lightning is missing, or too old: pip install 'shoal[lightning]'") from error


class _Ends(strategies.Ends, Callback):
    """See `strategies.Ends`."""


PACKAGE = strategies.Package("lightning", callbacks, _Ends, extract_batch_size)


class ClusterStrategy(strategies.OfCluster, DDPStrategy):
    """What `SwarmStrategy` makes with `cluster`: the processes of the Trainer are one peer.

    Args:
        cluster, dht, run_id, target_batch_size, options: of `SwarmStrategy`.
        device: is refused, since `Trainer(accelerator=…, devices=…)` chooses.

    Raises:
        ValueError: as `SwarmStrategy`.
        ClusterError: as `SwarmStrategy`.
    """

    package = PACKAGE


class SwarmStrategy(strategies.OfOneProcess, SingleDeviceStrategy):
    """Makes a Lightning `Trainer` a peer of a run, from the beginning of `fit` to its end.

    >>> with shoal.DHT(initial_peers=[...], start=True) as dht:
    ...     strategy = SwarmStrategy(dht=dht, run_id="my run", target_batch_size=4096)
    ...     Trainer(max_steps=1000, strategy=strategy).fit(module, data)

    A step of the Trainer is an epoch of the run: `max_steps`, `every_n_train_steps` and schedulers with
    `interval="step"` count epochs, and so does `global_step`. A pass over the data, which Lightning calls an epoch, is
    this peer's own, and so are `max_epochs` and `val_check_interval`. The optimizer, the schedulers and
    `gradient_clip_val` are those of the script.

    Args:
        dht: this peer's place in the DHT, started. It stays when training ends. With `cluster`, each process has one;
            with `strands=1`, process 0.
        run_id: names the run.
        target_batch_size: samples of all peers per epoch.
        device: on which this peer trains; the first GPU if there is one, by default. Not with `cluster`, where the
            Trainer chooses.
        cluster: a function that makes a `shoal.Cluster`, or one: the processes of the Trainer are one peer, with
            DistributedDataParallel. Then this is a `ClusterStrategy`. A process that is alone gives it, too, where
            other peers of the run have strands.
        options: arguments of `shoal.Optimizer`, and `on_event`, a function that is called with each event.

    Raises:
        ValueError: for options that the script gives, or that need a loop of the user's own; in `fit`, for several
            devices without `cluster`, several optimizers, manual optimization, schedulers that do not follow steps,
            where it has trained before, and with `cluster` for fp16.
        ClusterError: in `fit`, if another process of the cluster is lost, or has raised an error.
    """

    package = PACKAGE
    with_cluster = ClusterStrategy
