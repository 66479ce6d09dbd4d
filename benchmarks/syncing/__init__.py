"""The parts of benchmarks/sync.py.

codecs      what is compared: ours, COO and the whole weights, all through the same chain
links       a network link of a given rate between two namespaces, or a token bucket where those are not permitted
stores      the relays as processes
ends        the publisher and the receivers, processes of their own
driving     starts the ends and asks them
paper       the tables of docs/weights.md, measured and scaled
plan        what is measured, and how often
"""
