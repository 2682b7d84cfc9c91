"""One peer of the demo: ``python -m shoal.cli.demo.peer <PeerConfig as JSON>``, started by the parent."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import msgspec
import torch

import shoal
from shoal.cli.demo import recipe
from shoal.cli.demo.corpus import Corpus
from shoal.cli.demo.messages import Baseline, Evaluated, Finished, Listening, Progress, Ready
from shoal.cli.demo.model import CharacterGPT, ModelShape
from shoal.cli.demo.parent import START, STOP, Parent
from shoal.cli.demo.settings import Compression, PeerConfig, load_text
from shoal.cli.demo.translate import as_message
from shoal.optim.reports import Event

_EVALUATIONS = 10


class Peer:
    """A model, its share of the text and its place in the swarm."""

    def __init__(self, config: PeerConfig, parent: Parent) -> None:
        self._config = config
        self._parent = parent
        self._dht = shoal.DHT(initial_peers=config.initial_peers, start=True)
        addresses = [str(address) for address in self._dht.get_visible_maddrs()]
        parent.tell(Listening(peer_id=str(self._dht.peer_id), addresses=addresses))
        self._corpus = Corpus(load_text(Path(config.data) if config.data else None))
        # All begin with the same parameters, and each draws its own windows.
        torch.manual_seed(config.seed)
        self._model = CharacterGPT(ModelShape(vocabulary=len(self._corpus.vocabulary)))
        self._generator = torch.Generator().manual_seed(config.seed * 1_000 + config.index)
        self._context = self._model.shape.context
        self._held_out = self._corpus.held_out_windows(recipe.HELD_OUT_WINDOWS, self._context)
        self._optimizer = self._make_optimizer()

    def run(self) -> None:
        """Train from the parent's word START until the last epoch; then serve the others until its word STOP."""
        if self._config.evaluates:
            self._tell_baseline()
        self._parent.tell(Ready())
        self._parent.wait_for(START)
        self._train()
        sample = self._sample() if self._config.evaluates else ""
        self._parent.tell(Finished(epoch=self._optimizer.local_epoch, sample=sample))
        self._parent.wait_for(STOP)
        self._optimizer.shutdown()
        self._dht.shutdown()

    def _make_optimizer(self) -> shoal.Optimizer:
        codecs = {
            Compression.NONE: shoal.compression.NoCompression,
            Compression.FLOAT16: shoal.compression.Float16Compression,
        }
        optimizer = shoal.Optimizer(
            dht=self._dht,
            run_id=self._config.run_id,
            target_batch_size=recipe.TARGET_BATCH_SIZE,
            batch_size_per_step=recipe.BATCH_SIZE_PER_STEP,
            params=list(self._model.parameters()),
            optimizer=recipe.make_optimizer,
            scheduler=recipe.scheduler_factory(self._config.epochs),
            matchmaking_time=10.0,
            averaging_timeout=30.0,
            grad_compression=codecs[self._config.compression](),
        )
        optimizer.on_event = self._tell
        return optimizer

    def _tell(self, event: Event) -> None:
        if isinstance(event, shoal.EpochReport | shoal.DownloadReport):  # the others are in the log as well
            self._parent.tell(as_message(event))

    def _train(self) -> None:
        every = max(1, self._config.epochs // _EVALUATIONS)
        next_evaluation = 0
        while (epoch := self._optimizer.local_epoch) < self._config.epochs:
            if epoch >= next_evaluation:
                self._evaluate()
                next_evaluation = epoch - epoch % every + every
            self._train_one_epoch(epoch)
        self._evaluate()

    def _train_one_epoch(self, epoch: int) -> None:
        started = time.monotonic()
        losses: list[float] = []
        while self._optimizer.local_epoch == epoch:
            windows = self._corpus.random_windows(recipe.BATCH_SIZE_PER_STEP, self._context, self._generator)
            loss = self._model.loss(*windows)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise RuntimeError(f"the training loss is {losses[-1]} in epoch {epoch}; choose another --seed")
            self._optimizer.step()
            self._optimizer.zero_grad()
        if self._optimizer.local_epoch != epoch + 1:
            return  # It downloaded a state instead, and dropped its own gradients.
        speed = len(losses) * recipe.BATCH_SIZE_PER_STEP / (time.monotonic() - started)
        self._parent.tell(Progress(epoch=epoch, loss=sum(losses) / len(losses), samples_per_second=speed))

    @torch.no_grad()
    def _evaluate(self) -> None:
        if self._config.evaluates:
            loss = self._model.loss(*self._held_out).item()
            self._parent.tell(Evaluated(epoch=self._optimizer.local_epoch, held_out_loss=loss))

    def _tell_baseline(self) -> None:
        self._parent.tell(
            Baseline(
                bigram_loss=self._corpus.bigram_loss(*self._held_out),
                parameters=sum(parameter.numel() for parameter in self._model.parameters()),
                train_characters=len(self._corpus.train),
                held_out_characters=len(self._corpus.held_out),
            )
        )

    def _sample(self) -> str:
        prompt = self._held_out[0][0]
        numbers = self._model.generate(prompt, recipe.SAMPLE_CHARACTERS, self._generator)
        return self._corpus.vocabulary.decode(bytes(numbers.tolist()))


def main() -> None:
    """Read the configuration from the command line, and run a peer until the parent says stop."""
    parent = Parent()
    # The peers of a demo share the cores: one thread each, and the same for all, so that their steps round alike.
    torch.set_num_threads(1)
    Peer(msgspec.json.decode(sys.argv[1], type=PeerConfig), parent).run()


if __name__ == "__main__":
    main()
