"""The parent of a demo: starts the peers, kills one, starts a newcomer, and stops them all."""

from __future__ import annotations

import queue
import secrets
import sys
import time
from types import TracebackType

import msgspec

from shoal.cli.demo.messages import Committed, Downloaded, Listening, Message, Progress, Ready, decode
from shoal.cli.demo.parent import START, STOP
from shoal.cli.demo.process import Line, PeerProcess
from shoal.cli.demo.record import PeerRecord, PeerState, Record
from shoal.cli.demo.settings import DemoSettings, PeerConfig
from shoal.cli.demo.view import View

_STALL_SECONDS = 60.0
_PEER_COMMAND = (sys.executable, "-m", "shoal.cli.demo.peer")


class Swarm:
    """One run. It is a context manager, and no process that it has started outlives the context.

    Peer 0 is started first, and the others dial it. It evaluates, and is never killed. The last of the first peers is
    killed when ``settings.kill_epoch`` is committed. A newcomer is started when ``settings.join_epoch`` is committed.
    """

    def __init__(self, settings: DemoSettings, view: View, command: tuple[str, ...] = _PEER_COMMAND) -> None:
        self._settings = settings
        self._view = view
        self._command = command
        self._run_id = f"demo-{secrets.token_hex(4)}"
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._processes: dict[int, PeerProcess] = {}
        self._training = False
        self.record = Record()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt:
            self._view.note("interrupted: stopping every peer")
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.close()

    def run(self) -> Record:
        """Run until all living peers have finished, no peer is alive, or nothing was committed for a minute."""
        self._start_peer(0)
        heard_at = time.monotonic()
        while self._alive() and not self._all_finished():
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                line = None
            if line is not None and self._take(line):
                heard_at = time.monotonic()
            if not self._training:
                self._start_training()
            if time.monotonic() - heard_at > _STALL_SECONDS:
                self._fail_stalled()
            self._view.update(self.record)
        self._stop_peers()
        self.record.ended_at = time.monotonic()
        return self.record

    def _take(self, line: Line) -> bool:
        """Handle a line. Returns whether it shows that the run makes progress: all messages but Progress do."""
        peer = self.record.peers[line.index]
        if line.text is None:
            self._ended(peer)
            return True
        try:
            message = decode(line.text)
        except msgspec.DecodeError as error:
            self._fail(peer, f"wrote a line that is not a message ({error}): {line.text[:80]!r}")
            return True
        self.record.hear(peer.index, message)
        self._react(peer, message)
        return not isinstance(message, Progress)

    def _react(self, peer: PeerRecord, message: Message) -> None:
        match message:
            case Listening() if peer.index == 0:
                self._view.note(f"{peer.name} listens on {peer.addresses[0]}")
                for index in range(1, self._settings.peers):
                    self._start_peer(index)
            case Ready() if peer.index == self.record.newcomer:
                self._processes[peer.index].say(START)
            case Committed(epoch=epoch):
                if self._settings.kill and epoch >= self._settings.kill_epoch:
                    self._kill_one(epoch)
                if epoch >= self._settings.join_epoch and self.record.newcomer is None:
                    self.record.newcomer = self._settings.peers
                    self._start_peer(self._settings.peers)
            case Downloaded():
                megabytes = message.bytes / 1e6
                self._view.note(
                    f"{peer.name} downloaded the state of epoch {message.epoch}: {megabytes:.1f} MB from "
                    f"{message.donors} peers in {message.seconds:.2f} s"
                )

    def _start_peer(self, index: int) -> None:
        config = PeerConfig(
            index=index,
            run_id=self._run_id,
            initial_peers=self.record.peers[0].addresses if index else [],
            epochs=self._settings.epochs,
            compression=self._settings.compression,
            seed=self._settings.seed,
            data=str(self._settings.data) if self._settings.data else None,
            evaluates=index == 0,
        )
        command = [*self._command, msgspec.json.encode(config).decode()]
        started_at = time.monotonic()
        process = PeerProcess(index, command, self._lines, self._settings.out / f"peer-{index}.log")
        self._processes[index] = process
        self.record.peers[index] = PeerRecord(index=index, pid=process.pid, started_at=started_at)
        kind = "newcomer" if index == self.record.newcomer else "peer"
        self._view.note(f"started {kind} {index} (process {process.pid})")

    def _start_training(self) -> None:
        """Tell the first peers to start as soon as all of them are ready."""
        peers = self.record.peers.values()
        if len(peers) == self._settings.peers and all(peer.state != PeerState.STARTING for peer in peers):
            self._training = True
            self._view.note("training begins")
            for process in self._processes.values():
                process.say(START)

    def _kill_one(self, epoch: int) -> None:
        victim = self.record.peers[self._settings.peers - 1]
        if victim.state == PeerState.TRAINING:
            victim.state, victim.killed_at = PeerState.KILLED, time.monotonic()
            self._processes[victim.index].kill()
            self._view.note(f"killed {victim.name} (process {victim.pid}) with SIGKILL after epoch {epoch}")

    def _ended(self, peer: PeerRecord) -> None:
        """The process has closed its output, so it has ended."""
        code = self._processes[peer.index].exit_code()
        if peer.state not in (PeerState.KILLED, PeerState.FAILED):
            self._fail(peer, f"ended with exit code {code}: {self._processes[peer.index].last_words()}")

    def _fail(self, peer: PeerRecord, what: str) -> None:
        peer.state = PeerState.FAILED
        self._processes[peer.index].kill()
        self.record.failures.append(f"{peer.name} {what}")
        self._view.note(f"{peer.name} {what}")

    def _fail_stalled(self) -> None:
        for peer in self._alive():
            if peer.state != PeerState.FINISHED:
                self._fail(peer, f"is stopped: for {_STALL_SECONDS:.0f} s nothing was committed")

    def _alive(self) -> list[PeerRecord]:
        gone = (PeerState.KILLED, PeerState.FAILED)
        return [peer for peer in self.record.peers.values() if peer.state not in gone]

    def _all_finished(self) -> bool:
        return all(peer.state == PeerState.FINISHED for peer in self._alive())

    def _stop_peers(self) -> None:
        for peer in self._alive():
            self._processes[peer.index].say(STOP)
        for peer in self._alive():
            code = self._processes[peer.index].exit_code()
            if code:
                self._fail(peer, f"did not stop in good order, exit code {code}")
