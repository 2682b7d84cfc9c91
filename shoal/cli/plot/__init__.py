"""``shoal plot``: what the replicas of a run did, as a picture, from the traces that they wrote.

``story`` makes of the lines what the replicas did and what the run came to, without drawing; ``picture`` draws it with
matplotlib. The demo draws its run with them, too. Names and reasons in a trace are of other people.
"""
