"""``shoal demo``: a script that trains one small language model with several peers on this machine.

What it promises: every peer is a process of its own and uses real sockets. One of them is killed with SIGKILL, and a
new one joins later. However the demo ends, no process that it started outlives it. The exit code says whether all peers
kept identical parameters, no other peer failed, and the model learned (the last only in runs that are long enough). It
uses Shoal's public names only.

Two kinds of process. The parent imports no torch: ``script`` has the user's choices and says what happens when, and
``report`` says what it comes to. A peer (``peer``, ``model``) tells the parent what Shoal tells every user of a run,
the reports of ``on_event``, and what it measures itself. (Health records are up to 10 s old, and do not have the digest
of every epoch. ``shoal top`` shows them, while the demo runs as well.)
"""
