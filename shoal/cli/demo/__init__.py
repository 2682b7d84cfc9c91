"""The main job end to end: ``shoal demo`` trains one small language model with several peers on this machine.

What it promises: every peer is a process of its own and uses real sockets. One of them is killed with SIGKILL, and a
new one joins later. However the demo ends, no process that it started outlives it. The exit code says whether all peers
kept identical parameters, no other peer failed, and the model learned (the last only in runs that are long enough). It
uses Shoal's public names only.

Two kinds of process. The parent imports no torch: ``command``, ``swarm`` (what happens when), ``process``, ``record``
(what happened), ``view``, ``summary``, ``report``. A peer is ``python -m shoal.cli.demo.peer``: ``peer``, ``parent``
(its pipes), ``translate``, ``recipe``, ``model``, ``corpus``. Both: ``settings``, ``messages``, ``text``.
"""
