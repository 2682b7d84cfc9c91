"""The main job end to end: ``shoal demo`` trains one small language model with several peers on this machine.

What it promises: every peer is a process of its own that talks over real sockets; one of them is killed with SIGKILL
on the way and a new one joins later; whatever ends the demo, no process that it started outlives it; and the exit code
says whether the peers stayed identical, nobody failed unplanned and the model learned (the last in runs that are long
enough to tell). It uses Shoal's public names only.

Two kinds of process. The parent imports no torch: ``command``, ``swarm`` (what happens when), ``process``, ``record``
(what happened), ``view``, ``summary``, ``report``. A peer is ``python -m shoal.cli.demo.peer``: ``peer``, ``parent``
(its pipes), ``translate``, ``recipe``, ``model``, ``corpus``. Both: ``settings``, ``messages``, ``text``.
"""
