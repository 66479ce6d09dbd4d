"""The parts of benchmarks/schedule.py. The model itself is `rose.sim.batch_cluster`.

trajectories  turns of agents: from recorded files or a generator, scaled, in groups of correlated lengths
traffic       serving requests of the borrowed devices: from a recorded trace or a generator; the worst case
baselines     routers that exist only to compare with
figures       the rows of the table, and the lower bound
"""
