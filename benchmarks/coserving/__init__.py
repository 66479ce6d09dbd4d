"""The parts of benchmarks/coserve.py.

options      what can be asked, and which run an answer belongs to
plan         modes, segments, who takes part in which and in what order; how much fits into the time
traffic      requests out of a trace: at a rate, in slices, as a worst case
devices      `rose serve` as processes: started, kept to their cores, looked at, stopped
sending      the load generator, a process of its own
rollouts     the closed loop of trajectories, a process of its own
calibrate    the load that was asked for, as a rate; the budgets
store        what was measured so far, one file per segment and mode
running      the measuring itself
figures      from what was measured to rows and overall figures
bars         what was wanted
"""
