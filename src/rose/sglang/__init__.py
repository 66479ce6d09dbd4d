"""SGLang as an engine of ROSE: a status segment for serving, a gate for rollouts, and what joins them.

    ROSE_SGLANG=serving sglang serve --model-path MODEL    beside which rollouts may run
    rose lend sglang --rollout-model MODEL ...             starts and keeps the rollout engine

Everything that does not know an engine (segments, step arbiter, session of `rose lend`) is shared with `rose.vllm`.
"""
