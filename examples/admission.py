"""A small web service that admits volunteers to a closed run by invitation codes.

The owner makes the run's key, and runs this where volunteers reach it (behind a web server that speaks TLS):

    shoal keys run albert
    python -m examples.admission --run albert@… --invite 20 > codes.txt
    python -m examples.admission --run albert@… --codes codes.txt --members members.json --port 8000

A volunteer trains with the code that the owner has sent, and is admitted again before each membership ends:

    dht = shoal.DHT(initial_peers=[…], start=True, identity_path="me.key")
    optimizer = shoal.Optimizer(
        dht=dht, run_id="albert@…", membership=membership_from("https://example.org/admit", "CODE", dht.peer_id), …
    )

Each code admits one peer: the first that shows it, and that one again. To end a membership, take its code out of the
file of codes (it is read at each request), and `shoal keys revoke` the peer. Here anybody who can read the answers sees
memberships; they are of no use to others, since a connection proves who speaks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from shoal.membership import ClosedRun, OwnerKey, Part
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

MAX_REQUEST = 1024  # bytes
REQUEST_SECONDS = 10.0
KEYS = Path("~/.config/shoal/keys")


class Admission:
    """Who is admitted by which code.

    Args:
        key: of the run's owner.
        codes: a file of codes, one on each line.
        members: a file that keeps which peer came with which code; made if it does not exist.
        days: how long a membership lasts.
    """

    def __init__(self, key: OwnerKey, codes: Path, members: Path, days: float) -> None:
        self._key, self._codes, self._file, self._days = key, codes, members, days
        self._lock = threading.Lock()  # of the members: each request has a thread
        self._members: dict[str, str] = json.loads(members.read_text()) if members.exists() else {}

    def admit(self, code: str, peer: PeerID) -> str:
        """A membership for a peer that shows a code. Raises PermissionError if the code is not good for it."""
        with self._lock:
            known = any(secrets.compare_digest(code.encode(), one.encode()) for one in self._codes.read_text().split())
            if not known or self._members.get(code, str(peer)) != str(peer):
                raise PermissionError("the code is not known, or was used by another peer: ask the run's owner for one")
            if code not in self._members:
                self._members[code] = str(peer)
                new = self._file.with_name(self._file.name + ".new")
                new.write_text(json.dumps(self._members))
                os.replace(new, self._file)
                log.info("admitted %s", peer)
        return self._key.admit(peer, [Part.TRAIN], self._days, time.time())


class Handler(BaseHTTPRequestHandler):
    """POST /admit with `code=…&peer=…`: answered by the membership, or by 403 and the reason."""

    admission: Admission
    timeout = REQUEST_SECONDS

    def do_POST(self) -> None:
        """Admit, or say why not."""
        try:
            size = int(self.headers.get("Content-Length", ""))
            if self.path != "/admit" or not 0 < size <= MAX_REQUEST:
                raise ValueError("POST code=…&peer=… to /admit")
            fields = urllib.parse.parse_qs(self.rfile.read(size).decode(), strict_parsing=True, max_num_fields=2)
            (code,), (peer,) = fields["code"], fields["peer"]
            self._answer(HTTPStatus.OK, self.admission.admit(code, PeerID.parse(peer)))
        except PermissionError as error:
            self._answer(HTTPStatus.FORBIDDEN, str(error))
        except (ValueError, KeyError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, f"not a request for admission: {error}")

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


def membership_from(url: str, code: str, peer: PeerID) -> Callable[[], str]:
    """For volunteers: what to give as `membership=`. It is called again before a membership expires."""

    def ask() -> str:
        body = urllib.parse.urlencode({"code": code, "peer": str(peer)}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=REQUEST_SECONDS) as answer:
                return str(answer.read(MAX_REQUEST).decode())
        except urllib.error.HTTPError as error:
            with error:
                raise PermissionError(error.read(MAX_REQUEST).decode(errors="replace")) from error

    return ask


def main() -> None:
    """Serve until Ctrl-C, or print codes."""
    parser = argparse.ArgumentParser(description="Admit volunteers to a closed run by invitation codes.")
    parser.add_argument("--run", required=True, help="the run's id, name@key")
    parser.add_argument("--folder", type=Path, default=KEYS, help="where `shoal keys` keeps the run's key")
    parser.add_argument("--invite", type=int, help="print so many new codes, and end")
    parser.add_argument("--codes", type=Path, default=Path("codes.txt"), help="file of codes, one on each line")
    parser.add_argument("--members", type=Path, default=Path("members.json"), help="file that says who used which")
    parser.add_argument("--days", type=float, default=7.0, help="how long a membership lasts")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    if arguments.invite:
        for _ in range(arguments.invite):
            print(secrets.token_urlsafe(16))
        return
    logging.basicConfig(level=logging.INFO)
    run = ClosedRun.of(arguments.run)
    if run is None:
        parser.error("--run must be the id of a closed run, name@key")
    key = OwnerKey.load(arguments.folder.expanduser() / f"{run.run_id}.key", run)
    Handler.admission = Admission(key, arguments.codes, arguments.members, arguments.days)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what ends a service, as Ctrl-C does
    with ThreadingHTTPServer((arguments.host, arguments.port), Handler) as server:
        print(f"admitting to {run.run_id} at http://{arguments.host}:{server.server_port}/admit", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
