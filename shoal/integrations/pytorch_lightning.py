"""The `Trainer` of the package pytorch_lightning as a peer of a run, by a strategy. The classes of that package are not
those of the package lightning."""

from __future__ import annotations

from shoal.integrations import strategies

try:
    from pytorch_lightning import Callback, callbacks
    from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
    from pytorch_lightning.utilities.data import extract_batch_size
except ImportError as error:
    raise ImportError("pytorch_lightning is missing, or too old: pip install 'shoal[lightning]'") from error


class _Ends(strategies.Ends, Callback):
    """See `strategies.Ends`."""


PACKAGE = strategies.Package("pytorch_lightning", callbacks, _Ends, extract_batch_size)


class ClusterStrategy(strategies.OfCluster, DDPStrategy):
    """What `SwarmStrategy` makes with `cluster`: the processes of the Trainer are one peer."""

    package = PACKAGE


class SwarmStrategy(strategies.OfOneProcess, SingleDeviceStrategy):
    """Makes a `Trainer` of pytorch_lightning a peer of a run, as `shoal.integrations.lightning.SwarmStrategy` does with
    one of lightning. All arguments and errors are the same."""

    package = PACKAGE
    with_cluster = ClusterStrategy
