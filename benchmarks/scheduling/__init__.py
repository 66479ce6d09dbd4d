"""The parts of benchmarks/schedule.py.

trajectories  turns of agents: from recorded files or a generator, scaled, in groups of like lengths
traffic       users' requests for the borrowed devices: from a recorded trace or a generator; the worst case
lending       one borrowed device under the real rules of lending: what it lends when, and what its users notice
worker        one rollout worker, in virtual time
cluster       all workers under the real router, pacer and provisioner
figures       from a run to a row
"""
