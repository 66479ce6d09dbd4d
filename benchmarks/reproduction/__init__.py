"""The parts of benchmarks/paper.py. The job loop itself is `rose.sim.job_loop`.

setups       the paper's two set-ups, the workload, and every constant, each stated once
sharing      borrowed devices under each way of sharing: what they lend, and what their users notice
competitors  every competitor as a router, a loop and a supply of devices, and the runs
comparison   ratios within a seed, their intervals, the rows and what was wanted
tables       the same as Markdown, out of the JSON file
"""
