"""The parts of benchmarks/gateway.py.

stub        a worker that takes a given time per turn, to be asked through a gateway or directly
asking      a client: many trajectories at once, each turn timed
processes   the gateway, the stub and a real worker as processes, and their CPU time
"""
