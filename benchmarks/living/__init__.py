"""The parts of benchmarks/live.py.

scripts     what the scripted agents say and hear, in tokens: from recorded agents, or made up
playing     the agents and the trainer at the gateway, and the books they keep to compare
stage       the processes of one run: gateway, dedicated worker, serving device, its users
"""
