"""What the ranks of a cluster tell each other over their ties: each sends reports to rank 0, and hears its verdicts."""

from __future__ import annotations

from concurrent.futures import Future

from torch import distributed as dist

from shoal.cluster.messages import Do, Done, Go, Report, Verdict
from shoal.cluster.ties import Ties, framed, meet

Said = Report | Verdict | Go | Do | Done


class Gang(Ties):
    """The ties of this rank. All ranks create a `Gang` at the same time.

    Args:
        group: the process group; None for a single process.

    Raises:
        ClusterError: as `meet`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(*meet(group))
        self._unsaid = b""  # messages to be sent together with the next one

    def say(self, message: Said, *, at_once: bool = True) -> None:
        """Send a message to rank 0; at rank 0, to all others. Raises ClusterError if a rank is lost.

        Args:
            message: the message.
            at_once: if False, send it together with the next message, because each message wakes its receivers.
        """
        self.check()
        self._unsaid += framed(message)
        if not at_once:
            return
        said, self._unsaid = self._unsaid, b""
        if isinstance(message, Report | Verdict):
            self.in_call = isinstance(message, Report)
        self.send(said)

    def hear_reports(self) -> list[Report]:
        """Wait for a report of each other rank. Returns them in the order of ranks. Raises ClusterError if a rank is
        lost. If a signal handler raises meanwhile, all reports stay for the next call.
        """
        self.until(lambda: all(self.has_news(rank) for rank in self.inbox))
        self.in_call = True
        heard = [self.hear(rank) for rank in sorted(self.inbox)]
        return [message for message in heard if isinstance(message, Report)]

    def hear_answers(self) -> list[Done]:
        """Wait for the answer of each other rank to the oldest `Do` that is not answered. Raises ClusterError if a rank
        is lost."""
        heard = [self.hear(rank) for rank in sorted(self.inbox)]
        return [message for message in heard if isinstance(message, Done)]

    def wait_for_answers(self, count: int, over: Future[None]) -> bool:
        """Wait until `count` answers of each other rank have arrived, or `over` is done. Returns whether they have
        arrived. Raises ClusterError if a rank is lost."""

        def are_here() -> bool:
            return all(len(inbox) >= count for inbox in self.inbox.values())

        over.add_done_callback(lambda _: self.wake())
        self.until(lambda: are_here() or over.done())
        self.check()
        return are_here()

    def news(self) -> Future[None]:
        """A future that is done as soon as there is an unread message, or a rank is lost."""
        return self.watch(lambda: any(self.inbox.values()))

    def hear_verdict(self) -> Verdict | Go | Do:
        """Wait for the next message of rank 0 in a call. Raises ClusterError if a rank is lost."""
        message = self.hear(0)
        assert isinstance(message, Verdict | Go | Do)
        if isinstance(message, Verdict):
            self.in_call = False
        return message
